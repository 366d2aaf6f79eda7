"""End to end, sparse against dense in one process: denoising time, whole time, and PSNR of the raw frames.

Every prompt runs under every schedule with the same seed and the same dense kernel; the arms alternate. Times leave compilation out
(it is printed apart). PSNR compares decoded uint8 frames before any video codec.

  python scripts/benchmark_e2e.py --res 1440p --schedules aggressive --num_prompts 1 --num_inference_steps 8
  python scripts/benchmark_e2e.py --res 720p --schedules conservative,moderate,aggressive --num_prompts 8
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

PROMPTS = (
    "a big red ball bounces over a green meadow",
    "a blue star spins at night",
    "a yellow triangle moves to the right in the desert",
    "a purple square and a green ball rise in the snow",
    "an orange star grows on a plain grey background",
    "a small green square slides to the left over white snow",
    "a red triangle moves down under the stars",
    "a large blue ball stays still in the desert",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", help="checkpoint folder; default: the shipped model")
    parser.add_argument("--res", default="480p")
    parser.add_argument("--num_frames", type=int)
    parser.add_argument("--num_inference_steps", type=int, default=8)
    parser.add_argument("--guidance_scale", type=float)
    parser.add_argument("--schedules", default="conservative,moderate,aggressive")
    parser.add_argument("--num_prompts", type=int, default=8)
    parser.add_argument("--json", type=Path, help="also write every number here")
    args = parser.parse_args()

    from videodiff.metrics import psnr
    from videodiff.pipeline import Pipeline
    from videodiff.report import peak_memory_gib

    pipe = Pipeline.from_pretrained(args.model_path)
    schedules = ["dense", *[s for s in args.schedules.split(",") if s and s != "dense"]]
    rows: list[dict] = []
    for i in range(args.num_prompts):
        prompt, frames = PROMPTS[i % len(PROMPTS)], {}
        order = schedules if i % 2 == 0 else schedules[::-1]
        for schedule in order:
            start = time.perf_counter()
            result = pipe.generate(
                prompt, seed=i, res=args.res, num_frames=args.num_frames, schedule=schedule,
                num_inference_steps=args.num_inference_steps, guidance_scale=args.guidance_scale,
            )  # fmt: skip
            frames[schedule] = result.frames[0]
            stages, attention = result.report["stages"], result.report["attention"]
            rows.append(
                {
                    "prompt": prompt,
                    "schedule": schedule,
                    "denoise_s": stages["denoise_s"],
                    "compile_s": stages["denoise_compile_s"],
                    "decode_s": stages["decode_s"],
                    "total_s": time.perf_counter() - start,
                    "density": attention["mean_executed_density"],
                    "routing_error": attention["routing_error_mean"],
                }
            )
            print(
                f"{prompt!r} {schedule}: denoise {stages['denoise_s']:.1f} s, decode {stages['decode_s']:.1f} s",
                flush=True,
            )
        for row in rows[-len(schedules) :]:
            if row["schedule"] != "dense":
                row["psnr"] = float(psnr(frames[row["schedule"]], frames["dense"]))
    size = result.report["size"]
    print(
        f"\n{pipe.info.name} at {size['width']}x{size['height']}, {size['num_frames']} frames, {size['tokens']} tokens, ",
        end="",
    )
    print(f"{args.num_inference_steps} steps, guidance {result.report['sampling']['guidance_scale']:g}, ", end="")
    print(
        f"{args.num_prompts} prompts, {result.report['environment']['platform']}; peak memory {peak_memory_gib():.2f} GiB\n"
    )
    print("| schedule | executed density | denoise s | speed-up | decode s | PSNR to dense, median | worst |")
    print("|---|---|---|---|---|---|---|")
    dense = {r["prompt"]: r["denoise_s"] for r in rows if r["schedule"] == "dense"}
    for schedule in schedules:
        mine = [r for r in rows if r["schedule"] == schedule]
        ratio = median(dense[r["prompt"]] / r["denoise_s"] for r in mine)
        quality = [r["psnr"] for r in mine if "psnr" in r]
        tail = f"{median(quality):.2f} dB | {min(quality):.2f} dB" if quality else "- | -"
        print(
            f"| {schedule} | {mine[0]['density']:.4f} | {median(r['denoise_s'] for r in mine):.1f} | {ratio:.2f}x | "
            f"{median(r['decode_s'] for r in mine):.1f} | {tail} |"
        )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
