"""Requests: defaults, every check and its message, and metadata that repeats a run."""

import dataclasses
import json

import pytest

from videodiff.configs import TransformerConfig
from videodiff.known import ModelInfo, info_for_shapes, known_models, model_info, read_folder_info
from videodiff.request import (
    FIELDS,
    GenerateRequest,
    canonical,
    make_request,
    read_prompts,
    request_from_metadata,
)
from videodiff.schedule import resolution_sizes
from videodiff.sizes import parse_size

TINY = model_info("tiny")
SMALL, LARGE = model_info("wan2.1-t2v-1.3b"), model_info("wan2.1-t2v-14b")


def resolve(info: ModelInfo = TINY, **options):
    return make_request(**{"seed": 3, **options}).resolve(info)


# --- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "steps", "guidance", "frames", "fps", "resolution"),
    [("wan2.1-t2v-1.3b", 50, 6.0, 81, 16, "480p"), ("wan2.1-t2v-14b", 50, 5.0, 81, 16, "720p")],
)
def test_published_defaults(name, steps, guidance, frames, fps, resolution):
    r = resolve(model_info(name))
    assert (r.num_inference_steps, r.guidance_scale, r.geometry.num_frames, r.fps) == (steps, guidance, frames, fps)
    assert r.resolution == resolution
    assert r.negative_prompt.startswith("色调艳丽，过曝")
    assert r.negative_prompt.endswith("背景人很多，倒着走")
    assert r.geometry.layout.size_multiple_px == 16


@pytest.mark.parametrize(
    ("info", "res", "shift"), [(SMALL, "480p", 3.0), (SMALL, "256p", 3.0), (SMALL, "720p", 5.0), (LARGE, "480p", 5.0)]
)
def test_flow_shift_by_size(info, res, shift):
    r = resolve(info, res=res)
    assert r.flow_shift == shift
    assert r.flow_shift_source == f"default of {info.name}"


def test_flow_shift_argument_wins_and_says_so():
    assert resolve(SMALL, flow_shift=8).flow_shift_source == "argument"
    assert (
        resolve(SMALL, flow_shift=8, sources={"flow_shift": "config file a.yaml"}).flow_shift_source
        == "config file a.yaml"
    )


def test_published_shapes():
    """Shapes of the published config.json files."""
    assert (SMALL.transformer.width, SMALL.transformer.num_layers, SMALL.transformer.ffn_dim) == (1536, 30, 8960)
    assert LARGE.transformer == TransformerConfig()


def test_every_model_resolves_by_default():
    for name in known_models():
        r = resolve(model_info(name))
        assert r.model == name
        assert r.prompts == (model_info(name).example_prompt,)


def test_unknown_model_names_the_closest():
    with pytest.raises(ValueError, match=r"model='wan2.1-t2v-13b'.*did you mean 'wan2.1-t2v-1(4|.3)b'"):
        model_info("wan2.1-t2v-13b")


@pytest.mark.parametrize("info", [TINY, SMALL, LARGE], ids=lambda i: i.name)
def test_a_folder_is_recognised_by_its_shapes(info):
    factors = {"spatial_factor": info.spatial_factor, "temporal_factor": info.temporal_factor}
    assert info_for_shapes("somewhere", info.transformer, **factors).name == info.name
    other = dataclasses.replace(info.transformer, num_layers=3)
    found = info_for_shapes("somewhere", other, **factors, scheduler={"flow_shift": 7.0})
    assert (found.name, found.flow_shift, found.transformer.num_layers) == ("somewhere", 7.0, 3)
    r = resolve(found)
    assert r.flow_shift_source == "scheduler_config.json"
    assert any("none of tiny" in n for n in r.notes)
    assert found.layout == info.layout


