"""Judge the shipped model on held-out prompts, by pixels: background, colour, number of objects, shape, motion.

Every other prompt also has a phrasing that training never saw. The run can be stopped and started again: finished prompts are kept
in --out, and used only by a run of the same weights and settings. Prints a table, writes a contact sheet.

  python scripts/evaluate_tiny.py --res 256p --num_prompts 64
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

from videodiff.schedule import resolution_sizes


def identity(args: argparse.Namespace) -> dict:
    """What a result depends on: judge, weights, sampler settings, seed. Results of another identity are not mixed in."""
    from videodiff.resources import shipped_model
    from videodiff.tiny import captions, judge, world

    sources = b"".join(Path(str(m.__file__)).read_bytes() for m in (judge, world, captions))
    judged = {"judge": hashlib.sha256(sources).hexdigest()[:16], "prompt_seed": args.prompt_seed}
    if args.drawn:
        return judged
    folder = Path(args.model_path) if args.model_path else shipped_model()
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            digest.update(file.relative_to(folder).as_posix().encode() + file.read_bytes())
    keys = ("schedule", "num_inference_steps", "guidance_scale", "seed")
    return judged | {"weights": digest.hexdigest()[:16]} | {k: getattr(args, k) for k in keys}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", help="checkpoint folder; default: the shipped model")
    parser.add_argument("--res", default="256p")
    parser.add_argument("--num_prompts", type=int, default=64)
    parser.add_argument("--schedule", default="dense")
    parser.add_argument("--num_inference_steps", type=int)
    parser.add_argument("--guidance_scale", type=float)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1000, help="prompt i has seed + i")
    parser.add_argument(
        "--prompt_seed", type=int, default=2024, help="which held-out prompts; take another one to choose settings"
    )
    parser.add_argument(
        "--drawn", action="store_true", help="judge the drawn clips instead: what the judge itself gets right"
    )
    parser.add_argument("--sheet", type=int, default=12, help="clips on the contact sheet")
    parser.add_argument("--out", type=Path, default=Path("runs/evaluation"))
    args = parser.parse_args()

    import numpy as np

    from videodiff import media
    from videodiff.pipeline import Pipeline
    from videodiff.tiny.captions import held_out_prompts
    from videodiff.tiny.judge import compare, judge
    from videodiff.tiny.world import render

    height, width = resolution_sizes()[args.res]
    pairs = held_out_prompts(args.num_prompts, args.prompt_seed, width / height)
    name = "drawn" if args.drawn else args.schedule
    file = args.out / f"{name}_{args.res}.json"
    args.out.mkdir(parents=True, exist_ok=True)
    made_by = identity(args)
    saved = json.loads(file.read_text()) if file.exists() else {}
    if saved and saved.get("made_by") != made_by:
        parser.error(f"{file} holds results of other weights or settings; name another --out, or remove it")
    done: dict[str, dict] = saved.get("results", {})
    pipe = None if args.drawn else Pipeline.from_pretrained(args.model_path)
    clips, captions = [], []
    todo = [i for i, (_, prompt) in enumerate(pairs) if done.get(str(i), {}).get("prompt") != prompt or i < args.sheet]
    for start in range(0, len(todo), args.batch):
        part = todo[start : start + args.batch]
        if pipe is None:
            frames = np.stack([(render(pairs[i][0], 17, height, width) * 255 + 0.5).astype(np.uint8) for i in part])
        else:
            result = pipe.generate(
                [pairs[i][1] for i in part], seed=[args.seed + i for i in part], res=args.res, schedule=args.schedule,
                num_inference_steps=args.num_inference_steps, guidance_scale=args.guidance_scale,
            )  # fmt: skip
            frames = result.frames
        for i, clip in zip(part, frames, strict=True):
            scene, prompt = pairs[i]
            right = {k: bool(v) for k, v in compare(judge(clip), scene).items()}
            done[str(i)] = {"prompt": prompt, "right": right}
            if i < args.sheet:
                clips.append(clip)
                captions.append(f"{prompt}  [{' '.join(k for k, v in right.items() if not v) or 'all right'}]")
        file.write_text(json.dumps({"made_by": made_by, "results": done}, indent=1))
        print(f"{start + len(part)} of {len(todo)}", flush=True)
    rows = [done[str(i)]["right"] for i in range(args.num_prompts)]
    print(f"\n{name}, {width}x{height}, {args.num_prompts} held-out prompts\n")
    print("| prompts | " + " | ".join(rows[0]) + " |")
    print("|---" * (len(rows[0]) + 1) + "|")
    for title, wanted in (("all", (1, 2)), ("one object", (1,)), ("two objects", (2,))):
        some = [r for r, (scene, _) in zip(rows, pairs) if len(scene.things) in wanted]
        if some:
            shares = " | ".join(f"{100 * sum(r[k] for r in some) / len(some):.1f} %" for k in some[0])
            print(f"| {title}, {len(some)} | {shares} |")
    if clips:
        sheet = args.out / f"{name}_{args.res}.png"
        media.write_contact_sheet(sheet, clips, captions)
        print(sheet)


if __name__ == "__main__":
    main()
