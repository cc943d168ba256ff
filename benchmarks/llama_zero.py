"""FP8 ZeRO 1, 2, 3 beside stock bf16 on a Hugging Face Llama: loss, tokens/s, peak memory. Writes a dated result file.

    python benchmarks/llama_zero.py --gpus 1            # 8 layers of Llama-8B's shapes, 2.0 B parameters, 50 steps
    python benchmarks/llama_zero.py --gpus 2 --steps 8 --seq 64 --hidden 256 --layers 2    # dry run on CPU

Every arm is a `deepspeed` launch of the same script; only the JSON differs. The stock arm of each stage runs next to
its FP8 arms, so ratios are taken between neighbours.

Prediction, written before the first run on an H200: losses of FP8 within 1 % of bf16 at step 50 in every stage;
weights resident 2.3 GB against 4.0 GB in stages 1 and 2 and on one GPU in stage 3; peak of a step 3 to 5 GB lower
(weights, and linear inputs kept in FP8); tokens/s 0.8 to 1.1 of stock, because casts and transposes are not fused yet.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FP8_ARMS: dict[str, dict[str, Any]] = {
    "fp8 tensorwise": {"enabled": True},
    "fp8 delayed": {"enabled": True, "linear": {"recipe": "delayed"}},
    "fp8 keep_bf16_shard": {"enabled": True, "zero": {"keep_bf16_shard": True}},
}


def ds_config(stage: int, fp8: dict[str, Any] | None, cpu: bool) -> dict[str, Any]:
    """The same for all arms but for the stage and the "fp8" block."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1, **({"torch_adam": True} if cpu else {})},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 1e-4, "warmup_num_steps": 20, "warmup_type": "linear"},
        },
        "zero_optimization": {"stage": stage, "overlap_comm": True},
        "steps_per_print": 1_000_000,
    }
    if fp8 is not None:
        config["fp8"] = fp8
    return config


def run_arm(args: argparse.Namespace, name: str, config: dict[str, Any]) -> dict[str, Any]:
    """One launch; its result, or the tail of its log under "error"."""
    with tempfile.TemporaryDirectory() as folder:
        config_path, out = Path(folder, "ds.json"), Path(folder, "out.json")
        config_path.write_text(json.dumps(config))
        worker = [str(HERE / "llama_zero_worker.py"), "--deepspeed_config", str(config_path), "--out", str(out)]
        worker += [f"--{key}={getattr(args, key)}" for key in ("steps", "seq", "layers", "hidden", "dither")]
        launch = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(args.gpus), *worker]
        start = time.monotonic()
        done = subprocess.run(launch, stdout=-1, stderr=-2, text=True, check=False, timeout=args.arm_timeout)
        if done.returncode or not out.exists():
            return {"name": name, "error": done.stdout[-3000:]}
        result: dict[str, Any] = json.loads(out.read_text())
    return {"name": name, **result, "wall_s": round(time.monotonic() - start, 1)}


def table(results: list[dict[str, Any]]) -> str:
    """Markdown; ratios are to the stock arm of the same stage."""
    lines = [
        "| arm | loss at 10 | last loss | mean of last 10 | ms/step | tokens/s/GPU | of stock | peak of step GiB "
        "| peak of initialize GiB | weights resident GiB | gathered GB/step |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    stock_speed = 0.0
    for r in results:
        if "error" in r:
            lines.append(f"| {r['name']} | failed | | | | | | | | | |")
            continue
        if "stock" in r["name"]:
            stock_speed = r["tokens_per_second_per_gpu"]
        fp8 = r["fp8"] or {}
        resident = f"{fp8['resident_weight_bytes'] / 2**30:.2f}" if fp8 else ""
        gathered = f"{fp8['gathered_bytes'] / 1e9:.2f}" if fp8 else ""
        last = r["losses"][-10:]
        lines.append(
            f"| {r['name']} | {r['losses'][min(9, len(r['losses']) - 1)]:.4f} | {r['losses'][-1]:.4f} "
            f"| {sum(last) / len(last):.4f} | {r['step_ms']:.1f} | {r['tokens_per_second_per_gpu']:,.0f} "
            f"| {r['tokens_per_second_per_gpu'] / stock_speed:.2f} | {r['step_peak_gib']:.2f} "
            f"| {r['init_peak_gib']:.2f} | {resident} | {gathered} |"
        )
    return "\n".join(lines)


def machine() -> dict[str, str]:
    import deepspeed
    import torch
    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"
    return {
        "device": device,
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", default=["fp8 tensorwise"], choices=list(FP8_ARMS))
    parser.add_argument("--dither", type=int, default=0, choices=[0, 1], help="masters start off the bf16 grid")
    parser.add_argument("--arm-timeout", type=float, default=200)
    parser.add_argument("--budget", type=float, default=570, help="seconds; arms that would start later are left out")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    import torch

    cpu = not torch.cuda.is_available()
    if cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    start, results, left_out = time.monotonic(), [], []
    stem = f"{datetime.date.today():%Y-%m-%d}-llama-zero-{args.gpus}gpu{'-dither' if args.dither else ''}"
    args.out.mkdir(parents=True, exist_ok=True)
    for stage in args.stages:
        for name in ["stock bf16", *args.arms]:
            if "keep_bf16" in name and stage != 3:
                continue
            if time.monotonic() - start > args.budget:
                left_out.append(f"stage {stage} {name}")
                continue
            results.append(run_arm(args, f"stage {stage} {name}", ds_config(stage, FP8_ARMS.get(name), cpu)))
            head = {"machine": machine(), "command": " ".join(sys.argv), "left_out": left_out}
            (args.out / f"{stem}.json").write_text(json.dumps({**head, "results": results}, indent=1))
            text = f"# {stem}\n\n`{head['command']}`\n\n{head['machine']}\n\n{table(results)}\n\nLeft out: {left_out}\n"
            (args.out / f"{stem}.md").write_text(text)
    for r in results:
        if "error" in r:
            print(r["name"], r["error"][-1500:])
    print(table(results))


if __name__ == "__main__":
    main()