def test_folder_configs(tmp_path):
    with pytest.raises(ValueError, match="is not a folder"):
        read_folder_info(tmp_path / "no")
    with pytest.raises(ValueError, match=r"transformer/config\.json is missing"):
        read_folder_info(tmp_path)
    for part, body in (("transformer", SMALL.transformer.to_json()), ("vae", {"scale_factor_spatial": 8})):
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text(json.dumps(body))
    assert read_folder_info(tmp_path).name == "wan2.1-t2v-1.3b"
    (tmp_path / "vae" / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        read_folder_info(tmp_path)


# --- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("info", "options", "size", "computed"),
    [
        (TINY, {"res": "256p"}, (256, 256), (256, 256)),
        (TINY, {"res": "480p"}, (480, 832), (480, 832)),
        (TINY, {"res": "720p"}, (720, 1280), (736, 1280)),
        (TINY, {"res": "1080p"}, (1080, 1920), (1088, 1920)),
        (TINY, {"res": "1440p"}, (1440, 2560), (1440, 2560)),
        (TINY, {"size": "1280*720"}, (720, 1280), (736, 1280)),
        (TINY, {"height": 1280, "width": 720}, (1280, 720), (1280, 736)),
        (TINY, {"res": "640x320"}, (320, 640), (320, 640)),
        (SMALL, {"res": "720p"}, (720, 1280), (720, 1280)),
        (SMALL, {"res": "1080p"}, (1080, 1920), (1088, 1920)),
        (SMALL, {"height": 832, "width": 480}, (832, 480), (832, 480)),
        (SMALL, {"size": "624x624"}, (624, 624), (624, 624)),
    ],
)
def test_sizes(info, options, size, computed):
    r = resolve(info, **options)
    assert (r.geometry.height, r.geometry.width) == size
    assert (r.geometry.computed_height, r.geometry.computed_width) == computed
    assert any("cropped" in n for n in r.notes) == (size != computed)


@pytest.mark.parametrize(
    ("info", "size", "words"),
    [
        (
            TINY,
            "1000x700",
            "multiples of 32 for tiny; the nearest legal sizes are 992x672, 992x704, 1024x672, 1024x704",
        ),
        (TINY, "1024x700", "the nearest legal sizes are 1024x672, 1024x704;"),
        (TINY, "10x64", "the nearest legal sizes are 32x64;"),
        (SMALL, "840x480", "multiples of 16 for wan2.1-t2v-1.3b; the nearest legal sizes are 832x480, 848x480"),
    ],
)
def test_illegal_sizes_name_legal_ones(info, size, words):
    with pytest.raises(ValueError, match=words):
        resolve(info, size=size)


def test_suggested_sizes_are_legal():
    for w, h in ((992, 672), (1024, 704)):
        assert resolve(TINY, width=w, height=h).geometry.computed_width == w


@pytest.mark.parametrize(
    ("frames", "words"), [(18, "17 and 21"), (16, "13 and 17"), (0, "num_frames=0 must be at least 1")]
)
def test_illegal_frames(frames, words):
    with pytest.raises(ValueError, match=words):
        resolve(num_frames=frames)


def test_positions_run_out():
    with pytest.raises(ValueError, match="positions for at most 1024"):
        resolve(SMALL, size="16400x16")


def test_parse_size():
    assert parse_size("1280*720") == parse_size("1280x720") == parse_size(" 1280 X 720 ") == (720, 1280)
    for bad in ("1280", "x720", "1280x720x3", "axb"):
        with pytest.raises(ValueError, match="must be WIDTHxHEIGHT"):
            parse_size(bad)


def test_known_resolutions():
    assert resolution_sizes()["1080p"] == (1080, 1920)
    assert resolution_sizes()["480p"] == (480, 832)


# --- everything else that is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"res": "740p"}, r"res='740p' is unknown; did you mean '(720p|1440p|480p)'"),
        ({"res": "720p", "height": 256, "width": 256}, "exclude each other"),
        ({"height": 256}, "must be given together"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": " \n\t"}, "prompt is empty"),
        ({"prompt": ["a", " "]}, "prompt 2 of 2 is empty"),
        ({"prompt": []}, "empty list"),
        ({"prompt": 3}, "must be a text, got int"),
        ({"prompt": "a", "prompt_path": "b"}, "exclude each other"),
        ({"negative_prompt": ["a"]}, "must be one text"),
        ({"seed": -2}, r"seed=-2 must be in \[0, 4294967295\], or -1 to pick one"),
        ({"seed": 1.5}, "seed=1.5 must be a whole number"),
        ({"seed": [1, 2]}, "one value a video"),
        ({"num_inference_steps": 0}, "num_inference_steps=0 must be at least 1"),
        ({"num_inference_steps": 2.5}, "must be a whole number"),
        ({"num_inference_steps": True}, "must be a whole number"),
        ({"num_frames": "seven"}, "num_frames='seven' must be a whole number"),
        ({"num_videos_per_prompt": 0}, "must be at least 1"),
        ({"guidance_scale": 0.5}, "must be at least 1; 1 runs without guidance"),
        ({"guidance_scale": "high"}, "guidance_scale='high' must be a number"),
        ({"flow_shift": 0}, "flow_shift=0 must be positive"),
        ({"flow_shift": float("nan")}, "must be finite"),
        ({"fps": 0}, "fps=0 must be above 0"),
        ({"quality": 52}, r"quality=52 must be in \[0, 51\]"),
        ({"gif": "yes"}, "gif='yes' must be true or false"),
        ({"solver": "unipcc"}, "did you mean 'unipc'"),
        ({"attention_backend": "sgv"}, "did you mean 'svg'"),
        ({"output_type": "pil"}, "output_type='pil' is unknown"),
        ({"dtype": "bfloat"}, "did you mean 'bfloat16'"),
        ({"schedule": "agressive"}, "did you mean 'aggressive'"),
        ({"schedule": "none.yaml"}, "does not exist"),
        ({"schedule": "aggressive", "attention_backend": "dense"}, "would change nothing"),
        ({"attention_backend": "svg"}, "nothing to do"),
        ({"guidance_scale_2": 3.0}, "needs boundary_ratio"),
        ({"num_steps": 3, "infer_steps": 4}, "both set num_inference_steps"),
        ({"num_framse": 3}, "unknown option 'num_framse'; did you mean 'num_frames'"),
    ],
)
def test_refused(options, words):
    with pytest.raises(ValueError, match=words):
        resolve(**options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("image_path", "a.png"), ("last_image", "a.png"), ("lora_path", "a"), ("vae_tiling", True), ("ulysses_degree", 2),
        ("ring_degree", 2), ("boundary_ratio", 0.9), ("warmup", True),
    ],
)  # fmt: skip
def test_missing_features_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name}=.* is not supported yet"):
        GenerateRequest(**{name: value})


