"""Muon: orthogonal updates, grouping by shape, the split between the two optimisers."""

import jax
import jax.numpy as jnp
import numpy as np

from videodiff.tiny import optim


def test_updates_are_nearly_orthogonal():
    x = jax.random.normal(jax.random.key(0), (3, 16, 48))
    s = np.linalg.svd(np.asarray(optim.orthogonalise(x)), compute_uv=False)
    assert s.min() > 0.5
    assert s.max() < 1.4


def test_grouping_does_not_mix_parameters():
    k = jax.random.split(jax.random.key(1), 3)
    params = {
        "dit/block_stack/a/kernel": jax.random.normal(k[0], (2, 16, 24)),
        "dit/b/kernel": jax.random.normal(k[1], (24, 16)),
        "vae/c/kernel": jax.random.normal(k[2], (3, 1, 1, 8, 16)),
    }
    tx = optim.scale_by_muon()
    together, _ = tx.update(params, tx.init(params))
    for name, g in params.items():
        alone, _ = tx.update({name: g}, tx.init({name: g}))
        np.testing.assert_allclose(np.asarray(together[name]), np.asarray(alone[name]), atol=2e-5)


def test_who_gets_what():
    params = {
        "dit/block_stack/attn1/to_q/kernel": jnp.zeros((6, 128, 128)),
        "dit/block_stack/attn1/to_q/bias": jnp.zeros((6, 128)),
        "dit/proj_out/kernel": jnp.zeros((128, 64)),
        "text/embedding": jnp.zeros((99, 128)),
        "conv/kernel": jnp.zeros((3, 3, 3, 32, 32)),
    }
    assert list(optim.labels(params).values()) == ["muon", "adam", "adam", "adam", "muon"]


def test_it_minimises():
    target = jax.random.normal(jax.random.key(2), (16, 16))
    params = {"a/kernel": jnp.zeros((16, 16))}
    tx = optim.make(params)
    state = tx.init(params)
    for i in range(60):
        grads = {"a/kernel": params["a/kernel"] - target}
        updates, state = tx.update(grads, state, params)
        params = {k: params[k] - 0.3 * (1 - i / 60) * updates[k] for k in params}
    assert float(jnp.abs(params["a/kernel"] - target).mean()) < 0.15
