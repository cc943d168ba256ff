"""At hundreds of ranks a step has as many collectives as at tens: one rank is real, the others are imagined."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import HANG

SCRIPT = Path(__file__).with_name("one_of_many.py")
BLOCKS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp8": {"optimizer": {"states": "fp8", "master": "e4m11"}},
    "release": {"optimizer": {"states": "fp8", "release": True}},
    "reduce-scatter": {"zero": {"reduce_scatter": "fp8"}},
    "blockwise": {"linear": {"recipe": "blockwise"}},
    "in bf16": {"schedule": {"bf16_until_step": 100}},
}


TOGETHER = [(0, 3, "fp8"), (0, 3, "fp32"), (0, 3, "reduce-scatter")]
"""(rank, stage, block) of the default cases of one rank, which share a process: its start takes longer than they do."""
KNOWN: dict[tuple[int, int, str], Any] = {}


def step_of(environment: dict[str, str], rank: int, stage: int, block: str) -> Any:
    """What a step of this rank of 512 calls, by name, its operators, and the bytes of its gathers."""
    asked = (rank, stage, block)
    if asked not in KNOWN:
        cases = TOGETHER if asked in TOGETHER else [asked]
        common = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        }
        command = [sys.executable, str(SCRIPT), "512", str(rank)]
        for _, of_case, name in cases:
            own = {"zero_optimization": {"stage": of_case}, "fp8": {"enabled": True, **BLOCKS[name]}}
            command.append(json.dumps(common | own))
        done = subprocess.run(command, stdout=-1, stderr=-2, text=True, env=environment, timeout=HANG, check=False)
        assert done.returncode == 0, done.stdout[-4000:]
        lines = [line for line in done.stdout.splitlines() if line.startswith("STEP")]
        for case, line in zip(cases, lines, strict=True):
            KNOWN[case] = json.loads(line.removeprefix("STEP"))
    return KNOWN[asked]


def collectives(stage: int, block: str) -> dict[str, int]:
    """Of a step of a model in one bucket: gradients and their norm, amaxes, and gathers of weights of two kinds."""
    in_fp8 = block == "reduce-scatter"
    if stage == 3:
        gathers = 2 if block == "in bf16" else 4
        return {"all_gather": gathers, "all_reduce": 2, "all_to_all" if in_fp8 else "reduce_scatter": 1}
    return {"all_gather": 2, "all_to_all": 4 if in_fp8 else 2, "all_reduce": 3 if in_fp8 else 4}


CASES = [
    (2, 300, "fp8"),
    pytest.param(1, 511, "release", marks=pytest.mark.slow),
    pytest.param(2, 0, "reduce-scatter", marks=pytest.mark.slow),
    pytest.param(3, 0, "blockwise", marks=pytest.mark.slow),
    pytest.param(3, 511, "in bf16", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("stage", "rank", "block"), CASES)
def test_a_step_of_512_ranks_has_the_collectives_of_one_of_few(
    cpu_environment: dict[str, str], stage: int, rank: int, block: str
) -> None:
    step = step_of(cpu_environment, rank, stage, block)
    assert step["calls"] == collectives(stage, block)
    assert step["gathered"] > 0


def test_gradients_of_512_ranks_are_cut_in_few_launches(cpu_environment: dict[str, str]) -> None:
    """ZeRO-3 of stock has 19,307 here, and FP8 ones had 50,722, packed and added rank by rank."""
    bf16, fp8 = (step_of(cpu_environment, 0, 3, name) for name in ("fp32", "reduce-scatter"))
    assert 1000 < bf16["operators"] < 3000
    assert 1000 < fp8["operators"] < 1.1 * bf16["operators"]
