"""The largest Llama-shaped model that trains with AdamW on one GPU without offload. Writes dated result files.

    python benchmarks/largest_model.py                                   # largest first, each arm until one fits
    python benchmarks/largest_model.py --size 22 --arms "fp8 states"     # one size
    python benchmarks/largest_model.py --size tiny --seq 64 --vocab 512 --steps 3     # dry run on CPU

DeepSpeed with ZeRO-3 on one rank, the model built under `zero.Init`, gradient checkpointing on, one sequence of 1024,
five steps on the same tokens: the loss must fall. Every try is a process of its own that writes its memory after each
phase, so one that runs out of memory says where; what the prediction puts above the device's memory is not tried. The
control is stock DeepSpeed in bf16 at the sizes that fitted ours.

Prediction, written before the first run on an H200 (139.8 GiB, 1 or 2 of them taken by CUDA and fragments): resident
4.06 B a parameter with gradient release and 6.06 without (embedding and head 5.06 and 7.06), stock 18; activations and
the largest temporaries 2 to 4 GiB. So 34 B with release, 23 B without, and stock fails from 8 B up.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from results_io import dated_stem, heading, without_folders
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8_ds.device import uses_cuda
from fp8_ds.launcher import free_port

HERE = Path(__file__).parent
HEAD_DIM = 128
STATES: dict[str, Any] = {"states": "fp8", "master": "e4m11"}
ARMS: dict[str, dict[str, Any] | None] = {
    "fp8 states, release": {"enabled": True, "optimizer": {**STATES, "release": True}},
    "fp8 states": {"enabled": True, "optimizer": STATES},
    "stock bf16": None,
}
"""The "fp8" block of each arm; the last is the control."""
CONTROL = "stock bf16"


@dataclass(frozen=True)
class Shape:
    """A Llama with grouped queries: keys and values of a quarter of the heads, at least one."""

    layers: int
    hidden: int
    ffn: int

    def num_linear(self) -> int:
        """Parameters of linears in the layers: what is FP8."""
        return self.layers * (self.hidden * (2 * self.hidden + 2 * self.kv) + 3 * self.hidden * self.ffn)

    @property
    def kv(self) -> int:
        return max(HEAD_DIM, self.hidden // 4 // HEAD_DIM * HEAD_DIM)


SIZES = {
    "tiny": Shape(2, 256, 896),
    "8": Shape(36, 4096, 14336),
    "13": Shape(38, 5120, 17920),
    "16": Shape(47, 5120, 17920),
    "20": Shape(41, 6144, 21504),
    "22": Shape(45, 6144, 21504),
    "23": Shape(46, 6144, 21504),
    "24": Shape(49, 6144, 21504),
    "28": Shape(41, 7168, 25088),
    "32": Shape(47, 7168, 25088),
    "34": Shape(50, 7168, 25088),
}
"""Named for their parameters in billions, with 32000 tokens."""


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, kv, ffn = shape.hidden, shape.kv, shape.ffn
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, kv, bias=False)
        self.v_proj = nn.Linear(hidden, kv, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)
        self.up_proj = nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq_len, hidden = x.shape
        h = self.attention_norm(x)
        q, k, v = (
            proj(h).view(batch, seq_len, -1, HEAD_DIM).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(
            rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        x = x + self.o_proj(out.transpose(1, 2).reshape(batch, seq_len, hidden))
        h = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Llama(nn.Module):
    def __init__(self, shape: Shape, vocab_size: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.lm_head = nn.Linear(shape.hidden, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross entropy, float32 scalar, of int64 tokens [batch, seq_len + 1]. Each layer is checkpointed."""
        x = self.embed_tokens(tokens[:, :-1])
        frequency = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=x.device) / HEAD_DIM)
        angle = torch.arange(x.shape[1], device=x.device)[:, None] * frequency
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for layer in self.layers:
            x = checkpoint(layer, x, cos, sin, use_reentrant=False)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def predicted_bytes(arm: str, shape: Shape, vocab_size: int) -> float:
    """Resident bytes of weights, masters, moments and gradients; activations and temporaries come on top.

    Stock: bf16 weight and gradient, float32 master, two moments and the float32 gradient that its step makes.
    """
    linear, other = shape.num_linear(), 2 * vocab_size * shape.hidden + (2 * shape.layers + 1) * shape.hidden
    block = ARMS[arm]
    if block is None:
        return 18.0 * (linear + other)
    grad = 0 if block["optimizer"].get("release") else 2
    moments = 2 + 2 * 4 / 128
    return linear * (2 + moments + grad) + other * (3 + moments + grad)


def device_bytes() -> float:
    return torch.cuda.get_device_properties(0).total_memory if uses_cuda() else float("inf")


