"""What ranks start with is compared, and each difference is named alike on all of them; ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from support.threads import on_threads
from torch import nn

from fp8_ds.config import Fp8Config
from fp8_ds.engine import rank_agreement
from fp8_ds.engine.rank_agreement import Start, start_alike, start_of_rank, take_side
from fp8_ds.engine.ranks import tell_all
from fp8_ds.errors import Fp8DsError, UnsupportedError

DS_CONFIG = {
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "fp8": {"enabled": True},
}


def start(fp8: dict[str, Any] | None = None, width: int = 32, frozen: bool = False, **keys: Any) -> Start:
    config = {**DS_CONFIG, **keys, "fp8": {"enabled": True, **(fp8 or {})}}
    net = nn.Sequential(nn.Linear(16, width), nn.Linear(width, 16))
    net[0].weight.requires_grad_(not frozen)
    return start_of_rank(Fp8Config.from_block(config["fp8"]), config, net, None, trains=True)


def with_entry(key: str, value: str) -> Start:
    usual = start()
    assert key in usual.shared
    return usual._replace(shared={**usual.shared, key: value})


SEAM = "code of deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.step"
DIFFERENCES: dict[str, tuple[Callable[[], Start], str]] = {
    "block": (lambda: start({"linear": {"recipe": "rowwise"}}), 'fp8.linear.recipe "delayed" on rank 0, "rowwise"'),
    "configuration": (lambda: start(optimizer={"params": {"lr": 1e-3}}), "optimizer.params.lr 0.003 on rank 0, 0.001"),
    "load_universal": (
        lambda: start(checkpoint={"load_universal": True}),
        "checkpoint.load_universal missing on rank 0, true on rank 2",
    ),
    "shape": (lambda: start(width=48), "0.weight [32, 16] float32 of a Linear on rank 0, [48, 16]"),
    "frozen": (lambda: start(frozen=True), "0 fp8 on rank 0, bf16 (frozen) on rank 2"),
    "version": (lambda: with_entry("version of fp8_ds", "0.0.9"), "0.0.9 on rank 2"),
    "seams": (lambda: with_entry(SEAM, "edited"), SEAM),
}


def error_of(starts: list[Start | Fp8DsError]) -> tuple[str, str]:
    """Class and text of what this rank raises; empty for nothing.

    Args:
        starts: by rank, made by one thread: Python 3.11 does not parse DeepSpeed's sources in several at once.
    """
    try:
        start_alike(starts[dist.get_rank()], {})
    except Fp8DsError as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("change", DIFFERENCES)
def test_a_difference_is_named_alike_on_all_ranks(change: str) -> None:
    other, named = DIFFERENCES[change]
    found = on_threads(3, error_of, [start(), start(), other()])
    assert len(set(found)) == 1
    assert found[0][0] == "ConfigError" and "ranks [2] unlike rank 0 (" in found[0][1] and named in found[0][1]


def test_ranks_that_agree_send_little(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(rank_agreement, "tell_all", lambda mine: sent.append(len(repr(mine))) or tell_all(mine))
    assert on_threads(2, error_of, [usual := start()] * 2) == [("", "")] * 2
    assert 0 < max(sent) < 128 < len(repr(usual))


def test_what_most_ranks_have_is_the_measure() -> None:
    found = on_threads(3, error_of, [start(width=48), start(), start()])
    assert len(set(found)) == 1 and "ranks [0] unlike rank 1 (" in found[0][1]


@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_that_is_refused_alone_says_so_to_the_others(odd: int) -> None:
    refusal = UnsupportedError("zero_optimization.stage: 0")
    found = on_threads(2, error_of, [refusal if rank == odd else start() for rank in range(2)])
    assert found[odd] == ("UnsupportedError", str(refusal))
    assert found[1 - odd][0] == "ConfigError" and str(refusal) in found[1 - odd][1] and f"[{odd}]" in found[1 - odd][1]


def test_ranks_may_differ_in_places_logs_and_monitors() -> None:
    def mine(rank: int) -> Start:
        places = {"enabled": False, "output_path": f"/rank{rank}"}
        return start(tensorboard=places, csv_monitor={"enabled": rank == 0}, steps_per_print=1 + rank)

    assert on_threads(2, error_of, [mine(rank) for rank in range(2)]) == [("", "")] * 2


def sides_in_turn(sides: list[bool]) -> list[str]:
    """What each call says, of calls of all ranks one after another; each rank is on its side of `sides`."""
    found = []
    for _ in range(2):
        for rank, is_on in enumerate(sides):
            if dist.get_rank() == rank:
                found.append(str(take_side(is_on, {}) or ""))
            dist.barrier()
    assert take_side(not sides[dist.get_rank()], {"mpu": object()}) is None
    return found


@pytest.mark.parametrize("sides", [[True, False], [False, True], [True, True], [False, False]])
def test_whichever_side_comes_second_is_told_of_the_other(sides: list[bool]) -> None:
    first, second = on_threads(2, sides_in_turn, sides)
    assert first == ["", ""]
    if sides[0] == sides[1]:
        assert second == ["", ""]
    else:
        on, off = sides.index(True), sides.index(False)
        assert all(f"got it on rank {on} and not on rank {off}" in text for text in second)
