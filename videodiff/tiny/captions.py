"""Words for scenes: varied phrasing, with phrasings and combinations that training never sees.

Owns: the grammar, which scenes are held out, the vocabulary's corpus. Does not own: pictures (`world`).
Invariant: a held-out scene or phrasing never reaches training.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np

from videodiff.tiny.world import BACKGROUNDS, COLOURS, MOTIONS, SHAPES, Scene, Thing, sample_scene

SHAPE_WORDS = {
    "ball": ("ball", "ball", "sphere"),
    "square": ("square", "square", "block"),
    "triangle": ("triangle",),
    "star": ("star",),
}
SIZE_WORDS = {"small": ("small", "little"), "": ("",), "big": ("big", "large")}
PLACE_WORDS = {
    "meadow": ("over a green meadow", "above the grass", "in a meadow under a blue sky", "over a grassy field"),
    "desert": ("in the desert", "over desert sand", "above sandy dunes", "in a sandy desert"),
    "night": ("at night", "in the night sky", "under the stars", "in a dark starry night"),
    "snow": ("in the snow", "over white snow", "above a snowy field", "in a snowy winter landscape"),
    "studio": ("in a grey studio", "on a plain grey background", "in front of a grey wall", "in an empty grey room"),
}
# motion -> (verb phrase for one, for two)
MOTION_WORDS = {
    "left": (
        ("moves left", "moving left"),
        ("slides to the left", "sliding to the left"),
        ("drifts left", "drifting left"),
    ),
    "right": (
        ("moves right", "moving right"),
        ("slides to the right", "sliding to the right"),
        ("drifts right", "drifting right"),
    ),
    "up": (("moves up", "moving up"), ("rises", "rising"), ("floats upward", "floating upward")),
    "down": (("moves down", "moving down"), ("sinks", "sinking"), ("falls slowly", "falling slowly")),
    "bounce": (("bounces", "bouncing"), ("bounces up and down", "bouncing up and down"), ("hops", "hopping")),
    "spin": (("spins", "spinning"), ("turns around", "turning around"), ("rotates", "rotating")),
    "grow": (("grows", "growing"), ("gets bigger", "getting bigger"), ("grows larger", "growing larger")),
    "shrink": (("shrinks", "shrinking"), ("gets smaller", "getting smaller"), ("shrinks away", "shrinking away")),
    "still": (("stays still", "staying still"), ("rests", "resting"), ("does not move", "not moving")),
}
PLURAL = {"moves": "move", "slides": "slide", "drifts": "drift", "rises": "rise", "floats": "float", "sinks": "sink",
          "falls": "fall", "bounces": "bounce", "hops": "hop", "spins": "spin", "turns": "turn", "rotates": "rotate",
          "grows": "grow", "gets": "get", "shrinks": "shrink", "stays": "stay", "rests": "rest", "does": "do"}  # fmt: skip
# {who} {does} {doing} {where}
TEMPLATES = (
    "{who} {does} {where}",
    "{who} {doing} {where}",
    "{who} that {does} {where}",
    "{where}, {who} {does}",
    "a video of {who} {doing} {where}",
)
HELD_OUT_TEMPLATES = ("{where} there is {who} {doing}", "watch {who} as it {does} {where}")
HELD_OUT_SHARE = 10  # one scene key in this many never reaches training


def is_held_out(scene: Scene) -> bool:
    """Whether a scene's combination of attributes is kept for evaluation."""
    return zlib.crc32(repr(scene.key).encode()) % HELD_OUT_SHARE == 0


def _noun(thing: Thing, rng: np.random.Generator) -> str:
    def pick(words: tuple[str, ...]) -> str:
        return words[rng.integers(len(words))]

    words = [pick(SIZE_WORDS[thing.size]), thing.colour, pick(SHAPE_WORDS[thing.shape])]
    phrase = " ".join(w for w in words if w)
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


def caption(scene: Scene, rng: np.random.Generator, *, held_out: bool = False) -> str:
    """One phrasing of a scene.

    Args:
      scene: what to describe.
      rng: picks words.
      held_out: use a phrasing training never sees.
    """
    two = len(scene.things) == 2
    things = scene.things
    if two:  # sizes of pairs are fixed, so they are not named
        things = tuple(Thing(t.shape, t.colour, "", t.x, t.y) for t in things)
    who = " and ".join(_noun(t, rng) for t in things)
    does, doing = MOTION_WORDS[scene.motion][rng.integers(len(MOTION_WORDS[scene.motion]))]
    where = PLACE_WORDS[scene.background][rng.integers(len(PLACE_WORDS[scene.background]))]
    templates = HELD_OUT_TEMPLATES if held_out else TEMPLATES
    template = templates[rng.integers(len(templates))]
    if two:
        verb, *rest = does.split(" ")
        does = " ".join([PLURAL[verb], *rest])
        template = template.replace("as it", "as they").replace("there is", "there are")
    return template.format(who=who, does=does, doing=doing, where=where)


def training_scene(rng: np.random.Generator, aspect: float = 1.0) -> Scene:
    """A random scene that is not held out."""
    while True:
        scene = sample_scene(rng, aspect)
        if not is_held_out(scene):
            return scene


def held_out_prompts(count: int, seed: int = 2024, aspect: float = 1.0) -> list[tuple[Scene, str]]:
    """``count`` held-out scenes with prompts; every other one also has a phrasing training never sees."""
    rng = np.random.default_rng(seed)
    out: list[tuple[Scene, str]] = []
    while len(out) < count:
        scene = sample_scene(rng, aspect)
        if is_held_out(scene):
            out.append((scene, caption(scene, rng, held_out=len(out) % 2 == 1)))
    return out


def corpus(count: int = 4000, seed: int = 0) -> Iterator[str]:
    """Captions for building the tokenizer: every word of the grammar occurs."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        yield caption(sample_scene(rng), rng, held_out=i % 5 == 0)


def labels(scene: Scene) -> np.ndarray:
    """[8] int32 attributes for the text encoder's warm start: background, motion, then shape, colour, size of thing 1 and 2.

    The second thing of a single scene has the class after the last one.
    """
    out = [list(BACKGROUNDS).index(scene.background), MOTIONS.index(scene.motion)]
    for i in range(2):
        if i < len(scene.things):
            t = scene.things[i]
            size = 1 if len(scene.things) == 2 else ("small", "", "big").index(t.size)
            out += [SHAPES.index(t.shape), list(COLOURS).index(t.colour), size]
        else:
            out += [len(SHAPES), len(COLOURS), 3]
    return np.array(out, np.int32)


LABEL_CLASSES = (len(BACKGROUNDS), len(MOTIONS), *2 * (len(SHAPES) + 1, len(COLOURS) + 1, 4))
