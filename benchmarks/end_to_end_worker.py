"""One run of end_to_end.py, in a process a GPU: trains an arm on text, and times it while it does.

Reads the settings that end_to_end.py wrote (`--spec`), writes its result (`--out`, rank 0).
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sdpa
import torch
import torch.distributed as dist
from end_to_end_arms import LR, Arm, Model
from end_to_end_trainers import EngineTrainer, PlainTrainer, Trainer
from step_profile import profile_steps
from torch import Tensor
from training_text import Windows

from fp8_ds.attention import describe_backend

BLOCK = 10
"""Steps between two looks at the clock and the losses; the device is idle at both ends of a block."""
UNTIMED_BLOCKS = 2
"""At a run's start: compilation, and once more where delayed scales begin."""


class Gauge:
    """Synchronisation and memory of the device, zero on CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_cuda = device.type == "cuda"

    def synchronize(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()

    def reset_peak(self) -> None:
        if self.on_cuda:
            torch.cuda.reset_peak_memory_stats()

    def peaks(self) -> dict[str, float]:
        """GiB, the largest of all ranks."""
        values = torch.zeros(2, dtype=torch.float64, device=self.device)
        if self.on_cuda:
            values[0], values[1] = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        allocated, reserved = (round(float(value) / 2**30, 3) for value in values)
        return {"peak_allocated_gib": allocated, "peak_reserved_gib": reserved}


def learning_rate(step: int, steps: int, decays: bool) -> float:
    """Of step 0, 1, ...: rises over 5 % of the steps, at least 20; then falls linearly to zero, or stays."""
    warm = min(max(20, steps // 20), steps)
    if step < warm:
        return LR * (step + 1) / warm
    return LR * (steps - step) / (steps - warm) if decays else LR


@dataclass
class Block:
    """Steps in a row.

    Attributes:
        last_step: steps taken at its end.
        ms: of a step, in the mean.
        loss: mean training loss, over all ranks.
        num_in_bf16: FP8 layers that computed in bf16 then.
    """

    last_step: int
    ms: float
    loss: float
    num_in_bf16: int = 0


class TextRun:
    """Trains on windows of text whose order only the seed decides, the same for all arms.

    Args:
        spec: as end_to_end.py wrote it.
        rank: of `m.gpus` ranks, each of which takes its own windows.
    """

    def __init__(self, trainer: Trainer, m: Model, spec: dict[str, Any], device: torch.device, rank: int) -> None:
        self.trainer, self.m, self.spec, self.rank = trainer, m, spec, rank
        cache = Path(spec["text"]["cache"])
        self.windows = Windows(cache / "train.npy", m.seq, device)
        self.held_out = Windows(cache / "held_out.npy", m.seq, device)
        first, count = spec["first_step"], spec["steps"]
        order = self.windows.order((first + count) * m.gpus * m.micro_batch, spec["seed"])
        self.order = order.view(-1, m.gpus, m.micro_batch)[first:, rank].to(device)
        self.gauge = Gauge(device)

    def block(self, first: int, num: int) -> Block:
        losses = []
        self.gauge.synchronize()
        start = time.perf_counter()
        for step in range(first, first + num):
            self.trainer.set_lr(learning_rate(step, self.spec["steps"], self.spec["decays"]))
            losses.append(self.trainer.step(self.windows.batch(self.order[step])).float())
        self.gauge.synchronize()
        ms = 1000 * (time.perf_counter() - start) / num
        loss = self._mean(torch.stack(losses).mean())
        return Block(first + num, ms, loss, (self.trainer.report() or {}).get("num_layers_in_bf16", 0))

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean held-out loss, the same windows for all arms, seeds and steps."""
        per_batch = self.m.micro_batch * self.m.gpus
        num = min(-(-self.spec["held_out_tokens"] // self.m.seq), self.held_out.num_windows)
        num = max(per_batch, num // per_batch * per_batch)
        mine = torch.arange(num).view(-1, self.m.gpus, self.m.micro_batch)[:, self.rank]
        self.trainer.model.eval()
        losses = [self.trainer.forward(self.held_out.batch(part)).double() for part in mine]
        self.trainer.model.train()
        return self._mean(torch.stack(losses).mean())

    def _mean(self, value: Tensor) -> float:
        if self.m.gpus > 1:
            dist.all_reduce(value)
            value = value / self.m.gpus
        return float(value)

    def run(self) -> dict[str, Any]:
        """Blocks of steps with evaluations between them."""
        steps, num_evaluations = self.spec["steps"], self.spec["evaluations"]
        due = {round(steps * k / num_evaluations / BLOCK) * BLOCK for k in range(1, num_evaluations)}
        blocks: list[Block] = []
        held_out = [(0, self.evaluate())] if num_evaluations > 1 else []
        for first in range(0, steps, BLOCK):
            if len(blocks) == UNTIMED_BLOCKS:
                self.gauge.reset_peak()
            blocks.append(self.block(first, min(BLOCK, steps - first)))
            if blocks[-1].last_step in due:
                held_out.append((blocks[-1].last_step, self.evaluate()))
                if self.rank == 0:
                    print(f"{blocks[-1]}, held out {held_out[-1][1]:.4f}", flush=True)
        peaks = self.gauge.peaks()
        held_out.append((steps, self.evaluate()))
        return {**timing(blocks, self.m.tokens), **peaks, "held_out": held_out, **as_columns(blocks)}


def timing(blocks: list[Block], tokens: int) -> dict[str, Any]:
    """Milliseconds a step in the mean of the run: of its steps in FP8 and of those in bf16 the median of their blocks.

    Args:
        tokens: a rank and step.
    """
    shown = blocks[UNTIMED_BLOCKS:] or blocks
    num_bf16 = sum(block.num_in_bf16 > 0 for block in blocks)
    in_bf16, in_fp8 = ([b.ms for b in shown if (b.num_in_bf16 > 0) == phase] for phase in (True, False))
    phases = [(num, statistics.median(ms)) for num, ms in ((num_bf16, in_bf16), (len(blocks) - num_bf16, in_fp8)) if ms]
    ms = sum(num * median for num, median in phases) / sum(num for num, _ in phases)
    return {
        "step_ms": round(ms, 3),
        "step_ms_of_bf16_steps": round(statistics.median(in_bf16), 3) if in_bf16 and in_fp8 else None,
        "tokens_per_second_per_gpu": round(1000 * tokens / ms, 1),
    }


def as_columns(blocks: list[Block]) -> dict[str, Any]:
    return {
        "last_steps": [block.last_step for block in blocks],
        "losses": [round(block.loss, 5) for block in blocks],
        "block_ms": [round(block.ms, 2) for block in blocks],
    }


# --- one arm ---


class InEager(logging.Handler):
    """Functions that torch.compile gave up on: past its limit of graphs of one function they run in eager.

    torch warns once each, in an output that nobody reads where the arm ends well.

    Attributes:
        functions: "'name' (file:line)" of each.
    """

    LOGGER = "torch._dynamo.convert_frame"

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.functions: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "hit config" in str(record.msg) and isinstance(record.args, tuple):
            self.functions.append(re.sub(r"\((?:.*/)?([^/]+)\)$", r"(\1)", str(record.args[2])))

    def __enter__(self) -> InEager:
        logging.getLogger(self.LOGGER).addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger(self.LOGGER).removeHandler(self)


def start(arm: Arm, m: Model, on_cuda: bool, local_rank: int) -> torch.device:
    """The device of this rank, process group made where there is one."""
    device = torch.device("cuda", local_rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    if arm.uses_deepspeed:
        if not on_cuda:
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        deepspeed.init_distributed()
    elif m.gpus > 1:
        dist.init_process_group("nccl" if on_cuda else "gloo")
    return device


def kernel_of_attention(arm: Arm, m: Model, device: torch.device) -> str:
    """What the arm asks for; else what SDPA picks for the model's sizes."""
    if arm.fa3 or (arm.fp8 or {}).get("attention", {}).get("backend") == "fa3":
        return describe_backend("fa3")
    return sdpa.picked(m.micro_batch, m.seq, m.heads, m.kv_heads, m.head_dim, device)


def measure(spec: dict[str, Any], local_rank: int) -> dict[str, Any]:
    """The result of the run that `spec` describes."""
    began = time.monotonic()
    arm, m = Arm(**spec["arm"]), Model(**spec["model"])
    device = start(arm, m, spec["on_cuda"], local_rank)
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(spec["init_seed"])
    trainer = (EngineTrainer if arm.uses_deepspeed else PlainTrainer)(arm, m, spec, device)
    gc.collect()
    gauge = Gauge(device)
    result: dict[str, Any] = {
        "attention": kernel_of_attention(arm, m, device),
        "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in trainer.model.parameters()),
        "build_seconds": round(time.monotonic() - began, 1),
        **{f"build_{name}": value for name, value in gauge.peaks().items()},
    }
    run = TextRun(trainer, m, spec, device, rank)
    if spec["profile"]:
        run.block(0, BLOCK)
        result["step_ms"] = round(run.block(BLOCK, BLOCK).ms, 3)
        traces = Path(spec["traces"]) if spec["traces"] and rank == 0 else None
        return result | profile_steps(trainer, gauge, lambda k: trainer.step(run.windows.batch(run.order[k])), traces)
    result |= run.run()
    if spec["save_weights"] and rank == 0:
        weights = {name: p.detach().bfloat16().cpu() for name, p in trainer.model.named_parameters()}
        torch.save(weights, spec["save_weights"])
    return {**result, "fp8": trainer.report()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    with InEager() as in_eager:
        result = measure(json.loads(args.spec.read_text()), args.local_rank)
    result["in_eager"] = in_eager.functions
    if not dist.is_initialized() or dist.get_rank() == 0:
        args.out.write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()  # and Python's own way out, at which the last report of fp8.monitor is written


if __name__ == "__main__":
    main()
