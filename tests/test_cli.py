"""The command line: words, aliases, config files, exit codes, and what reaches the pipeline. The pipeline is a recorder here."""

import json
import logging
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from videodiff import cli, media
from videodiff.flags import OPTIONS, VERBS, gather, make_parser, parse
from videodiff.known import known_models, model_info
from videodiff.latents import SavedLatents
from videodiff.request import ALIASES, FIELDS, GenerateRequest, make_request
from videodiff.result import Result

ROOT = Path(__file__).resolve().parents[1]


class Recorder:
    """Stands for `videodiff.pipeline`: remembers calls and returns four grey frames."""

    def __init__(self, folder: Path) -> None:
        self.calls: list[tuple[str, tuple, dict]] = []
        self.error: BaseException | None = None
        self.folder = folder

    def result(self, prompts, seeds, metadata) -> Result:
        if self.error is not None:
            raise self.error
        latents = self.folder / "kept.latents.safetensors"
        latents.touch()
        frames = np.full((len(seeds), 5, 32, 32, 3), 128, np.uint8)
        return Result(frames, 8, "uint8", prompts, seeds, {"stages": {"denoise_s": 1.0}}, metadata, latents)

    def from_pretrained(self, path=None, *, dtype=None):
        self.calls.append(("load", (path,), {"dtype": dtype}))
        return self

    def generate(self, prompt=None, *, output_path, resume, progress, **options):
        self.calls.append(("generate", (prompt,), {**options, "output_path": output_path, "resume": resume}))
        request = make_request(prompt=prompt, **options).resolve(model_info("tiny"))
        if progress:
            progress("denoise", 0, 2, 0.0)
            progress("denoise", 2, 2, 1.5)
        return self.result(request.video_prompts, request.seeds, request.metadata())

    def decode(self, path, *, progress):
        self.calls.append(("decode", (path,), {}))
        return self.result(["a"], [1], {})

    @property
    def options(self) -> dict:
        return next(c[2] for c in self.calls if c[0] == "generate")


@pytest.fixture
def pipe(monkeypatch, tmp_path):
    recorder = Recorder(tmp_path)
    module = types.ModuleType("videodiff.pipeline")
    module.Pipeline = recorder  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "videodiff.pipeline", module)
    monkeypatch.chdir(tmp_path)
    yield recorder
    log = logging.getLogger("videodiff")
    log.handlers, log.propagate = [], True
    log.setLevel(logging.NOTSET)


def fails(capsys, *argv: str, code: int = 2) -> str:
    assert cli.main(argv) == code
    return capsys.readouterr().err


def gathered(*argv: str) -> dict:
    return gather(parse("generate", argv))[0]


# --- words -------------------------------------------------------------------------------------------------------------

SAMPLES = {
    "prompt": ("a cat", "a cat"), "negative_prompt": ("dog", "dog"), "prompt_path": ("p.txt", "p.txt"), "seed": ("-1", -1),
    "res": ("720p", "720p"), "height": ("64", 64), "width": ("96", 96), "num_frames": ("9", 9), "fps": ("12", 12.0),
    "num_inference_steps": ("7", 7), "guidance_scale": ("2.5", 2.5), "flow_shift": ("3", 3.0), "solver": ("euler", "euler"),
    "resume": ("s", "s"), "model": ("tiny", "tiny"), "model_path": ("m", "m"), "dtype": ("float32", "float32"),
    "schedule": ("moderate", "moderate"), "attention_backend": ("svg", "svg"), "output_path": ("o.mp4", "o.mp4"),
    "quality": ("20", 20), "frames_dir": ("f", "f"), "num_videos_per_prompt": ("2", 2), "guidance_scale_2": ("3", 3.0),
    "boundary_ratio": ("0.9", 0.9), "image_path": ("i", "i"), "last_image": ("l", "l"), "lora_path": ("a", "a"),
    "base_res": ("256p", "256p"), "denoise_strength": ("0.6", 0.6), "refine_steps": ("4", 4),
    "ulysses_degree": ("2", 2), "ring_degree": ("2", 2),
}  # fmt: skip
SWITCHES = [o.name for o in OPTIONS.values() if o.kind is None]
SPELLINGS = [(n, n) for n in SAMPLES] + [(a, n) for a, n in ALIASES.items()]


def test_samples_cover_the_table():
    assert SAMPLES.keys() | set(SWITCHES) | {"size"} == OPTIONS.keys()


