"""The studies: which runs, how long, in which regimes; and how long they take on an H200, by what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parity.arms import ARMS, EXPLORED, OF_LINEARS, RECIPES, SCHEDULED, STATES, VARIANTS
from parity.emulated import EMULATED
from parity.models import SIZES, Size

REGIME_ARMS = {
    1: ("stock", "fp8", *RECIPES, *STATES, "torchao"),
    2: ("stock", "e4m11", "e4m11-nearest", "bf16-nearest", "fp8", "e4m19", *RECIPES, "fp32-master"),
    3: ("stock", *EMULATED, *OF_LINEARS, "e4m11", "e4m19", "fp8", *RECIPES, *VARIANTS, *EXPLORED, "fp32-master"),
}


@dataclass(frozen=True)
class Study:
    """Defaults of the command line.

    Attributes:
        steps: of 32 x 1024 tokens.
        bounded: arms that the two thresholds are for.
        checkpoint_at: share of the steps of stock's run of seed 0 after which regimes 2 and 3 branch off.
    """

    size: str
    steps: int
    regimes: tuple[int, ...]
    seeds: tuple[int, ...]
    arms: tuple[str, ...]
    bounded: tuple[str, ...]
    checkpoint_at: float = 0.7


_CONTROLS = ("e4m11-nearest", "bf16-nearest")
STUDIES = {
    # Issue 3; its results of 2026-11-20 and 21 have these settings.
    "masters": Study(
        *("124m", 3072, (1, 2, 3), (0, 1, 2)),
        arms=("stock", "fp8", "e4m19", "e4m11", "e4m11-nearest", "torchao", "bf16-nearest"),
        bounded=("e4m19", "e4m11", *OF_LINEARS, *RECIPES),
    ),
    # Issue 8: 201 M tokens a run. From scratch too many seeds are needed (results of 2026-11-21), so runs branch off
    # after 1,536 steps: in the rotary results the jump was between 700 and 1,150.
    "recipes": Study(
        *("124m", 6144, (3, 2), (0, 1, 2)),
        arms=("stock", "fp8", *RECIPES, *STATES, *_CONTROLS),
        bounded=("fp8", *RECIPES, *VARIANTS, *STATES, *SCHEDULED),
        checkpoint_at=0.25,
    ),
    # Which rounding costs what: short runs of a small model, from first weights behind the jump. Training losses tell.
    "parts": Study(
        *("small", 1024, (3,), (0,)),
        arms=("stock", *EMULATED, "fp8", "fp8-e4m3", "fp8-ends", "fp8-ends-e4m3"),
        bounded=(),
        checkpoint_at=1.0,
    ),
    "1b": Study("1b", 3072, (1,), (0, 1), arms=("stock", "fp8", "e4m11"), bounded=("fp8",)),
}


@dataclass(frozen=True)
class Job:
    """One run of the work list.

    Args:
        only_checkpoint: its results are known; it runs for the first weights of regimes 2 and 3.
    """

    regime: int
    arm: str
    seed: int
    only_checkpoint: bool = False

    @property
    def name(self) -> str:
        return f"r{self.regime}-{self.arm}-s{self.seed}{'-checkpoint' if self.only_checkpoint else ''}"

    @property
    def makes_checkpoint(self) -> bool:
        return (self.regime, self.arm, self.seed) == (1, "stock", 0)


def work_list(
    regimes: Sequence[int],
    arms: Iterable[str],
    seeds: Sequence[int],
    seeds2: Sequence[int],
    by_regime: bool = False,
    as_named: bool = False,
) -> list[Job]:
    """All runs by seed, or by regime and then by seed, the rival last: a list cut short has whole pairs.

    Args:
        arms: that run, in an order of each regime's own.
        as_named: no, in this one: who names them knows which may be lost when the time is up.
    """
    arms = tuple(arms)
    if by_regime:
        return [job for one in regimes for job in work_list([one], arms, seeds, seeds2, as_named=as_named)]
    jobs = []
    for seed in dict.fromkeys([*seeds, *seeds2]):
        for regime in regimes:
            if seed in (seeds2 if regime == 2 else seeds):
                names = REGIME_ARMS[regime] + (() if regime == 2 else SCHEDULED)
                if as_named:
                    names = tuple(arm for arm in dict.fromkeys(arms) if arm in names)
                jobs += [Job(regime, arm, seed) for arm in names if arm != "torchao"]
    jobs += [Job(1, "torchao", seeds[0])] if 1 in regimes else []
    return [job for job in jobs if job.arm in arms]


# --- how long it takes ---

_MEASURED_WIDTHS = (768, 2560)
_TERAFLOPS = {False: (280, 425), True: (315, 590)}
"""Of matrix products and attention by stock (False) and FP8 arms (True), at the two widths. 768: steps 614 to 3,072 of
stock's runs and 307 to 3,072 of e4m11's in benchmarks/results/2026-11-21-gpt-parity-rotary.csv, compiled: 410,000 and
462,000 tokens/s. 2560 is a guess: between these and Llama 2 B, 4096 wide, where 31,900 (eager) and 65,000
tokens/s are 385 and 784 TFLOP/s (2026-11-21-end-to-end.md) with steps of a quarter of the tokens, so four times the
share of the update, which cost stock some 70 of 257 ms there. Two H100, data parallel, had 402 and 496 a GPU
(2026-11-25-gpt-parity-1b.md)."""
START_UP = {"124m": 20, "1b": 60}
"""Seconds that a run takes before its steps are at speed: 10 to 26 in the rotary results; 1b's on two H100, with its
first weights drawn on the CPU."""


def matrix_parameters(size: Size) -> int:
    """Weights that a token meets in matrix products; the embedding is none."""
    if size.ffn:
        block = 2 * size.dim**2 + 2 * size.dim * size.kv_heads * 128 + 3 * size.dim * size.ffn
    else:
        block = 12 * size.dim**2
    return size.layers * block + size.dim * size.vocab_size


def flops_per_token(size: Size) -> int:
    """Forward and backward: 6 a weight; causal attention meets half of the sequence, 6 a feature and position."""
    return 6 * (matrix_parameters(size) + size.layers * size.dim * size.seq_len)


def predicted_seconds(size_name: str, arm: str, steps: int) -> float:
    """Of a run on one H200, compiled, alone on it, its ten evaluations included.

    Args:
        size_name: one whose width was measured or is stated in `_TERAFLOPS`.
    """
    size = SIZES[size_name]
    rate = 1e12 * _TERAFLOPS[ARMS[arm] is not None][_MEASURED_WIDTHS.index(size.dim)]
    tokens = steps * size.batch * size.seq_len + 11 * size.held_out_tokens / 3  # an evaluation has no backward
    return START_UP[size_name] + tokens * flops_per_token(size) / rate


def describe_plan(study: Study, jobs: Sequence[Job]) -> str:
    """A table of the runs with predicted GPU-seconds.

    Raises:
        SystemExit: nothing is known of the speed of this size.
    """
    if study.size not in START_UP:
        raise SystemExit(f"--plan: expected a size of {', '.join(START_UP)}, got {study.size}. Others were not timed.")
    lines = ["| run | M tokens | predicted s |", "|---|---|---|"]
    size, total = SIZES[study.size], 0.0
    trunk = any(job.regime != 1 for job in jobs) and not any(job.makes_checkpoint for job in jobs)
    rows = [(job.name, job.arm, study.steps) for job in jobs]
    rows[:0] = [("r1-stock-s0-checkpoint", "stock", round(study.checkpoint_at * study.steps))] if trunk else []
    for name, arm, steps in rows:
        seconds = predicted_seconds(study.size, arm, steps)
        total += seconds
        lines.append(f"| {name} | {steps * size.batch * size.seq_len / 1e6:.0f} | {seconds:.0f} |")
    return "\n".join([*lines, f"| all | | {total:.0f} |", ""])
