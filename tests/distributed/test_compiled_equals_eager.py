"""Compiled trains as eager, on a CPU: a few cells of tests/gpu/test_compiled_equals_eager.py, and what judges them."""

from __future__ import annotations

import copy
import itertools
import shutil
from typing import Any

import compiled_and_eager as cells
import pytest
import torch

pytestmark = pytest.mark.distributed
inductor = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ for the CPU")

Cell = cells.Cell
ON_CPU = [
    Cell("tensorwise", "e4m11", "3 leaf", "mixtral", "compile", "evaluation"),
    Cell("delayed", "e4m19", "1", "qwen2", "reduce-overhead", "accumulation"),
    Cell("rowwise", "fp32", "3", "qwen2", "compile", "checkpointing"),
    Cell("delayed", "fp32", "3 leaf", "mistral", "compile", "resume"),
    Cell("blockwise", "e4m19", "2", "gemma", "compile", "plain"),
    Cell("rowwise_with_gw_hp", "e4m11", "1", "llama", "reduce-overhead", "resume"),
]
"""No GPT-2: torch's LayerNorm (2.13, eager, CPU) adds up its gradients in bf16 and loses up to 0.3 of them."""


@inductor
@pytest.mark.parametrize(
    ("cell", "only_fused"),
    [pytest.param(cells.FIRST, True, id=f"{cells.FIRST}, fused")]
    + [pytest.param(cell, False, id=str(cell), marks=pytest.mark.slow) for cell in ON_CPU],
)
def test_compiled_trains_as_eager(ranks: Any, cell: Cell, only_fused: bool) -> None:
    pytest.importorskip("transformers")
    ((losses, result),) = ranks(1).run(cells.compare, cell, only_fused)
    assert cells.exceeded(result) == [], result
    assert cells.jump(losses) >= cells.JUMP, losses


@inductor
@pytest.mark.skipif(not cells.HAS_OLD_FAULT, reason="torch 2.13 clones the right bytes of a view")
def test_the_old_fault_is_seen(ranks: Any) -> None:
    pytest.importorskip("transformers")
    ((_, result),) = ranks(1).run(cells.compare, cells.FIRST, only_fused=True, with_old_fault=True)
    cells.assert_shows_old_fault(result)


# --- which cells there are ---


def test_every_pair_that_a_valid_cell_holds_is_in_a_cell() -> None:
    every = [cell for cell in map(Cell._make, itertools.product(*cells.AXES)) if cells.is_valid(cell)]
    found = cells.covering_cells()
    assert all(map(cells.is_valid, found)) and len(set(found)) == len(found) <= 36
    assert set().union(*map(cells.pairs, found)) == set().union(*map(cells.pairs, every))


def test_every_value_is_in_the_short_selection_and_so_is_the_cell_of_the_old_fault() -> None:
    short = cells.covering_cells()[: cells.NUM_SHORT]
    assert cells.FIRST in short
    for index, values in enumerate(cells.AXES):
        assert {cell[index] for cell in short} == set(values)


# --- what is past its bound ---


def seen() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    grads = {name: torch.randn(64, 64, generator=generator) for name in ("a", "b")}
    return [
        {"losses": [6.0, 5.0], "grads": copy.deepcopy(grads), "amaxes": torch.tensor([1.0, 2.0, 0.0])} for _ in range(2)
    ]


def changed(kind: str, by: float) -> list[dict[str, Any]]:
    """The second step differs from the first, and in one kind alone."""
    found = seen()
    last = found[1]
    if kind == "loss":
        last["losses"][1] *= 1 + by
    elif kind == "amax":
        last["amaxes"][1] *= 1 + by
    elif kind == "norm":
        last["grads"]["b"] *= 1 + by
    else:
        grad = last["grads"]["b"]
        noise = torch.randn(grad.shape, generator=torch.Generator().manual_seed(1))
        noise -= grad * (noise * grad).sum() / grad.square().sum()
        mixed = (1 - by) * grad / grad.norm() + (1 - (1 - by) ** 2) ** 0.5 * noise / noise.norm()
        last["grads"]["b"] = mixed * grad.norm()
    return found


@pytest.mark.parametrize("kind", cells.CAPS)
def test_a_difference_past_its_cap_is_told_with_its_place_and_a_smaller_one_is_not(kind: str) -> None:
    cap = cells.CAPS[kind]
    (line,) = cells.exceeded({"compiled": cells.differences(seen(), changed(kind, 1.1 * cap))})
    assert line.startswith(f"compiled: {kind} differs by") and "step 1" in line
    assert cells.exceeded({"compiled": cells.differences(seen(), changed(kind, 0.9 * cap))}) == []


@pytest.mark.parametrize("kind", cells.CAPS)
def test_fused_code_may_differ_by_twice_what_unfused_code_does_from_the_floor_up_to_the_cap(kind: str) -> None:
    cap, floor = cells.CAPS[kind], cells.FLOORS[kind]

    def lines(unfused: float, fused: float) -> list[str]:
        both = {"compiled": changed(kind, unfused), "compiled, fused": changed(kind, fused)}
        return cells.exceeded({name: cells.differences(seen(), got) for name, got in both.items()})

    assert lines(0.0, 0.9 * floor) == [] and len(lines(0.0, 1.1 * floor)) == 1
    assert lines(0.3 * cap, 0.55 * cap) == [] and len(lines(0.3 * cap, 0.65 * cap)) == 1
    assert lines(0.9 * cap, 0.95 * cap) == [] and len(lines(0.9 * cap, 1.1 * cap)) == 1


def test_what_is_zero_or_nan_on_one_side_is_past_every_bound() -> None:
    for broken in (0.0, float("nan"), float("inf")):
        got = seen()
        got[0]["grads"]["a"] *= broken
        lines = cells.exceeded({"compiled": cells.differences(seen(), got)})
        assert {line.split()[1] for line in lines} == {"cosine", "norm"}
    for slot, value in ((2, 1e-6), (0, 0.0), (1, float("nan"))):
        got = seen()
        got[0]["amaxes"][slot] = value
        assert len(cells.exceeded({"compiled": cells.differences(seen(), got)})) == 1


# --- the same states ---


@pytest.mark.parametrize(
    ("recipe", "states", "stage"),
    [("delayed", "e4m11", "2"), pytest.param("rowwise", "fp32", "3", marks=pytest.mark.slow)],
)
def test_eager_from_the_states_of_eager_has_its_bits(ranks: Any, recipe: str, states: str, stage: str) -> None:
    pytest.importorskip("transformers")
    cell = cells.FIRST._replace(recipe=recipe, states=states, stage=stage)
    ((first, again),) = ranks(1).run(cells.eager_twice, cell)
    for left, right in zip(first, again, strict=True):
        assert left["losses"] == right["losses"]
        torch.testing.assert_close(right["grads"], left["grads"], rtol=0, atol=0)
        torch.testing.assert_close(right["amaxes"], left["amaxes"], rtol=0, atol=0)


def without_histories(cell: Cell) -> str:
    from fp8_ds.numerics.scale import AmaxHistory

    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError) as caught:
        patch.setattr(AmaxHistory, "load_state_dict", lambda history, state: None)
        cells.eager_twice(cell)
    return str(caught.value)


def test_an_engine_that_has_not_loaded_the_histories_is_seen(ranks: Any) -> None:
    pytest.importorskip("transformers")
    cell = cells.FIRST._replace(feature="resume")  # an engine that has trained along has them without loading
    assert "history.scale" in ranks(1).run(without_histories, cell)[0]
