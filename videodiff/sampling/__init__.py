"""Sampling: sigma grids, solvers with explicit state, and the host loop.

Owns nothing itself: import from `sigmas` (numpy only), `solvers` or `loop`. Invariant: importing this package alone
imports no JAX.
"""
