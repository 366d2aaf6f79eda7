"""The memory plan: counts against the models and the published figures, estimates against compiled programs, refusals."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from videodiff import memory, stages
from videodiff.attention import AttentionSpec, make_attend
from videodiff.configs import TextEncoderConfig, TransformerConfig, VaeConfig
from videodiff.grid import LatentLayout, VideoGeometry
from videodiff.memory import (
    GIB,
    LIMIT_ENV,
    Available,
    NotEnoughMemory,
    Workload,
    available_memory,
    check_memory,
    plan_memory,
    text_parameters,
    transformer_parameters,
    vae_parameters,
)
from videodiff.models.transformer import Context, WanTransformer
from videodiff.models.vae import WanVAE
from videodiff.text.umt5 import UMT5Encoder
from videodiff.tiny.train_vae import CONFIG as SHIPPED_VAE

WAN_1_3B = TransformerConfig(num_attention_heads=12, ffn_dim=8960, num_layers=30)
VAE_2_1 = VaeConfig(latents_mean=(0.0,) * 16, latents_std=(1.0,) * 16)
VAE_2_2 = VaeConfig(
    latents_mean=(0.0,) * 48,
    latents_std=(1.0,) * 48,
    base_dim=160,
    decoder_base_dim=256,
    z_dim=48,
    is_residual=True,
    in_channels=12,
    out_channels=12,
    patch_size=2,
    scale_factor_spatial=16,
)
UMT5_XXL = TextEncoderConfig()
LAYOUT = LatentLayout(8, 4, (1, 2, 2), 16)
JOB = Workload(WAN_1_3B, VAE_2_1, UMT5_XXL, VideoGeometry(480, 832, 81, LAYOUT), text_dtype=jnp.bfloat16)
AMPLE = Available(1 << 60, "test")


def count(make) -> int:
    return sum(x.size for x in jax.tree.leaves(nnx.state(nnx.eval_shape(make))))


@pytest.mark.parametrize(
    ("config", "total", "kept"),
    [  # models.md 1.2; those kept in float32 are "about" 3.1M, 29.2M and 11.0M there
        (WAN_1_3B, 1_418_996_800, 3_127_296),
        (TransformerConfig(), 14_288_491_584, 29_184_000),
        (
            TransformerConfig(num_attention_heads=24, ffn_dim=14336, num_layers=30, in_channels=48, out_channels=48),
            4_999_787_712,
            10_973_184,
        ),
    ],
)
def test_published_transformers(config: TransformerConfig, total: int, kept: int) -> None:
    assert transformer_parameters(config) == (total, kept)


def test_published_text_encoder_and_vaes() -> None:
    assert text_parameters(UMT5_XXL) == 5_680_910_336
    # the table splits off the two 1x1x1 convolutions: 1056 and 272 parameters in 2.1, 9312 and 2352 in 2.2
    assert vae_parameters(VAE_2_1) == (53_595_872 + 1056, 73_295_331 + 272)
    assert vae_parameters(VAE_2_2) == (149_627_776 + 9312, 555_049_228 + 2352)


@pytest.mark.parametrize(
    "config",
    [
        TransformerConfig(
            num_attention_heads=3, attention_head_dim=10, text_dim=7, freq_dim=6, ffn_dim=11, num_layers=1
        ),
        TransformerConfig(
            num_attention_heads=1,
            attention_head_dim=22,
            in_channels=5,
            out_channels=4,
            num_layers=3,
            cross_attn_norm=False,
        ),
    ],
)
def test_counts_of_odd_transformers(config: TransformerConfig) -> None:
    def make() -> WanTransformer:
        return WanTransformer(config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))

    leaves = jax.tree.leaves(nnx.state(nnx.eval_shape(make)))
    in_f32 = sum(x.size for x in leaves if x.dtype == jnp.float32)
    assert transformer_parameters(config) == (count(make), in_f32)


def test_counts_of_odd_text_encoders_and_vaes() -> None:
    text = TextEncoderConfig(vocab_size=31, d_model=6, d_kv=4, d_ff=9, num_layers=3, num_heads=5)
    assert text_parameters(text) == count(lambda: UMT5Encoder(text, rngs=nnx.Rngs(0)))
    for base in (VAE_2_1, VAE_2_2):
        for change in ({"num_res_blocks": 1}, {"dim_mult": (2, 3, 4), "temperal_downsample": (True, False)}):
            scale = {"scale_factor_spatial": base.scale_factor_spatial // 2, "scale_factor_temporal": 2}
            vae = dataclasses.replace(
                base, base_dim=6, decoder_base_dim=8, **change, **(scale if "dim_mult" in change else {})
            )
            assert sum(vae_parameters(vae)) == count(lambda vae=vae: WanVAE(vae, rngs=nnx.Rngs(0)))


def test_the_small_wan_with_its_large_text_encoder_fits_14_gib() -> None:
    plan = check_memory(JOB, AMPLE)
    assert plan.peak <= 14 * GIB
    assert plan.resident_peak > 24 * GIB  # so stages must be freed on a 24 GiB host
    text, denoiser, decoder = plan.stages
    assert text.weights == 2 * 5_680_910_336
    assert denoiser.weights == 4 * 1_418_996_800
    assert decoder.weights == 4 * 126_892_531


def test_kept_float32_weights_count_in_a_half_precision_model() -> None:
    half = plan_memory(dataclasses.replace(JOB, dtype=jnp.bfloat16, platform="tpu")).stages[1]
    assert half.weights == 2 * (1_418_996_800 - 3_127_296) + 4 * 3_127_296


def test_table() -> None:
    text = str(plan_memory(JOB))
    lines = text.splitlines()
    assert [line.split("  ")[0] for line in lines[:4]] == ["stage", "text encoder", "denoiser", "decoder"]
    assert lines[1].split()[2:4] == ["10.58", "GiB"]
    assert lines[-1].startswith(f"planned peak {plan_memory(JOB).peak / GIB:.2f} GiB")
    assert max(map(len, lines)) <= 110


@pytest.mark.parametrize(
    "change",
    [
        {"batch": 2},
        {"guided": True},
        {"dtype": np.float32},
        {"text_dtype": np.float32},
        {"geometry": VideoGeometry(480, 832, 85, LAYOUT)},
        {"geometry": VideoGeometry(496, 832, 81, LAYOUT)},
        {"float_output": True},
        {"encode_text": True},
    ],
    ids=lambda c: next(iter(c)),
)
def test_more_work_never_needs_less(change: dict) -> None:
    less = dataclasses.replace(JOB, guided=False, encode_text=False, dtype=np.float16, platform="gpu")
    less = dataclasses.replace(less, platform="cpu" if "float_output" in change else "gpu")
    if "text_dtype" in change:
        less = dataclasses.replace(less, encode_text=True)
    a, b = plan_memory(less), plan_memory(dataclasses.replace(less, **change))
    assert sum(s.total for s in b.stages) > sum(s.total for s in a.stages)
    assert b.peak >= a.peak


def test_batches_decode_one_after_the_other() -> None:
    one, eight = (plan_memory(dataclasses.replace(JOB, batch=n)).stages[-1].working for n in (1, 8))
    assert eight - one == 7 * 81 * 480 * 832 * 3  # only the finished uint8 frames add up


def temp_bytes(compiled) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


def test_text_stage_bounds_the_compiled_program() -> None:
    """UMT5-XXL, weights in bfloat16, two prompts of 512 tokens: compiled from shapes alone."""

    def make() -> UMT5Encoder:
        return UMT5Encoder(UMT5_XXL, dtype=jnp.float32, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))

    graph, state = nnx.split(nnx.eval_shape(make))
    ids = jax.ShapeDtypeStruct((2, 512), jnp.int32)
    run = jax.jit(lambda s, i, m: nnx.merge(graph, s)(i, m))
    used = temp_bytes(run.lower(state, ids, ids).compile())
    planned = plan_memory(JOB).stages[0].working
    assert used <= planned <= 1.4 * used


def test_denoise_stage_bounds_the_compiled_program() -> None:
    """The 1.3B model at 480p, 81 frames, both branches, dense attention: compiled from shapes alone."""
    graph, state = nnx.split(nnx.eval_shape(lambda: WanTransformer(WAN_1_3B, rngs=nnx.Rngs(0))))
    grid = JOB.geometry.token_grid
    attend = make_attend("dense", AttentionSpec(grid=grid, head_dim=128))

    def forward(s, latents, t, tokens, bias):
        return nnx.merge(graph, s)(latents, t, Context(tokens, bias), attend)

    shapes = [(2, *JOB.geometry.latent_shape), (2,), (2, 513, WAN_1_3B.width), (2, 513)]
    operands = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    used = temp_bytes(jax.jit(forward).lower(state, *operands).compile())
    planned = plan_memory(JOB).stages[1].working
    assert used <= planned <= 1.4 * used


def test_decode_stage_bounds_the_compiled_program() -> None:
    """A small VAE of the 2.2 form at 720p, its carried state donated. Scratch outside XLA's account comes on top."""
    shorter = {"dim_mult": (1, 2, 4), "temperal_downsample": (True, True), "scale_factor_spatial": 8}
    small = dataclasses.replace(VAE_2_2, base_dim=16, decoder_base_dim=16, num_res_blocks=1, **shorter)
    job = dataclasses.replace(JOB, vae=small, geometry=VideoGeometry(704, 1280, 5, LatentLayout(8, 4, (1, 2, 2), 48)))
    graph, state = nnx.split(nnx.eval_shape(lambda: WanVAE(small, rngs=nnx.Rngs(0))))
    _, rows, cols, channels = job.geometry.latent_shape
    z = jax.ShapeDtypeStruct((1, 1, rows, cols, channels), jnp.float32)
    _, carry = jax.eval_shape(lambda s, z: nnx.merge(graph, s).decode_first(z), state, z)
    carried = sum(4 * x.size for x in jax.tree.leaves(carry))
    assert carried == 4 * memory._decoder_state(small, rows, cols)
    step = jax.jit(lambda s, z, c: nnx.merge(graph, s).decode_next(z, c), donate_argnums=2)
    used = carried + temp_bytes(step.lower(state, z, carry).compile())
    planned = plan_memory(job).stages[-1].working
    assert used <= planned <= 2 * used


