"""The pipeline's promises on a small random model: batches, seeds, latents, callbacks, interruption, bad weights."""

import json
import re
import shutil
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.models import make_folder
from videodiff import media, noise, pipeline
from videodiff.attention import AttentionSpec, make_attend
from videodiff.grid import TokenGrid
from videodiff.latents import SavedLatents
from videodiff.memory import LIMIT_ENV, NotEnoughMemory
from videodiff.pipeline import Interrupted, Pipeline
from videodiff.sampling.loop import NonFiniteError
from videodiff.text.encode import encode_prompts

SIZE = {"height": 32, "width": 48, "num_frames": 5, "num_inference_steps": 3, "guidance_scale": 3.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def pipe(folder):
    return Pipeline.from_pretrained(folder)


@pytest.fixture(scope="module")
def one(pipe):
    return pipe.generate("a red ball", seed=7, output_type="np", **SIZE)


def test_shape_and_range(one):
    assert one.frames.shape == (1, 5, 32, 48, 3)
    assert one.frames.dtype == np.float32
    assert one.frames.min() >= 0
    assert one.frames.max() <= 1
    assert one.frames.std() > 0.02


def test_two_runs_are_bit_equal_and_nothing_recompiles(pipe, one):
    again = pipe.generate("a red ball", seed=7, output_type="np", **SIZE)
    np.testing.assert_array_equal(one.frames, again.frames)
    assert again.report["sampling"]["compilations"] == 0


def test_uint8_is_the_rounded_float(pipe, one):
    frames = pipe.generate("a red ball", seed=7, **SIZE).frames
    assert frames.dtype == np.uint8
    np.testing.assert_array_equal(frames, media.to_uint8(one.frames))


def test_another_seed_and_another_prompt_change_the_video(pipe, one):
    for change in ({"prompt": "a red ball", "seed": 8}, {"prompt": "the cat jumps", "seed": 7}):
        other = pipe.generate(change.pop("prompt"), output_type="np", **change, **SIZE)
        assert np.abs(other.frames - one.frames).max() > 1e-3


def test_batch_item_equals_the_prompt_alone(pipe, one):
    batch = pipe.generate(["the cat jumps", "a red ball"], seed=7, output_type="np", **SIZE)
    np.testing.assert_allclose(batch.frames[1], one.frames[0], atol=2e-4)
    copies = pipe.generate("a red ball", seed=6, num_videos_per_prompt=2, output_type="np", **SIZE)
    assert list(copies.seeds) == [6, 7]
    np.testing.assert_allclose(copies.frames[1], one.frames[0], atol=2e-4)


def test_embeddings_in_place_of_text(pipe, one):
    text = encode_prompts(pipe._text.module, pipe.tokenizer, ["a red ball"])
    given = pipe.generate(prompt_embeds=np.asarray(text.embeds), seed=7, output_type="np", **SIZE)
    np.testing.assert_allclose(given.frames, one.frames, atol=1e-5)
    with pytest.raises(ValueError, match="exclude each other"):
        pipe.generate("a red ball", prompt_embeds=np.asarray(text.embeds), **SIZE)


def test_latents_in_and_out(pipe):
    noise = np.random.default_rng(0).normal(size=(1, 4, 2, 4, 6)).astype(np.float32)
    out = pipe.generate("a red ball", latents=noise, output_type="latent", **SIZE)
    assert out.frames.shape == noise.shape
    with pytest.raises(ValueError, match="no frames"):
        out.uint8_frames()
    with pytest.raises(ValueError, match=r"latents must be \[batch, channels, frames, rows, columns\]"):
        pipe.generate("a red ball", latents=noise[:, :, :1], **SIZE)


def test_latents_are_saved_before_decoding_and_decode_alone(pipe, one, tmp_path):
    out = tmp_path / "deep" / "ball.mp4"
    result = pipe.generate("a red ball", seed=7, output_path=out, output_type="np", **SIZE)
    assert result.latents_path == out.with_suffix(".latents.safetensors")
    assert SavedLatents.load(result.latents_path).prompts == ("a red ball",)
    again = pipe.decode(result.latents_path, output_type="np")
    np.testing.assert_array_equal(again.frames, one.frames)


def test_save_writes_video_and_report(pipe, one, tmp_path):
    files = one.save(tmp_path / "x.mp4", contact_sheet=True, gif=True, frames_dir=tmp_path / "frames")
    assert {f.name for f in files} == {"x.mp4", "x.gif", "frames", "x.png", "x.json"}
    assert media.read_metadata(tmp_path / "x.mp4")["prompt"] == "a red ball"
    report = json.loads((tmp_path / "x.json").read_text())
    assert report["seeds"] == [7]
    assert len(report["steps"]) == 3
    assert report["steps"][0]["layers"][0]["kernel"] == "dense"


def test_sparse_run_reports_routes_and_its_dense_phase_is_dense(pipe, tmp_path):
    file = tmp_path / "half.yaml"
    file.write_text(
        "name: half\nmodels:\n  small:\n    dense_steps: {share: 0.34}\n    sink: none\n    resolutions: {256p: {density: 0.9}}\n"
    )
    seen = {}

    def keep(name):
        def callback(p, step, timestep, kwargs):
            seen[name, step] = kwargs["latents"]

        return callback

    size = SIZE | {"height": 128, "width": 128, "num_frames": 9}
    dense = pipe.generate("a red ball", seed=7, output_type="np", callback_on_step_end=keep("dense"), **size)
    sparse = pipe.generate(
        "a red ball", seed=7, output_type="np", schedule=str(file), callback_on_step_end=keep("sparse"), **size
    )
    np.testing.assert_array_equal(seen["dense", 0], seen["sparse", 0])
    assert np.abs(dense.frames - sparse.frames).max() > 0
    steps = sparse.report["steps"]
    assert steps[0]["layers"][0]["kernel"] == "dense"
    assert steps[1]["layers"][0]["kernel"] == "svg"
    assert set("".join(steps[1]["layers"][0]["routes"])) <= {"S", "T"}
    assert sparse.report["attention"]["executed_density"]["0.9"] <= 0.9


def test_callback_may_replace_latents(pipe, one):
    def zero(p, step, timestep, kwargs):
        return {"latents": np.zeros_like(kwargs["latents"])} if step == 2 else None

    out = pipe.generate("a red ball", seed=7, output_type="latent", callback_on_step_end=zero, **SIZE)
    assert not out.frames.any()


def test_ctrl_c_can_be_resumed(pipe, one, tmp_path):
    def stop(p, step, timestep, kwargs):
        if step == 1:
            raise KeyboardInterrupt

    out = tmp_path / "ball.mp4"
    with pytest.raises(Interrupted, match="--resume") as error:
        pipe.generate("a red ball", seed=7, output_path=out, callback_on_step_end=stop, output_type="np", **SIZE)
    state = error.value.state_path
    assert state.exists()
    resumed = pipe.generate("a red ball", seed=7, resume=state, output_type="np", **SIZE)
    np.testing.assert_array_equal(resumed.frames, one.frames)
    with pytest.raises(ValueError, match="made by another request"):
        pipe.generate("the cat jumps", seed=7, resume=state, **SIZE)


def test_freed_weights_give_the_same_video(pipe, one):
    pipe.free()
    again = pipe.generate("a red ball", seed=7, output_type="np", **SIZE)
    np.testing.assert_array_equal(again.frames, one.frames)


def test_bad_numbers_in_the_model_name_the_step_and_write_nothing(folder, tmp_path):
    pipe = Pipeline.from_pretrained(folder)
    module = pipe._transformer.module
    module.proj_out.bias[...] = module.proj_out.bias[...] * np.nan
    with pytest.raises(NonFiniteError, match="step 1 of 3"):
        pipe.generate("a red ball", seed=7, output_path=tmp_path / "x.mp4", **SIZE)
    assert not list(tmp_path.iterdir())


def test_too_much_memory_is_refused_before_loading(folder, monkeypatch):
    monkeypatch.setenv(LIMIT_ENV, "0.05")
    pipe = Pipeline.from_pretrained(folder)
    with pytest.raises(NotEnoughMemory, match="remedy"):
        pipe.generate("a red ball", **SIZE)
    assert not pipe._transformer.loaded


def test_unwritable_output_is_refused_before_loading(folder, tmp_path):
    (tmp_path / "file").write_text("")
    pipe = Pipeline.from_pretrained(folder)
    with pytest.raises(OSError, match="not a folder"):
        pipe.generate("a red ball", output_path=tmp_path / "file" / "x.mp4", **SIZE)
    assert not pipe._text.loaded


def test_backend_and_schedule_must_agree(pipe):
    with pytest.raises(ValueError, match="has nothing to do under schedule"):
        pipe.generate("a red ball", attention_backend="svg", **SIZE)
    with pytest.raises(ValueError, match="attention_backend='dense'"):
        pipe.generate("a red ball", attention_backend="dense", schedule="aggressive", **SIZE)


def test_one_branch_without_guidance(pipe):
    out = pipe.generate("a red ball", seed=7, output_type="np", **(SIZE | {"guidance_scale": 1.0}))
    assert not out.report["steps"][0]["guided"]


@pytest.fixture(scope="module")
def other(folder, tmp_path_factory):
    """The same shapes with other weights: one bit of the VAE's last tensor."""
    copy = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(folder, copy)
    file = next((copy / "vae").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(bytes(data))
    return Pipeline.from_pretrained(copy)


def test_a_fingerprint_follows_the_weights_not_the_place(folder, pipe, other, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    assert Pipeline.from_pretrained(tmp_path / "copy").weights == pipe.weights
    assert other.weights != pipe.weights


def test_a_run_is_not_finished_with_other_weights(pipe, other, tmp_path):
    result = pipe.generate("a red ball", seed=7, output_path=tmp_path / "a.mp4", **SIZE)
    with pytest.raises(ValueError, match=r"made with other weights .* name their folder with --model_path"):
        other.decode(result.latents_path)

    def stop(pipeline, step, timestep, values):
        raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        pipe.generate("a red ball", seed=7, output_path=tmp_path / "b.mp4", callback_on_step_end=stop, **SIZE)
    with pytest.raises(ValueError, match="made with other weights"):
        other.generate("a red ball", seed=7, resume=caught.value.state_path, **SIZE)


def test_what_was_given_besides_text_is_in_the_metadata(pipe, tmp_path):
    embeds = np.ones((1, 4, pipe.folder.transformer.text_dim), np.float32)
    noise = np.random.default_rng(0).standard_normal((1, 4, 2, 4, 6))
    about = pipe.generate(prompt_embeds=embeds, latents=noise, seed=7, **SIZE).metadata
    assert {"weights", "prompt_embeds", "initial_noise"} <= about.keys()
    assert "initial_noise" not in pipe.generate(prompt_embeds=2 * embeds, seed=7, **SIZE).metadata

    def stop(pipeline, step, timestep, values):
        raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        pipe.generate(
            prompt_embeds=embeds,
            latents=noise,
            seed=7,
            output_path=tmp_path / "a.mp4",
            callback_on_step_end=stop,
            **SIZE,
        )
    state = caught.value.state_path
    with pytest.raises(ValueError, match=r"made by another request \(prompt_embeds"):
        pipe.generate(prompt_embeds=2 * embeds, seed=7, resume=state, **SIZE)
    resumed = pipe.generate(prompt_embeds=embeds, seed=7, resume=state, **SIZE)
    assert resumed.metadata == about


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"model_path": "nowhere"},
            "model_path='nowhere' changes nothing in generate; give it to Pipeline.from_pretrained",
        ),
        ({"model": "wan2.1-t2v-14b"}, "give it to Pipeline.from_pretrained"),
        ({"gif": True}, "gif=True changes nothing in generate; give it to Result.save"),
        ({"quality": 20}, "give it to Result.save"),
        ({"dtype": "bfloat16"}, "loaded in float32; give it to Pipeline.from_pretrained"),
    ],
)
def test_options_a_loaded_pipeline_cannot_follow_are_refused(pipe, options, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        pipe.generate("a red ball", **options, **SIZE)


def test_embeddings_are_checked(pipe):
    width = pipe.folder.transformer.text_dim
    with pytest.raises(
        ValueError, match=rf"prompt_embeds must be \[prompts, tokens, {width}\] .* \(1, 4, {width + 1}\)"
    ):
        pipe.generate(prompt_embeds=np.ones((1, 4, width + 1)), **SIZE)
    good = np.ones((1, 4, width))
    with pytest.raises(ValueError, match="negative_prompt_embeds holds NaN"):
        pipe.generate(prompt_embeds=good, negative_prompt_embeds=good * np.nan, **SIZE)


# --- a smaller size first, then refinement -------------------------------------------------------------------------------

REFINED = {"height": 64, "width": 96, "num_frames": 5, "num_inference_steps": 3, "base_res": "48x32", "refine_steps": 2}


@pytest.fixture(scope="module")
def refined(pipe):
    return pipe.generate("a red ball", seed=7, output_type="np", **REFINED)


def test_refinement_equals_its_parts_put_together_by_hand(pipe):
    """The base is the direct run at that size; it is decoded, enlarged, encoded whole, noised, and integrated by Euler steps."""
    options = REFINED | {"solver": "euler", "guidance_scale": 1.0, "denoise_strength": 0.6, "flow_shift": 2.0}
    got = pipe.generate("a red ball", seed=7, output_type="latent", **options).frames
    direct = {k: v for k, v in options.items() if k not in ("base_res", "refine_steps", "denoise_strength")}
    small = pipe.generate("a red ball", seed=7, output_type="np", **(direct | {"height": 32, "width": 48})).frames
    vae, dit = pipe._vae.module, pipe._transformer.module
    large = jnp.clip(jax.image.resize(jnp.asarray(small), (1, 5, 64, 96, 3), "cubic"), 0, 1)
    clean = vae.normalize(vae.encode(large * 2 - 1)[0])
    key = jax.random.fold_in(jax.random.key(7), 1)
    x = 0.4 * clean + 0.6 * jax.random.normal(key, clean.shape[1:])[None]
    text = encode_prompts(pipe._text.module, pipe.tokenizer, ["a red ball"])
    context = dit.encode_context(jnp.asarray(text.embeds))
    attend = make_attend("dense", AttentionSpec(TokenGrid(2, 4, 6), head_dim=24))
    half = 0.6 / (2 - 0.6) / 2  # halfway on the unshifted grid
    levels = [0.6, 2 * half / (1 + half), 0.0]
    for now, then in pairwise(levels):
        x = x + (then - now) * dit(x, jnp.array([1000 * now], jnp.float32), context, attend)
    assert np.linalg.norm(got - noise.to_published(np.asarray(x))) <= 1e-4 * np.linalg.norm(got)


def test_a_refined_video_has_its_size_and_its_report(refined):
    assert refined.frames.shape == (1, 5, 64, 96, 3)
    assert [(p["name"], p["width"], p["steps"]) for p in refined.report["passes"]] == [
        ("base", 48, 3),
        ("refine", 96, 2),
    ]
    assert [s["pass"] for s in refined.report["steps"]] == ["base"] * 3 + ["refine"] * 2
    assert refined.report["passes"][1]["first_sigma"] == pytest.approx(0.75)
    assert {"base_s", "upscale_s", "refine_s", "denoise_s"} <= refined.report["stages"].keys()


def test_a_refined_batch_item_equals_the_prompt_alone(pipe, refined):
    batch = pipe.generate(["the cat jumps", "a red ball"], seed=7, output_type="np", **REFINED)
    np.testing.assert_allclose(batch.frames[1], refined.frames[0], atol=2e-4)


def test_the_schedule_is_for_the_refinement_and_the_base_stays_dense(pipe, tmp_path):
    file = tmp_path / "half.yaml"
    file.write_text("name: half\nmodels:\n  small:\n    sink: none\n    resolutions: {256p: {density: 0.9}}\n")
    size = REFINED | {"height": 128, "width": 192, "num_frames": 9, "base_res": "96x64"}
    steps = pipe.generate("a red ball", seed=7, schedule=str(file), **size).report["steps"]
    assert [s["layers"][0]["kernel"] for s in steps] == ["dense"] * 3 + ["svg"] * 2


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_refined_run_is_resumed_in_the_pass_it_was_in(pipe, refined, tmp_path, at):
    seen = []

    def stop(p, step, timestep, kwargs):
        seen.append((step, kwargs["latents"].shape[-1]))
        if step == at:
            raise KeyboardInterrupt

    out = tmp_path / "ball.mp4"
    with pytest.raises(Interrupted, match=f"after step {at + 1} of 5") as error:
        pipe.generate("a red ball", seed=7, output_path=out, callback_on_step_end=stop, output_type="np", **REFINED)
    assert seen == [(i, 6 if i < 3 else 12) for i in range(at + 1)]
    resumed = pipe.generate("a red ball", seed=7, resume=error.value.state_path, output_type="np", **REFINED)
    np.testing.assert_array_equal(resumed.frames, refined.frames)


def test_freed_between_passes_gives_the_same_video(folder, refined, monkeypatch):
    monkeypatch.setattr(pipeline, "KEEP_SHARE", 0.0)
    pipe = Pipeline.from_pretrained(folder)
    again = pipe.generate("a red ball", seed=7, output_type="np", **REFINED)
    np.testing.assert_array_equal(again.frames, refined.frames)
    assert pipe._transformer.loads == 2


def test_given_noise_has_the_size_of_the_base(pipe):
    noise = np.random.default_rng(0).normal(size=(1, 4, 2, 8, 12))
    with pytest.raises(ValueError, match="sampled at 48x32 first, so this is the size of its noise"):
        pipe.generate("a red ball", latents=noise, **REFINED)
    pipe.generate("a red ball", latents=noise[..., :4, :6], **REFINED)