# --- prompts, seeds, metadata ------------------------------------------------------------------------------------------


def test_example_prompt_says_so():
    r = resolve()
    assert any("no prompt given" in n and TINY.example_prompt in n for n in r.notes)
    assert not resolve(prompt="a cat").notes


def test_prompt_file(tmp_path):
    file = tmp_path / "p.txt"
    file.write_text("\ufeffa red ball\n\n  猫 🐈 \n", encoding="utf-8")
    assert read_prompts(file) == ("a red ball", "猫 🐈")
    assert resolve(prompt_path=file).prompts == ("a red ball", "猫 🐈")
    file.write_text("\n \n")
    with pytest.raises(ValueError, match="holds no prompt"):
        read_prompts(file)
    with pytest.raises(ValueError, match="cannot be read"):
        read_prompts(tmp_path / "none")


def test_batch_and_copies():
    r = resolve(prompt=["a", "b"], num_videos_per_prompt=2)
    assert r.video_prompts == ("a", "a", "b", "b")
    assert r.seeds == (3, 4, 3, 4)


def test_a_seed_is_picked():
    assert len({resolve(seed=s).seeds for s in (None, -1, None, -1)}) > 1


def test_guidance_one_is_unguided():
    r = resolve(guidance_scale=1, negative_prompt="dark")
    assert not r.guided
    assert any("no effect" in n for n in r.notes)
    assert resolve(guidance_scale=1.5).guided


def test_embedded_prompts():
    assert len(make_request().resolve(TINY, embedded=2).seeds) == 2
    with pytest.raises(ValueError, match="exclude each other"):
        make_request(prompt="a").resolve(TINY, embedded=1)


CHANGES = {
    "prompt": "a cat", "negative_prompt": "dog", "height": 320, "width": 640, "num_frames": 9, "fps": 12.0, "solver": "euler",
    "num_inference_steps": 7, "guidance_scale": 2.5, "flow_shift": 2.0, "schedule": "moderate", "attention_backend": "svg",
    "dtype": "bfloat16", "seed": 11,
}  # fmt: skip


def test_metadata_repeats_the_run():
    first = resolve(**CHANGES)
    stored = json.loads(json.dumps(first.metadata()))
    again = request_from_metadata(stored).resolve(TINY)
    assert again.metadata() == stored
    assert dataclasses.replace(again, notes=first.notes) == first
    assert {k: stored[k] for k in CHANGES} == CHANGES


def test_metadata_of_defaults_and_of_one_video_of_a_batch():
    first = resolve(prompt=["a", "b"], num_videos_per_prompt=2)
    assert request_from_metadata(first.metadata()).resolve(TINY).metadata() == first.metadata()
    one = request_from_metadata({**first.metadata(), "prompt": "b", "seed": 4}).resolve(TINY)
    assert (one.prompts, one.seeds) == (("b",), (4,))


def test_metadata_of_something_else():
    with pytest.raises(ValueError, match="not the metadata of a run of videodiff: seed"):
        request_from_metadata({"prompt": "a", "height": 1, "width": 1, "num_frames": 1, "num_inference_steps": 1})


def test_each_option_changes_the_run():
    """No accepted sampling option is dropped on the way to the resolved request."""
    plain = resolve(schedule="moderate")
    for name, value in CHANGES.items():
        if name in ("height", "width", "schedule"):
            continue
        assert resolve(**{"schedule": "moderate", name: value}).metadata() != plain.metadata(), name