def test_encode_stage_bounds_the_compiled_program() -> None:
    """The published 2.1 VAE at 480p and the shipped one at 1440p: enlarging and encoding one latent frame."""
    for vae, geometry in (
        (VAE_2_1, VideoGeometry(480, 832, 81, LatentLayout(8, 4, (1, 2, 2), 16))),
        (SHIPPED_VAE, VideoGeometry(1440, 2560, 17, LatentLayout(16, 4, (1, 2, 2), 16))),
    ):
        job = dataclasses.replace(JOB, vae=vae, geometry=geometry, encode_video=True)
        graph, weights = nnx.split(nnx.eval_shape(lambda vae=vae: WanVAE(vae, rngs=nnx.Rngs(0))))
        first, some = (jax.ShapeDtypeStruct((1, n, 256, 448, 3), jnp.float32) for n in (1, 4))
        _, carry = jax.eval_shape(partial(stages._encode_first, graph, geometry=geometry), weights, first)
        compiled = stages._encode_next.lower(graph, weights, some, geometry, carry).compile()
        used = sum(4 * x.size for x in jax.tree.leaves(carry)) + temp_bytes(compiled)
        planned = next(s for s in plan_memory(job).stages if s.name == "encoder").working
        assert used <= planned <= 2.5 * used, (used, planned)


