"""The shipped model's world, its judge and its training. Never imported by the product.

Owns: everything it takes to make videodiff/assets/tiny from nothing. Does not own: the model classes, which are the product's own.
Invariant: clips are drawn from a scene alone, so the same scene gives the same clip at every size up to sampling.
"""
