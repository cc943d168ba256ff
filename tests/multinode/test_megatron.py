"""Megatron by torchrun on two hosts, its linears in FP8: what it computes is what one host computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron-core==0.16.1")

pytestmark = [pytest.mark.multinode, pytest.mark.launcher]

Results = dict[str, list[dict[str, Any]]]
Train = Callable[..., Results]

STEPS = 6
LINEAR = "Fp8ColumnParallelLinear"
TENSOR_PARALLEL = {"tp": 2, "sp": True, "bf16": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "dp2-distributed-optimizer": {"distributed_optimizer": True, "bf16": True},
    "tp2": TENSOR_PARALLEL,
    "pp2": {"pp": 2},
    "dp2-stock": {"recipe": None},
    "tp2-stock": {**TENSOR_PARALLEL, "recipe": None},
}
CASES = [{"name": name, "kind": "megatron", "layout": layout, "steps": STEPS} for name, layout in LAYOUTS.items()]
GRID = [{"name": "tp2-dp2", "kind": "megatron", "layout": TENSOR_PARALLEL, "steps": STEPS}]


def both(train: Train, cases: list[dict[str, Any]], ranks_per_host: int) -> tuple[Results, Results]:
    """On two hosts, and on one of as many ranks."""
    two = train(cases, "torchrun", ranks_per_host=ranks_per_host)
    return two, train(cases, "torchrun", num_hosts=1, ranks_per_host=2 * ranks_per_host)


def assert_learns(of_ranks: list[dict[str, Any]]) -> None:
    losses = of_ranks[-1]["losses"]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.1, losses


@pytest.mark.parametrize("name", ["dp2", "dp2-distributed-optimizer", "pp2"])
def test_replicas_and_stages_on_two_hosts_compute_what_one_host_does_bit_for_bit(train: Train, name: str) -> None:
    two, one = both(train, CASES, 1)
    for key in ("losses", "norms"):
        assert [rank[key] for rank in two[name]] == [rank[key] for rank in one[name]]
    assert_learns(two[name])
    assert min(rank["cable"] for rank in two[name]) > 1e3 > max(rank["cable"] for rank in one[name])  # ARP, IPv6
    assert LINEAR in two[name][0]["text"]


def test_a_tensor_parallel_group_across_hosts_computes_what_one_host_does(train: Train) -> None:
    two, one = both(train, CASES, 1)
    assert two["tp2"][0]["losses"] == two["tp2"][1]["losses"]
    assert two["tp2"][0]["losses"] == pytest.approx(one["tp2"][0]["losses"], abs=0.02)
    assert_learns(two["tp2"])


def test_fp8_changes_losses_by_little_and_sends_less_between_hosts(train: Train) -> None:
    two, _ = both(train, CASES, 1)
    for name in ("dp2", "tp2"):
        fp8, stock = (two[key][0]["losses"] for key in (name, f"{name}-stock"))
        assert fp8 != stock and LINEAR not in two[f"{name}-stock"][0]["text"]
        assert fp8 == pytest.approx(stock, abs=0.05)
    fp8, stock = (two[name][0]["cable"] for name in ("tp2", "tp2-stock"))
    print(f"tensor parallel with sequence parallel: {fp8} bytes in FP8, {stock} in bf16")
    assert fp8 < 0.9 * stock


def test_tensor_parallel_groups_within_hosts_and_replicas_across_them_compute_what_one_host_does(train: Train) -> None:
    two, one = both(train, GRID, 2)
    losses = [rank["losses"] for rank in two["tp2-dp2"]]
    assert all(other == losses[0] for other in losses)
    assert losses[0] == pytest.approx(one["tp2-dp2"][0]["losses"], abs=0.02)
    assert_learns(two["tp2-dp2"])