class MemoryLog:
    """Appends one JSON line per phase: bytes allocated at its end and the peak within it."""

    def __init__(self, path: Path, num_parameters: int) -> None:
        from deepspeed.accelerator import get_accelerator

        self.path = path
        self.num_parameters = num_parameters
        self.accelerator = get_accelerator()
        self.start = time.monotonic()

    def begin(self, phase: str) -> None:
        self.accelerator.reset_peak_memory_stats()
        self._write({"phase": phase, "began": True})

    def end(self, phase: str, **more: Any) -> None:
        self.accelerator.synchronize()
        now, peak = self.accelerator.memory_allocated(), self.accelerator.max_memory_allocated()
        self._write(
            {
                "phase": phase,
                "gib": round(now / 2**30, 3),
                "peak_gib": round(peak / 2**30, 3),
                "bytes_per_param": round(now / self.num_parameters, 3),
                "peak_bytes_per_param": round(peak / self.num_parameters, 3),
                "seconds": round(time.monotonic() - self.start, 1),
                **more,
            }
        )

    def _write(self, record: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            print(json.dumps(record), file=file)


def ds_config(arm: str, cpu: bool) -> dict[str, Any]:
    """Small buckets: what DeepSpeed holds besides the state counts here, and one rank reduces nothing."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-5, "betas": [0.9, 0.95], "weight_decay": 0.1, **({"torch_adam": True} if cpu else {})},
        },
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 50_000_000,
            "stage3_prefetch_bucket_size": 50_000_000,
            "stage3_max_live_parameters": 300_000_000,
            "stage3_max_reuse_distance": 0,
            "sub_group_size": 300_000_000,
        },
        "steps_per_print": 1_000_000_000,
    }
    if ARMS[arm] is not None:
        config["fp8"] = ARMS[arm]
    return config


def train(args: argparse.Namespace) -> None:
    """One try, in this process: construction, initialize, steps; each phase in the log."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    import fp8_ds  # noqa: F401

    shape = SIZES[args.size]
    device = torch.device(get_accelerator().device_name(0))
    get_accelerator().set_device(0)
    deepspeed.init_distributed()
    config = ds_config(args.worker, device.type == "cpu")
    linear = shape.num_linear()
    num_parameters = linear + 2 * args.vocab * shape.hidden + (2 * shape.layers + 1) * shape.hidden
    log = MemoryLog(args.log, num_parameters)
    torch.manual_seed(0)
    log.begin("construction")
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Llama(shape, args.vocab)
    counted = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    assert counted == num_parameters, (counted, num_parameters)
    log.end("construction")
    log.begin("initialize")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    log.end("initialize")
    tokens = torch.randint(args.vocab, (1, args.seq + 1), generator=torch.Generator().manual_seed(1)).to(device)
    for step in range(1, args.steps + 1):
        log.begin(f"step {step}")
        start = time.perf_counter()
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        log.end(f"step {step}", loss=round(float(loss.detach()), 4), ms=round(1000 * (time.perf_counter() - start)))


def run_try(args: argparse.Namespace, arm: str, size: str, log: Path) -> dict[str, Any]:
    """One try in a process of its own; "error" says why it did not finish and in which phase."""
    log.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", arm, f"--size={size}", f"--log={log}"]
    command += [f"--{key}={getattr(args, key)}" for key in ("seq", "vocab", "steps")]
    env = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(free_port()), "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    if not uses_cuda():
        env["DS_ACCELERATOR"] = "cpu"
    try:
        done = subprocess.run(command, stdout=-1, stderr=-2, text=True, check=False, timeout=args.try_timeout, env=env)
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired:
        code, output = 124, f"no end after {args.try_timeout:.0f} s"
    records = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return {"arm": arm, "size": size, **summary(args, arm, size, records, code, output)}


def summary(
    args: argparse.Namespace, arm: str, size: str, records: list[dict[str, Any]], code: int, output: str
) -> dict[str, Any]:
    """What a try's records and output say."""
    shape = SIZES[size]
    num = shape.num_linear() + 2 * args.vocab * shape.hidden + (2 * shape.layers + 1) * shape.hidden
    predicted = predicted_bytes(arm, shape, args.vocab)
    phases = [record for record in records if "began" not in record]
    losses = [record["loss"] for record in phases if "loss" in record]
    result: dict[str, Any] = {
        "parameters": num,
        "predicted_gib": round(predicted / 2**30, 2),
        "predicted_bytes_per_param": round(predicted / num, 3),
        "phases": phases,
        "losses": losses,
        "trained": code == 0 and len(losses) == args.steps and losses[-1] < losses[0],
    }
    if code:
        memory = "out of memory" in output.lower()
        lines = [line for line in output.splitlines() if line.strip()] or ["no output"]
        told = [line for line in lines if "out of memory" in line.lower()] if memory else lines[-12:]
        result["error"] = "out of memory" if memory else f"exit status {code}"
        result["failed_in"] = records[-1]["phase"] if records else "start"
        result["output"] = without_folders("\n".join(told)[-1500:])
    elif not result["trained"]:
        result["error"] = f"the loss did not fall: {losses}"
    return result


def search(sizes: list[str], attempt: Callable[[str], dict[str, Any]]) -> list[dict[str, Any]]:
    """Tries in order until one trains; what fails otherwise than for memory ends the search."""
    tries = []
    for size in sizes:
        tries.append(attempt(size))
        if tries[-1].get("error") != "out of memory":
            break
    return tries


def table(tries: list[dict[str, Any]]) -> str:
    lines = [
        "| arm | B parameters | construction GiB (peak) | initialize GiB (peak) | peak of step GiB | B/param after "
        "initialize | peak B/param of step | predicted B/param (GiB) | losses | outcome |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for t in tries:
        phases = {p["phase"]: p for p in t["phases"]}
        steps = [p for name, p in phases.items() if name.startswith("step")]
        cells = [
            f"{phases[name]['gib']:.2f} ({phases[name]['peak_gib']:.2f})" if name in phases else ""
            for name in ("construction", "initialize")
        ]
        cells.append(f"{max(p['peak_gib'] for p in steps):.2f}" if steps else "")
        cells.append(f"{phases['initialize']['bytes_per_param']:.3f}" if "initialize" in phases else "")
        cells.append(f"{max(p['peak_bytes_per_param'] for p in steps):.3f}" if steps else "")
        cells.append(f"{t['predicted_bytes_per_param']:.3f} ({t['predicted_gib']:.2f})")
        cells.append(", ".join(f"{loss:.3f}" for loss in t["losses"]))
        outcome = "trains" if t["trained"] else f"**{t['error']}** in {t.get('failed_in', 'training')}"
        lines.append(f"| {t['arm']} | {t['parameters'] / 1e9:.2f} | {' | '.join(cells)} | {outcome} |")
    return "\n".join(lines)


def verdicts(tries: list[dict[str, Any]]) -> list[str]:
    """The issue's claim and its control."""
    fits = [t for t in tries if t["trained"] and t["arm"] != CONTROL]
    if not fits:
        return ["MISSED: no model trained with FP8 states"]
    largest = max(fits, key=lambda t: t["parameters"])
    lines = [
        f"{'met' if largest['parameters'] > 20e9 else 'MISSED'}: more than 20 B parameters train on one device "
        f"({largest['parameters'] / 1e9:.2f} B, {largest['arm']})"
    ]
    for t in fits:
        same = [c for c in tries if c["arm"] == CONTROL and c["size"] == t["size"]]
        if not same:
            lines.append(f"NOT MEASURED: stock DeepSpeed at {t['parameters'] / 1e9:.2f} B")
        elif same[0].get("error") == "out of memory":
            where = same[0]["failed_in"]
            lines.append(f"met: stock DeepSpeed runs out of memory at {t['parameters'] / 1e9:.2f} B, in {where}")
        else:
            lines.append(f"MISSED: stock DeepSpeed at {t['parameters'] / 1e9:.2f} B: {same[0].get('error', 'trains')}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--size", nargs="+", choices=list(SIZES), help="default: all, the largest first")
    parser.add_argument("--control-size", nargs="+", default=[], choices=list(SIZES), help="more sizes for stock")
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--try-timeout", type=float, default=180)
    parser.add_argument("--budget", type=float, default=560, help="seconds; tries that would start later are left out")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--worker", choices=list(ARMS), help="train this arm in this process")
    parser.add_argument("--log", type=Path)
    args = parser.parse_args()
    if args.worker:
        args.size = args.size[0]
        train(args)
        return
    stem = dated_stem(args.out, "largest-model")
    sizes = args.size or sorted((s for s in SIZES if s != "tiny"), key=lambda s: -SIZES[s].num_linear())
    start, tries, left_out = time.monotonic(), [], []

    def attempt(arm: str, size: str) -> dict[str, Any]:
        if time.monotonic() - start > args.budget:
            left_out.append(f"{arm}, {size} B")
            return {"error": "left out"}
        result = run_try(args, arm, size, stem.with_suffix(".log"))
        tries.append(result)
        print(json.dumps({key: value for key, value in result.items() if key != "phases"}), flush=True)
        text = heading(stem.name) + table(tries) + "\n\n" + "\n".join(f"- {line}" for line in verdicts(tries))
        stem.with_suffix(".md").write_text(f"{text}\n\nLeft out: {left_out}\n")
        stem.with_suffix(".json").write_text(json.dumps(tries, indent=1))
        return result

    for arm in (arm for arm in args.arms if arm != CONTROL):
        hopeful = [size for size in sizes if predicted_bytes(arm, SIZES[size], args.vocab) < device_bytes()]
        search(hopeful, lambda size, arm=arm: attempt(arm, size))  # type: ignore[misc]
    if CONTROL in args.arms:
        for size in dict.fromkeys([t["size"] for t in tries if t["trained"]] + args.control_size):
            attempt(CONTROL, size)
    stem.with_suffix(".log").unlink(missing_ok=True)
    print(table(tries), *verdicts(tries), f"Left out: {left_out}", sep="\n")


if __name__ == "__main__":
    main()