@pytest.mark.parametrize(("flag", "name"), SPELLINGS)
def test_every_spelling_of_every_option_lands_in_the_request(flag, name):
    text, value = SAMPLES[name]
    for words in ([f"--{flag}", text], [f"--{flag.replace('_', '-')}", text], [f"--{flag}={text}"]):
        assert gathered(*words) == {name: value}
    assert name in FIELDS


@pytest.mark.parametrize("name", SWITCHES)
def test_switches(name):
    assert gathered(f"--{name}") == gathered(f"--{name.replace('_', '-')}") == {name: True}
    assert gathered(f"--no-{name.replace('_', '-')}") == {name: False}
    assert name in FIELDS


def test_every_request_field_has_a_flag():
    assert set(FIELDS) - OPTIONS.keys() == {"output_type", "sources"}  # of the Python interface alone


@pytest.mark.parametrize("text", ["96*64", "96x64"])
def test_size(text):
    assert gathered("--size", text) == {"height": 64, "width": 96}


def test_seeds_and_positional_prompt():
    assert gathered("a red ball", "--base_seed", "1,2,3") == {"prompt": "a red ball", "seed": [1, 2, 3]}
    assert gathered("-o", "x.mp4") == {"output_path": "x.mp4"}


def test_values_keep_their_dashes():
    assert gathered("--prompt=--a-b", "--negative-prompt", "so-so") == {"prompt": "--a-b", "negative_prompt": "so-so"}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--num_framse", "3"], "unknown flag '--num_framse'; did you mean '--num_frames'?"),
        (["--num-framse=3"], "unknown flag '--num_framse'; did you mean '--num_frames'?"),
        (["--sample-step", "3"], "did you mean '--sample_steps'?"),
        (["a", "red", "ball"], "unexpected argument 'red'; a prompt of several words needs quotes"),
        (["a", "--prompt", "b"], "the prompt is given twice"),
        (["--num_frames", "x"], "'x' is not a whole number"),
        (["--seed", "1,x"], "'x' is not a whole number"),
        (["--flow_shift", "x"], "'x' is not a number"),
        (["--size", "12"], "size='12' must be WIDTHxHEIGHT"),
        (["--size", "64x64", "--height", "64"], "exclude each other"),
        (["--prompt"], "expected one argument"),
        (["--size", "1000*700"], "nearest legal sizes are 992x672"),
        (["--num_frames", "18"], "17 and 21"),
        (["--prompt", " "], "prompt is empty"),
        (["--res", "721p"], "res='721p' is unknown; did you mean '720p'"),
        (["--schedule", "agressive"], "did you mean 'aggressive'"),
        (["--lora_path", "x"], "lora_path='x' is not supported yet"),
        (["--model", "tinny"], "neither a known model nor a checkpoint folder; did you mean 'tiny'"),
        (["--output_path", "x.avi"], "must end in .mp4 or .gif"),
        (["--output_path", "x.gif", "--quality", "3"], "quality=3 is for mp4"),
        (["--resume", "none"], "resume='none' does not exist"),
        (["--config", "none.yaml"], "config 'none.yaml' cannot be read"),
    ],
)
def test_usage_errors(capsys, pipe, argv, words):
    assert words in fails(capsys, "generate", *argv)
    assert not pipe.calls


def test_verbs(capsys):
    assert "did you mean 'generate'" in fails(capsys, "generat")
    assert "videodiff generate --prompt" in fails(capsys, "--prompt", "x")
    assert cli.main([]) == 2
    assert cli.main(["--help"]) == 0
    assert cli.main(["--version"]) == 0
    out = capsys.readouterr().out
    assert all(verb in out for verb in VERBS)
    for verb in VERBS:
        assert cli.main([verb, "--help"]) == 0
    assert "--sample_shift" in capsys.readouterr().out


def test_script_and_command_share_one_parser():
    out = subprocess.run(
        [sys.executable, ROOT / "scripts" / "generate.py", "--num-framse", "3"], capture_output=True, text=True, cwd="/"
    )
    assert out.returncode == 2
    assert "videodiff generate: error: unknown flag '--num_framse'; did you mean '--num_frames'?" in out.stderr


def test_describe_options_are_generate_options():
    described = {f for a in make_parser("describe")._actions for f in a.option_strings} - {"--json"}
    assert described < {f for a in make_parser("generate")._actions for f in a.option_strings}


