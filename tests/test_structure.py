"""The shape of the code base: imports go one way, the product never needs torch, packages stay within their room."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "videodiff"

# From the bottom up. A module may import modules of its own layer or of a layer below it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("version", "errors", "files"),
    ("grid", "configs", "resources", "metrics", "noise", "compile_cache"),
    ("kernels", "schedule", "media", "latents"),
    ("attention",),
    ("parallel", "models"),
    ("weights", "denoiser"),
    ("memory", "sampling"),
    ("text",),
    ("known", "sizes", "request", "result", "stages", "report", "flags"),
    ("passes",),
    ("describe",),
    ("pipeline",),
    ("cli",),
    ("tiny", "__main__"),
)
RANK = {name: i for i, layer in enumerate(LAYERS) for name in layer}


def room(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Rooms of videodiff that a file imports, lazily or not."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
            if node.module == "videodiff":
                names = [f"videodiff.{a.name}" for a in node.names]
        found |= {n.split(".")[1] for n in names if n.startswith("videodiff.")}
    return found


FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if p != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    here = room(path)
    assert here in RANK, f"{here} has no place in LAYERS: decide which layer it belongs to"
    for other in imports(path) - {here}:
        assert other in RANK, f"{path.name} imports videodiff.{other}, which has no place in LAYERS"
        assert RANK[other] <= RANK[here], (
            f"{path.relative_to(PACKAGE)} ({here}) must not import {other}: it is above it"
        )


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_torch(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            for name in names:
                assert name.split(".")[0] not in {"torch", "diffusers", "transformers"}, f"{path.name} imports {name}"


def test_product_does_not_import_the_trainer() -> None:
    for path in FILES:
        if room(path) not in {"tiny"}:
            assert "tiny" not in imports(path), f"{path.name} imports videodiff.tiny"


def test_help_is_light() -> None:
    """`describe` and `--help` must answer before anything heavy is imported."""
    code = (
        "import sys; import videodiff.cli; print(sorted(m for m in ('flax', 'imageio', 'torch') if m in sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
