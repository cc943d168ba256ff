"""One run of out_of_box.py, in a process of its own: `train` is a user's script, the rest measures it.

python benchmarks/out_of_box_run.py --spec SPEC.json --out RESULT.json
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from processes import leave
from training_text import Windows

BLOCK = 4
"""Steps that are timed as one."""
LOSS_STEPS = 20
"""Of the end of the scheduler's steps, over which the loss is averaged."""


def train(spec: Mapping[str, Any]) -> Iterator[tuple[Any, torch.Tensor | None]]:
    """The script of a user: yields (engine, None) when it is built, and then with the loss of each step."""
    import deepspeed
    from deepspeed.runtime.lr_schedules import WarmupDecayLR
    from transformers import AutoConfig, AutoModelForCausalLM

    if "fp8" in spec["ds_config"]:
        import fp8_ds  # noqa: F401 (installs)
    torch.manual_seed(0)
    deepspeed.init_distributed()
    with torch.device(spec["device"]):
        config = AutoConfig.for_model(spec["model_type"], **spec["model"])
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if spec["is_checkpointed"]:
        model.gradient_checkpointing_enable()
    config, scheduler = dict(spec["ds_config"]), None
    if spec["makes_scheduler"]:
        scheduler = partial(WarmupDecayLR, **config.pop("scheduler")["params"])
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), lr_scheduler=scheduler, config=config
    )
    if spec["compile"] is not None:
        engine.compile(**spec["compile"])
    yield engine, None

    windows = Windows(Path(spec["text"], "train.npy"), spec["seq"], engine.device)
    micro_batch = engine.train_micro_batch_size_per_gpu()
    for ids in windows.order(spec["num_steps"] * micro_batch, seed=0).view(-1, micro_batch):
        input_ids = windows.batch(ids)[:, :-1]
        loss = engine(input_ids=input_ids, labels=input_ids).loss
        engine.backward(loss)
        engine.step()
        yield engine, loss.detach()


class Block(NamedTuple):
    """Steps in a row: those taken at its end, ms of one, their mean loss, the peak in it, and layers in bf16 then."""

    last_step: int
    ms: float
    loss: float
    peak_gib: float
    num_in_bf16: int


class Turns:
    """A GPU that runs have together, or one of them alone, as two files at `path` say. Whoever wants it alone has it as
    soon as those who have it now want something else: nobody comes in between."""

    def __init__(self, path: str) -> None:
        self._door, self._room = (os.open(path + end, os.O_CREAT | os.O_WRONLY) for end in (".door", ".room"))
        self._alone: bool | None = None

    def take(self, alone: bool) -> None:
        """Wait for the turn; it ends with the next call, or the process."""
        if alone != self._alone:
            fcntl.flock(self._room, fcntl.LOCK_UN)
            fcntl.flock(self._door, fcntl.LOCK_EX)
            fcntl.flock(self._room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            fcntl.flock(self._door, fcntl.LOCK_UN)
            self._alone = alone


def measure(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Result of the run that `spec` describes: see `phases`; and each block's mean loss, and what the plan says."""
    on_cuda, scheduled = spec["device"] == "cuda", spec["ds_config"]["scheduler"]["params"]["total_num_steps"]
    for package in ("deepspeed", "transformers"):  # importing disturbs nobody who times
        import_module(package)
    turns = Turns(spec["turns"])
    turns.take(alone=False)
    steps = train(spec)
    engine, _ = next(steps)
    report = getattr(engine, "fp8_report", dict)
    blocks: list[Block] = []
    for last in range(BLOCK, spec["num_steps"] + 1, BLOCK):
        is_timed = spec["num_warm"] < last <= scheduled - BLOCK or last > scheduled + BLOCK
        if on_cuda:
            torch.cuda.synchronize()
        turns.take(alone=is_timed)
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        losses = [loss for _, (_, loss) in zip(range(BLOCK), steps, strict=False)]
        loss = float(torch.stack(losses).float().mean())  # waits for the backward
        if on_cuda:
            torch.cuda.synchronize()
        ms = 1000 * (time.perf_counter() - start) / BLOCK
        peak = torch.cuda.max_memory_allocated() / 2**30 if on_cuda else 0.0
        blocks.append(Block(last, ms, loss, peak, report().get("num_layers_in_bf16", 0)))
    return {
        **phases(blocks, spec["num_warm"], scheduled),
        "losses": [round(block.loss, 3) for block in blocks],
        "plan": report().get("plan", "").partition(";")[0],
    }


def phases(blocks: Sequence[Block], num_warm: int, scheduled: int) -> dict[str, Any]:
    """Milliseconds of a step and peak GiB, in FP8 or of a bf16 run, and in bf16 after FP8; the loss.

    Args:
        num_warm: steps at the start that are not timed.
        scheduled: steps that the scheduler knows of. The loss is that of the last of them; after them, and another
            block, FP8 layers are timed in bf16.

    Returns:
        Medians of blocks, the largest peaks, None for what was not run; seconds that the first block took, and the one
        in which layers went to bf16: what they compile is in them; and the layers that were in bf16 before it.
    """
    usual = [block for block in blocks if num_warm < block.last_step <= scheduled - BLOCK]
    late = [block for block in blocks if block.last_step > scheduled + BLOCK]
    switch = next((block for block in blocks if block.num_in_bf16 > usual[-1].num_in_bf16), None)
    losses = [block.loss for block in blocks if scheduled - LOSS_STEPS < block.last_step <= scheduled]
    return {
        "step_ms": round(median(block.ms for block in usual), 2),
        "bf16_ms": round(median(block.ms for block in late), 2) if late else None,
        "gib": round(max(block.peak_gib for block in usual), 2),
        "bf16_gib": round(max(block.peak_gib for block in late), 2) if late else None,
        "loss": round(fmean(losses), 4) if blocks[-1].last_step >= scheduled else None,
        "first_s": round(blocks[0].ms * BLOCK / 1000, 1),
        "num_in_bf16": usual[-1].num_in_bf16,
        "switch_s": None if switch is None else round(switch.ms * BLOCK / 1000, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.write_text(json.dumps(measure(json.loads(args.spec.read_text()))))
    leave()


if __name__ == "__main__":
    main()