def refused(job: Workload, gib: float) -> str:
    with pytest.raises(NotEnoughMemory) as e:
        check_memory(job, Available(int(gib * GIB), "MemAvailable"))
    return str(e.value)


def test_refusal_says_numbers_table_and_what_helps() -> None:
    text = refused(dataclasses.replace(JOB, text_dtype=np.float32), 14)
    peak = plan_memory(dataclasses.replace(JOB, text_dtype=np.float32)).peak
    assert text.startswith(
        f"the text encoder needs {peak / GIB:.2f} GiB of memory and 14.00 GiB are available (MemAvailable)"
    )
    assert str(plan_memory(dataclasses.replace(JOB, text_dtype=np.float32))) in text
    fits = plan_memory(JOB).peak / GIB
    assert f"any of these makes it fit: text encoder weights in bfloat16 ({fits:.2f} GiB)" in text
    assert LIMIT_ENV in text


def test_refusal_adds_changes_up_when_none_is_enough() -> None:
    job = dataclasses.replace(JOB, batch=4, geometry=VideoGeometry(720, 1280, 81, LAYOUT))
    text = refused(job, 13)
    assert "together these make it fit (" in text
    advice = text.split("remedy: ")[1]
    assert "one video at a time" in advice
    assert "height=" in advice


def test_refusal_when_nothing_helps() -> None:
    assert "use a machine with more memory: the smallest form of this job still needs" in refused(JOB, 2)


