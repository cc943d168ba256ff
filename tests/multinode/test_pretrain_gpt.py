"""Megatron's own pretrain_gpt.py by torchrun on two hosts, with --fp8-recipe: it trains as on one host of two ranks.

$MEGATRON_LM_PATH names the clone; without it these tests are skipped, and say so.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from pretrain_arguments import ARGUMENTS, FP8, PP, SHARDED, TP, losses_in

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron-core==0.16.1")

CLONE = os.environ.get("MEGATRON_LM_PATH")
pytestmark = [pytest.mark.multinode, pytest.mark.launcher]

LAYOUTS: dict[str, tuple[str, ...]] = {
    "dp2": (),
    "dp2-fp8-states": (*SHARDED, "--fp8-optimizer-states"),
    "pp2": PP,
    "tp2": (*TP, "--sequence-parallel", "--bf16"),
}
STEPS = 5
ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


@pytest.fixture(scope="module", autouse=True)
def clone() -> None:
    if not CLONE:
        reason = "MEGATRON_LM_PATH names no clone of Megatron-LM"
        warnings.warn(f"{__name__} skipped: {reason}", stacklevel=1)
        pytest.skip(reason)


def trained(train: Callable[..., Any], name: str, fp8: tuple[str, ...] = FP8, **options: Any) -> tuple[Any, list[int]]:
    """(losses of each iteration, bytes over the cable by rank)."""
    words = [*ARGUMENTS, "--on-cpu", *LAYOUTS[name], *fp8]
    if not fp8 and "--sequence-parallel" in words:  # which Megatron's norms do not take without a spec of ours
        words += ["--fp8-attention-backend", "reference"]
    case = {"name": name, "kind": "pretrain_gpt", "words": words}
    found = train([case], "torchrun", env=ENVIRONMENT, timeout=500, **options)[name]
    text = found[-1]["text"]
    losses = losses_in(text)
    assert len(losses) == STEPS, text[-3000:]
    assert len(re.findall(r"coverage: 8\d\.\d+ % of GEMM FLOPs", text)) == (STEPS if fp8 else 0)
    return losses, [rank["cable"] for rank in found]


@pytest.mark.parametrize("name", ["dp2", "dp2-fp8-states", "pp2"])
def test_megatrons_script_computes_on_two_hosts_what_it_does_on_one(train: Callable[..., Any], name: str) -> None:
    (two, cable), (one, inside) = trained(train, name), trained(train, name, num_hosts=1, ranks_per_host=2)
    assert two == one
    assert min(cable) > 1e5 > 1e3 > max(inside)  # a host alone says hello to the network


def test_a_tensor_parallel_group_of_megatrons_script_reaches_across_hosts_and_sends_less(
    train: Callable[..., Any],
) -> None:
    (two, cable), (one, _) = trained(train, "tp2"), trained(train, "tp2", num_hosts=1, ranks_per_host=2)
    stock, stock_cable = trained(train, "tp2", fp8=())
    assert two == pytest.approx(one, abs=0.02)
    assert two != stock and two == pytest.approx(stock, abs=0.02)
    print(f"pretrain_gpt.py, tensor and sequence parallel: {cable[0]} bytes in FP8, {stock_cable[0]} in bf16")
    assert cable[0] < 0.9 * stock_cable[0]
