"""At hundreds of ranks a step has as many collectives as at tens: one rank is real, the others are imagined."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.scripts import run_script

SCRIPT = Path(__file__).with_name("one_of_many.py")
RANK = 0
"""In ZeRO-3 the others take from it which modules there are."""
FP8_STATES = {"optimizer": {"states": "fp8", "master": "e4m11"}}
CASES: dict[tuple[int, str], dict[str, Any]] = {
    (1, "release"): {"optimizer": {"states": "fp8", "release": True}},
    (2, "fp8"): FP8_STATES,
    (3, "fp32"): {},
    (3, "fp8"): FP8_STATES,
    (3, "reduce-scatter"): {"zero": {"reduce_scatter": "fp8"}},
}
"""By ZeRO stage and name, which share a process: its start takes longer than they do."""
KNOWN: dict[tuple[int, str], Any] = {}


@pytest.fixture
def steps(cpu_environment: dict[str, str], tmp_path: Path) -> dict[tuple[int, str], Any]:
    """What a step of one rank of 512 calls, by name, its operators, and the bytes of its gathers."""
    if KNOWN:
        return KNOWN
    common = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    arguments = ["512", str(RANK)]
    for (stage, _), fp8 in CASES.items():
        arguments.append(
            json.dumps(
                {**common, "zero_optimization": {"stage": stage}, "fp8": {"enabled": True, "preset": None, **fp8}}
            )
        )
    output = run_script(SCRIPT, arguments, cpu_environment, tmp_path / "log")
    lines = [line for line in output.splitlines() if line.startswith("STEP")]
    KNOWN.update((case, json.loads(line.removeprefix("STEP"))) for case, line in zip(CASES, lines, strict=True))
    return KNOWN


def collectives(stage: int, name: str) -> dict[str, int]:
    """Of a step of a model in one bucket: gradients and their norm, amaxes, and gathers of weights of two kinds."""
    if stage == 3:
        return {"all_gather": 4, "all_reduce": 2, "all_to_all" if name == "reduce-scatter" else "reduce_scatter": 1}
    return {"all_gather": 2, "all_to_all": 2, "all_reduce": 4}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_of_512_ranks_has_the_collectives_of_one_of_few(steps: Any, case: tuple[int, str]) -> None:
    assert steps[case]["calls"] == collectives(*case)
    assert steps[case]["gathered"] > 0


def test_gradients_of_512_ranks_are_cut_in_few_launches(steps: Any) -> None:
    """ZeRO-3 of stock has 19,307 here, and FP8 ones had 50,722, packed and added rank by rank."""
    bf16, fp8 = (steps[3, name]["operators"] for name in ("fp32", "reduce-scatter"))
    assert 1000 < bf16 < 3000
    assert 1000 < fp8 < 1.1 * bf16