def test_exactly_enough_is_enough() -> None:
    peak = plan_memory(JOB).peak
    assert check_memory(JOB, Available(peak, "test")).peak == peak
    with pytest.raises(NotEnoughMemory):
        check_memory(JOB, Available(peak - 1, "test"))


def put(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """16 GiB free, a process that holds 1 GiB."""
    monkeypatch.delenv(LIMIT_ENV, raising=False)
    put(
        tmp_path,
        proc__meminfo="MemTotal: 99 kB\nMemAvailable:   16777216 kB\n",
        proc__self__status="VmRSS:\t 1048576 kB\n",
        proc__self__cgroup="0::/\n",
    )
    return tmp_path


CPU = jax.devices("cpu")[0]


def test_what_the_kernel_calls_available_plus_what_the_process_holds(machine: Path) -> None:
    assert available_memory(CPU, machine) == Available(17 * GIB, "MemAvailable")


def test_a_container_limit_counts(machine: Path) -> None:
    """Version 2; 8 GiB limit, 3 used, of which 1 is page cache that is given back."""
    put(machine, proc__self__cgroup="0::/box/inner\n")
    group = {"memory_dot_max": f"{8 * GIB}\n", "memory_dot_current": f"{3 * GIB}\n"}
    put(machine, **{f"sys__fs__cgroup__box__{k}": v for k, v in group.items()})
    put(machine, sys__fs__cgroup__box__memory_dot_stat=f"anon 5\ninactive_file {GIB}\nactive_file 7\n")
    put(machine, **{f"sys__fs__cgroup__box__inner__{k}": "max\n" for k in group})
    assert available_memory(CPU, machine) == Available(7 * GIB, "memory.max of the control group")


def test_a_container_limit_of_version_1(machine: Path) -> None:
    put(machine, proc__self__cgroup="9:name=systemd:/\n4:cpu,memory:/elsewhere\n")
    put(
        machine,
        sys__fs__cgroup__memory__memory_dot_limit_in_bytes=str(4 * GIB),
        sys__fs__cgroup__memory__memory_dot_usage_in_bytes=str(2 * GIB),
        sys__fs__cgroup__memory__memory_dot_stat=f"inactive_file 1\ntotal_inactive_file {GIB}\n",
    )
    found = available_memory(CPU, machine)
    assert found.source == "memory.limit_in_bytes of the control group"
    assert found.nbytes in (3 * GIB + 1, 4 * GIB)


def test_no_limit_in_version_1(machine: Path) -> None:
    put(machine, proc__self__cgroup="4:memory:/\n")
    put(
        machine,
        sys__fs__cgroup__memory__memory_dot_limit_in_bytes="9223372036854771712",
        sys__fs__cgroup__memory__memory_dot_usage_in_bytes="1",
    )
    assert available_memory(CPU, machine).source == "MemAvailable"


def test_the_environment_overrides(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_ENV, "3.5")
    assert available_memory(CPU, machine) == Available(int(3.5 * GIB), LIMIT_ENV)
    for bad in ("plenty", "-1", "0", "nan"):
        monkeypatch.setenv(LIMIT_ENV, bad)
        with pytest.raises(ValueError, match="must be a positive number of GiB"):
            available_memory(CPU, machine)


def test_without_proc_the_physical_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIMIT_ENV, raising=False)
    found = available_memory(CPU, tmp_path)
    assert found.source == "physical memory"
    assert found.nbytes > 1 << 20


def test_accelerators_report_their_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        platform, device_kind = "tpu", "TPU v5e"

        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": 16 * GIB, "bytes_in_use": 1}

    monkeypatch.delenv(LIMIT_ENV, raising=False)
    assert available_memory(Device()) == Available(16 * GIB, "memory of TPU v5e")