def test_canonical_names():
    written = {"frame-num": 9, "sample_shift": 2, "--base-seed": 1, "size": "64x32", "ckpt_dir": "m"}
    assert canonical(written, FIELDS) == {
        "num_frames": 9, "flow_shift": 2, "seed": 1, "height": 32, "width": 64, "model_path": "m",
    }  # fmt: skip


def test_solver_names_agree_with_the_solvers():
    from videodiff.request import SOLVERS
    from videodiff.sampling.solvers import solver_names

    assert set(SOLVERS) == {"auto", *solver_names()}


def test_a_schedule_may_bring_its_shift(tmp_path):
    """flow_shift: argument > config file or schedule > the model's default."""
    file = tmp_path / "mine.yaml"
    file.write_text(
        "name: mine\nmodels:\n  tiny:\n    sink: none\n    flow_shift: 7\n"
        "    resolutions: {256p: {density: 0.5}, 720p: {density: 0.4, flow_shift: 9}}\n"
    )
    for options, shift, source in (
        ({}, 7.0, "schedule mine"),
        ({"res": "720p"}, 9.0, "schedule mine"),
        ({"flow_shift": 3}, 3.0, "argument"),
        ({"flow_shift": 3, "sources": {"flow_shift": "config file a.yaml"}}, 3.0, "config file a.yaml"),
    ):
        r = resolve(TINY, schedule=str(file), **options)
        assert (r.flow_shift, r.flow_shift_source) == (shift, source)
    assert resolve(TINY, schedule="aggressive").flow_shift_source == "default of tiny"


# --- sampling a smaller size first ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "base"),
    [
        ({"res": "256p"}, None),
        ({"height": 256, "width": 448}, None),
        ({"height": 288, "width": 512}, None),
        ({"res": "480p"}, (256, 448)),
        ({"res": "1440p"}, (256, 448)),
        ({"height": 1280, "width": 720}, (448, 256)),
        ({"height": 1024, "width": 1024}, (256, 256)),
        ({"res": "1440p", "base_res": "none"}, None),
        ({"res": "1440p", "base_res": "480p"}, (480, 832)),
        ({"height": 1280, "width": 720, "base_res": "480p"}, (832, 480)),
        ({"res": "1440p", "base_res": "640x352"}, (352, 640)),
        ({"res": "256p", "base_res": "128x128"}, (128, 128)),
    ],
)
def test_base_size(options, base):
    r = resolve(**options)
    assert (r.base and (r.base.height, r.base.width)) == base
    assert any("base_res none" in n for n in r.notes) == (base is not None)
    assert r.base is None or r.base.num_frames == r.geometry.num_frames
    again = request_from_metadata(r.metadata()).resolve(TINY)
    assert (again.base, again.refine_steps, again.denoise_strength) == (r.base, r.refine_steps, r.denoise_strength)


def test_published_models_sample_every_size_directly_unless_asked():
    assert all(resolve(SMALL, res=res).base is None for res in resolution_sizes())
    r = resolve(SMALL, res="1080p", base_res="480p", denoise_strength=0.5, refine_steps=10)
    assert (r.base.width, r.denoise_strength, r.refine_steps) == (832, 0.5, 10)
    assert "50 steps at 832x480 and 10 of refinement" in r.summary()


def test_runs_from_before_there_was_a_base_repeat_without_one():
    old = {
        k: v
        for k, v in resolve(res="1440p").metadata().items()
        if k not in ("base_res", "denoise_strength", "refine_steps")
    }
    assert request_from_metadata(old).resolve(TINY).base is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"res": "480p", "base_res": "720p"}, "base_res=1280x720 must be smaller than the video, 832x480"),
        ({"res": "480p", "base_res": "480p"}, "must be smaller than the video"),
        ({"res": "1440p", "base_res": "256p"}, "has another shape than the video"),
        ({"res": "1440p", "base_res": "450x256"}, "multiples of 32"),
        ({"res": "1440p", "base_res": "huge"}, "base_res='huge' is unknown"),
        ({"res": "256p", "refine_steps": 4}, "refine_steps=4 has nothing to do"),
        ({"res": "1440p", "base_res": "none", "denoise_strength": 0.5}, "denoise_strength=0.5 has nothing to do"),
        ({"res": "1440p", "denoise_strength": 1}, r"denoise_strength=1 must be in \(0, 1\)"),
        ({"res": "1440p", "refine_steps": 0}, "refine_steps=0 must be at least 1"),
    ],
)
def test_a_base_that_cannot_be(options, words):
    with pytest.raises(ValueError, match=words):
        resolve(**options)
