"""Models of Conv1D under ZeRO: they train as those of linears with the same numbers, and in bf16 as stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import training

pytestmark = pytest.mark.distributed
pytest.importorskip("transformers")

DELAYED = {"linear": {"recipe": "delayed"}}
E4M11 = {"optimizer": {"states": "fp8", "master": "e4m11"}}


def trained(
    stage: int,
    fp8: dict[str, Any] | None,
    conv1d: bool,
    folder: str = "",
    steps: int = 4,
    is_compiled: bool = False,
    num_blocks: int = 3,
) -> dict[str, Any]:
    def make(seed: int) -> Any:
        engine = training.build(training.ds_config(stage, fp8), {"conv1d": conv1d, "num_blocks": num_blocks}, seed)
        if is_compiled:
            torch._dynamo.reset()
            engine.compile(backend="aot_eager")
        return engine

    return training.run_and_destroy(make, folder, steps)


@pytest.mark.parametrize(("stage", "fp8"), [(2, DELAYED), (3, E4M11)])
def test_a_model_of_conv1ds_trains_as_one_of_linears(ranks: Any, stage: int, fp8: dict[str, Any]) -> None:
    conv = ranks(2).run(trained, stage, fp8, True)[0]
    linear = ranks(2).run(trained, stage, fp8, False)[0]
    assert conv["losses"] == pytest.approx(linear["losses"], rel=1e-3) and conv["losses"][-1] < conv["losses"][0]
    assert len(conv["first"]) == 6
    is_exact = "optimizer" not in fp8  # FP8 masters are rounded by random numbers that follow the elements' order
    for name, (codes, scale_inv) in linear["first"].items():
        found, found_scale = conv["first"][name]
        same = (found == codes.t()).float().mean()
        assert same == 1 if is_exact else same > 0.95, same
        assert torch.equal(found_scale, scale_inv)
        last, expected = conv["last"][name][0], linear["last"][name][0].t()
        agree, stayed = (float((last == other).float().mean()) for other in (expected, found))
        assert stayed < 0.3 and agree > (0.99 if is_exact else 0.75)  # sums of gradients may be in another order


@pytest.mark.parametrize(
    ("num_ranks", "stage", "fp8"), [(1, 2, DELAYED), pytest.param(2, 3, E4M11, marks=pytest.mark.slow)]
)
def test_compiled_it_trains_as_in_eager(ranks: Any, num_ranks: int, stage: int, fp8: dict[str, Any]) -> None:
    run = {"steps": 2, "num_blocks": 1}
    eager, compiled = (
        ranks(num_ranks).run(trained, stage, fp8, True, is_compiled=flag, **run)[0]["losses"] for flag in (False, True)
    )
    assert compiled == pytest.approx(eager, rel=1e-3)


def test_a_run_goes_on_bit_for_bit(ranks: Any, tmp_path: Path) -> None:
    whole = ranks(2).run(trained, 2, E4M11, True)[0]
    cut = ranks(2).run(trained, 2, E4M11, True, str(tmp_path))[0]
    assert cut["losses"] == whole["losses"]
    assert all(torch.equal(cut["last"][name][0], codes) for name, (codes, _) in whole["last"].items())


def test_in_bf16_it_is_stock_bit_for_bit(ranks: Any) -> None:
    ours = ranks(2).run(trained, 2, {"schedule": {"bf16_until_step": 1000}}, True)[0]
    assert ours["losses"] == ranks(2).run(trained, 2, None, True)[0]["losses"]
