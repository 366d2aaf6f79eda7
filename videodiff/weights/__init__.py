"""Weights on disk: safetensors reading, key tables, strict loading and saving.

Owns: everything between a checkpoint folder and arrays in a model's state. Does not own: what the models compute.
Invariant: every parameter is assigned exactly once, every tensor of the files is used exactly once, or nothing loads.
"""