def test_models(capsys):
    assert cli.main(["models"]) == 0
    out = capsys.readouterr().out
    assert all(n in out for n in known_models())
    assert cli.main(["models", "--json"]) == 0
    assert [m["name"] for m in json.loads(capsys.readouterr().out)] == list(known_models())


def test_checks_come_before_heavy_imports():
    code = (
        "import sys; from videodiff import cli; "
        "codes = [cli.main(w) for w in (['models'], ['generate', '--num_frames', '18'], ['generate', '--help'])]; "
        "print(codes, [m for m in ('jax', 'flax', 'imageio', 'torch') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip().splitlines()[-1] == "[0, 2, 0] []"


# --- models and config files -------------------------------------------------------------------------------------------


def test_known_model_without_folder(capsys, pipe):
    said = fails(capsys, "generate", "--model", "wan2.1-t2v-1.3b")
    assert "hf download Wan-AI/Wan2.1-T2V-1.3B-Diffusers" in said
    assert "--model_path" in said
    assert "weights.md" in said


def test_missing_folder_is_a_failure(capsys, pipe, tmp_path):
    assert "none" in fails(capsys, "generate", "--model_path", str(tmp_path / "none"), code=1)
    assert "none" in fails(capsys, "describe", "--model_path", str(tmp_path / "none"))


def test_folder_of_another_model(tmp_path):
    for part, body in (("transformer", model_info("wan2.1-t2v-14b").transformer.to_json()), ("vae", {})):
        (tmp_path / "m" / part).mkdir(parents=True)
        (tmp_path / "m" / part / "config.json").write_text(json.dumps(body))
    with pytest.raises(ValueError, match=r"holds wan2\.1-t2v-14b, not wan2\.1-t2v-1\.3b"):
        cli.choose_model("wan2.1-t2v-1.3b", str(tmp_path / "m"), weights=False)
    for model, path in (("wan2.1-t2v-14b", "m"), (None, "m"), ("m", None)):
        model = str(tmp_path / "m") if model == "m" else model
        found = cli.choose_model(model, path and str(tmp_path / path), weights=False)
        assert (found[0], found[1].name) == (str(tmp_path / "m"), "wan2.1-t2v-14b")


def test_shipped_model_is_the_default():
    assert cli.choose_model(None, None, weights=True) == (None, model_info("tiny"))
    assert cli.choose_model("tiny", None, weights=True) == (None, model_info("tiny"))


def write(folder: Path, text: str) -> str:
    (folder / "c.yaml").write_text(text)
    return str(folder / "c.yaml")


def test_config_file_and_who_wins(tmp_path):
    config = write(
        tmp_path, "sample-steps: 9\nflow_shift: 2\nres: 480p\nprompt: file\ngif: true\nmodel: tiny\nseed: null\n"
    )
    values, sources = gather(parse("generate", ["--config", config, "--num_steps", "4", "--size", "64x64", "--no-gif"]))
    assert values == {
        "num_inference_steps": 4, "flow_shift": 2, "height": 64, "width": 64, "prompt": "file", "gif": False, "model": "tiny",
    }  # fmt: skip
    assert sources["flow_shift"] == "config file c.yaml"
    assert "num_inference_steps" not in sources
    values, _ = gather(
        parse("generate", ["--config", config, "--prompt_path", "p", "--model_path", "m", "--res", "720p"])
    )
    assert (values["res"], values["prompt_path"], values["model_path"]) == ("720p", "p", "m")
    assert not values.keys() & {"prompt", "model", "height"}


def test_config_size_and_one_side(tmp_path):
    config = write(tmp_path, "size: 96*64\n")
    assert gathered("--config", config, "--height", "32") == {"height": 32, "width": 96}
    assert gathered("--config", config, "--res", "480p") == {"res": "480p"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_framse: 3", "c.yaml': unknown key 'num_framse'; did you mean 'num_frames'"),
        ("config: a", "unknown key 'config'"),
        ("seed: 1\nbase_seed: 2", "both set seed"),
        ("- 1", "must map option names to values, got list"),
        ("a: [", "is not valid YAML"),
        ("num_frames: seven", "num_frames='seven' must be a whole number"),
        ("gif: 3", "gif=3 must be true or false"),
        ("size: 3", "must be WIDTHxHEIGHT"),
    ],
)
def test_bad_config(capsys, pipe, tmp_path, text, words):
    assert words in fails(capsys, "generate", "--config", write(tmp_path, text))
    assert not pipe.calls


def test_every_option_works_in_a_config_file(tmp_path):
    for name, (text, value) in SAMPLES.items():
        quoted = json.dumps(text) if isinstance(value, str) else text
        assert gathered("--config", write(tmp_path, f"{name}: {quoted}")) == {name: value}


# --- runs --------------------------------------------------------------------------------------------------------------


def test_run_writes_and_tells(capsys, pipe, tmp_path):
    assert cli.main(["generate", "A red ball, rolling!", "--seed", "5", "--gif", "--contact_sheet"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "outputs/a-red-ball-rolling-5.mp4"
    for line in lines[:-2]:
        assert (tmp_path / line).is_file()
    assert {Path(line).suffix for line in lines[:-2]} == {".mp4", ".gif", ".png", ".json", ".safetensors"}
    assert lines[-2] == "seed: 5"
    assert re.fullmatch(r"time: [\d.]+ s \(denoise 1.0, writing [\d.]+\)", lines[-1])
    assert err.splitlines() == ["denoise: 2 steps", "denoise: done in 1.5 s"]
    assert pipe.calls[0] == ("load", (None,), {"dtype": None})


def test_options_reach_the_pipeline(pipe):
    words = [
        "--prompt", "a", "--negative_prompt", "b", "--size", "64x32", "--num_frames", "5", "--fps", "12", "--num_steps", "3",
        "--guidance_scale", "2", "--flow_shift", "4", "--solver", "euler", "--schedule", "moderate", "--attention_backend", "svg",
        "--num_videos_per_prompt", "2", "--seed", "9", "--dtype", "bfloat16", "--output_path", "o.mp4",
    ]  # fmt: skip
    assert cli.main(["generate", *words]) == 0
    wanted = {
        "negative_prompt": "b", "height": 32, "width": 64, "num_frames": 5, "fps": 12.0, "num_inference_steps": 3,
        "guidance_scale": 2.0, "flow_shift": 4.0, "solver": "euler", "schedule": "moderate", "attention_backend": "svg",
        "num_videos_per_prompt": 2, "seed": [9, 10], "output_path": Path("o.mp4"), "resume": None,
    }  # fmt: skip
    assert {k: pipe.options[k] for k in wanted} == wanted
    assert pipe.calls[0][2] == {"dtype": "bfloat16"}
    assert Path("o_000.mp4").is_file()
    assert Path("o_001.mp4").is_file()


def test_example_prompt_is_left_to_the_pipeline(pipe):
    assert cli.main(["generate", "--quiet"]) == 0
    assert next(c for c in pipe.calls if c[0] == "generate")[1] == (None,)
    assert isinstance(pipe.options["seed"], int)


def test_quiet(capsys, pipe):
    assert cli.main(["generate", "a", "--quiet", "--no_keep_latents", "-o", "x.mp4"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == ["x.mp4", "x.json"]
    assert err == ""
    assert not Path("kept.latents.safetensors").exists()


def test_default_names_never_overwrite_but_given_ones_do(capsys, pipe):
    for name in ("outputs/a-1.mp4", "outputs/a-1-2.mp4", "outputs/a-1-3.mp4"):
        assert cli.main(["generate", "a", "--seed", "1"]) == 0
        assert capsys.readouterr().out.splitlines()[0] == name
    for _ in range(2):
        assert cli.main(["generate", "a", "-o", "x.mp4"]) == 0
        assert capsys.readouterr().out.splitlines()[0] == "x.mp4"


def test_prompt_file(pipe, tmp_path):
    (tmp_path / "p.txt").write_text("one\ntwo\n")
    assert cli.main(["generate", "--prompt_path", "p.txt", "--seed", "1"]) == 0
    assert next(c for c in pipe.calls if c[0] == "generate")[1] == (["one", "two"],)
    assert Path("outputs/one-and-1-more-1_000.mp4").is_file()


def test_unwritable_output_is_found_first(capsys, pipe, tmp_path):
    (tmp_path / "file").touch()
    assert "cannot be written" in fails(capsys, "generate", "a", "-o", "file/x.mp4", code=1)
    (tmp_path / "d.mp4").mkdir()
    assert "is a folder" in fails(capsys, "generate", "a", "-o", "d.mp4", code=1)
    assert not pipe.calls


def test_no_ffmpeg_is_found_first(capsys, pipe, monkeypatch):
    def none():
        raise FileNotFoundError("no ffmpeg program was found")

    monkeypatch.setattr(media, "ffmpeg_path", none)
    assert "no ffmpeg" in fails(capsys, "generate", "a", code=1)
    assert not pipe.calls
    assert cli.main(["generate", "a", "-o", "x.gif"]) == 0


@pytest.mark.parametrize(
    "error",
    [
        ValueError("too large"),
        OSError("disk"),
        MemoryError("more"),
        ArithmeticError("NaN at step 3"),
        RuntimeError("xla"),
    ],
)
def test_failures_exit_with_one(capsys, pipe, error):
    pipe.error = error
    assert f"videodiff generate: error: {error}" in fails(capsys, "generate", "a", code=1)
    assert not list(Path().glob("outputs/*.mp4"))


def test_mistakes_of_ours_show_a_traceback(capsys, pipe):
    pipe.error = KeyError("inner")
    assert "Traceback" in fails(capsys, "generate", "a", code=1)


def test_failed_write_keeps_latents(capsys, pipe, monkeypatch):
    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(media, "write_mp4", full)
    said = fails(capsys, "generate", "a", "--no_keep_latents", code=1)
    assert "no space left; the latents are kept: videodiff decode" in said
    assert Path("kept.latents.safetensors").exists()


def test_ctrl_c_names_the_state(capsys, pipe, monkeypatch):
    stop = KeyboardInterrupt()
    stop.state_path = Path("x y.state.safetensors")  # type: ignore[attr-defined]
    pipe.error = stop
    said = fails(capsys, "generate", "a", code=130)
    assert said.endswith("go on with: videodiff generate --resume 'x y.state.safetensors'\n")
    monkeypatch.setattr(cli, "choose_model", lambda *_, **__: ("my folder", model_info("tiny")))
    said = fails(capsys, "generate", "a", code=130)
    assert said.endswith("--resume 'x y.state.safetensors' --model_path 'my folder'\n")


def test_resume_takes_the_options_of_the_state(capsys, pipe):
    first = make_request(prompt="a", seed=4, num_steps=3, res="480p").resolve(model_info("tiny"))
    save_file({"x": np.zeros(1)}, "x.state.safetensors", {"request": json.dumps(first.metadata())})
    assert cli.main(["generate", "--resume", "x.state.safetensors"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "x.mp4"
    options = pipe.options
    assert options["resume"] == "x.state.safetensors"
    again = {k: v for k, v in options.items() if k in FIELDS and k not in ("resume", "output_path")}
    assert make_request(prompt="a", **again).resolve(model_info("tiny")).metadata() == first.metadata()
    save_file({"x": np.zeros(1)}, "latents.safetensors")
    assert "videodiff decode" in fails(capsys, "generate", "--resume", "latents.safetensors")
    Path("bad").write_bytes(b"x" * 20)
    assert "is damaged" in fails(capsys, "generate", "--resume", "bad")


def test_rerun_repeats_the_file(capsys, pipe):
    assert cli.main(["generate", "a", "--seed=7", "--num_steps", "3", "-o", "x.mp4", "--size", "64x64"]) == 0
    first = dict(pipe.options)
    pipe.calls.clear()
    capsys.readouterr()
    assert cli.main(["rerun", "x.mp4"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "x-rerun.mp4"
    assert media.read_metadata("x-rerun.mp4") == media.read_metadata("x.mp4")
    assert {k: pipe.options[k] for k in ("seed", "num_inference_steps", "height", "width")} == {
        k: first[k] for k in ("seed", "num_inference_steps", "height", "width")
    }
    assert pipe.options["sources"] == {"flow_shift": "x.mp4"}


def test_rerun_of_other_files(capsys, pipe):
    assert "'none.mp4' does not exist" in fails(capsys, "rerun", "none.mp4")
    media.write_mp4("plain.mp4", np.zeros((2, 16, 16, 3), np.uint8), fps=8)
    assert "not the metadata of a run" in fails(capsys, "rerun", "plain.mp4")
    about = make_request(prompt="a").resolve(model_info("tiny")).metadata() | {"model": "mine"}
    media.write_gif("mine.gif", np.zeros((2, 16, 16, 3), np.uint8), fps=8, metadata=about)
    assert "name the folder with --model_path" in fails(capsys, "rerun", "mine.gif")


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (
            {"weights": "0123456789ab"},
            "x.gif was made with other weights (0123456789ab) than those of ",
        ),
        ({"initial_noise": "0123456789ab"}, "began from given latents, which the file does not hold"),
        ({"prompt_embeds": "0123456789ab"}, "took prompt_embeds, which its files do not hold"),
    ],
)
def test_rerun_refuses_what_it_cannot_repeat(capsys, pipe, extra, words):
    about = make_request(prompt="a", seed=1).resolve(model_info("tiny")).metadata() | extra
    media.write_gif("x.gif", np.zeros((2, 16, 16, 3), np.uint8), fps=8, metadata=about)
    assert words in fails(capsys, "rerun", "x.gif")
    assert not pipe.calls


def test_decode(capsys, pipe):
    saved = SavedLatents(np.zeros((1, 16, 1, 2, 2), np.float32), 32, 32, 8, "tiny", ("a",), (1,))
    saved.save("x.latents.safetensors")
    assert cli.main(["decode", "x.latents.safetensors", "--frames_dir", "f"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "x.mp4"
    assert len(list(Path("f").glob("*.png"))) == 5
    assert [c[0] for c in pipe.calls] == ["load", "decode"]
    assert "no latents at none" in fails(capsys, "decode", "none")
    assert "unknown flag '--prompt'" in fails(capsys, "decode", "x.latents.safetensors", "--prompt", "a")
    assert "quality=99" in fails(capsys, "decode", "x.latents.safetensors", "--quality", "99")


def test_progress_bar_on_a_terminal(capsys):
    bar = cli.Progress(terminal=True)
    for step in range(4):
        bar("denoise", step, 3, step * 0.5)
    bar("decode", 0, 1, 0.0)
    bar("decode", 1, 1, 0.1)
    err = capsys.readouterr().err
    assert "denoise" in err
    assert "3/3" in err
    assert "decode" in err
    assert "<" in err  # tqdm's elapsed<left


def test_requests_are_frozen():
    with pytest.raises(AttributeError):
        GenerateRequest().seed = 3  # type: ignore[misc]


# --- plan --------------------------------------------------------------------------------------------------------------


def test_plan_shows_stages_and_fits(monkeypatch, capsys):
    monkeypatch.setenv("VIDEODIFF_MEMORY_LIMIT_GIB", "24")
    assert cli.main(["plan", "--model", "wan2.1-t2v-1.3b"]) == 0
    out = capsys.readouterr().out
    for part in (
        "text encoder",
        "denoiser",
        "decoder",
        "planned peak",
        "available 24.00 GiB",
        "it fits",
        "832x480, 81 frames",
    ):
        assert part in out
    assert cli.main(["plan", "--model", "wan2.1-t2v-1.3b", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["available_bytes"] == 24 * 2**30
    assert data["stages_bytes"]["text encoder"]["weights"] / 2**30 == pytest.approx(
        10.58, abs=0.02
    )  # 5.68 B parameters, bfloat16
    assert data["peak_bytes"] < 14 * 2**30


def test_plan_refuses_with_remedies(monkeypatch, capsys):
    monkeypatch.setenv("VIDEODIFF_MEMORY_LIMIT_GIB", "13")
    error = fails(capsys, "plan", "--model", "wan2.1-t2v-1.3b", "--res", "720p", code=1)
    assert re.search(r"needs [\d.]+ GiB of memory and 13.00 GiB are available", error)
    assert "remedy: any of these makes it fit: " in error
    assert "height=" in error


@pytest.mark.parametrize("words", [["--num_videos_per_prompt", "2"], ["--num_frames", "161"], ["--res", "720p"]])
def test_plan_grows_with_the_job(monkeypatch, capsys, words):
    monkeypatch.setenv("VIDEODIFF_MEMORY_LIMIT_GIB", "200")
    peaks = []
    for more in ([], words):
        assert cli.main(["plan", "--model", "wan2.1-t2v-1.3b", "--json", *more]) == 0
        stages = json.loads(capsys.readouterr().out)["stages_bytes"]
        peaks.append((stages["denoiser"]["working"], stages["decoder"]["working"]))
    assert all(more > less for less, more in zip(*peaks))
