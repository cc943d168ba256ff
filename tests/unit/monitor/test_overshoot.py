"""Amaxes far beyond the delayed scale in use are counted by interval, and name their layers."""

from __future__ import annotations

import re

import pytest
import torch

from fp8_ds.monitor.overshoot import NUM_UPDATES_TO_SETTLE, Overshoots, tables_of
from fp8_ds.numerics.scale import AmaxHistory

NAMES = ("a input", "a grad_output", "b.c input")


def counted(*steps: list[float], num_updates: int = NUM_UPDATES_TO_SETTLE) -> Overshoots:
    """Overshoots of slots whose scale holds up to 448, or 57344 in the second, after steps with these amaxes."""
    overshoots = Overshoots(NAMES, torch.tensor([448.0, 57344.0, 448.0]))
    for amaxes in steps:
        overshoots.count(torch.tensor(amaxes), torch.ones(3), num_updates)
    return overshoots


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ([[448.0, 57344.0, 0.0]] * 9, {}),
        ([[2000.0, 0.0, 0.0]], {}),  # a jump, which the scale follows
        ([[2000.0, 0.0, 0.0], [1.0, 1.0, 1.0], [1900.0, 1.0, 1.0]], {"a": "input up to 4.5 times .* 2 times beyond 4"}),
        ([[0.0, 1e9, 0.0]] * 9, {}),
        ([[0.0, 1e6, 0.0]] * 9 + [[0.0, 3e5, 8000.0]], {"a": "grad_output up to 17 times", "b.c": "input up to 18"}),
        ([[8000.0, 1e6, 0.0]] * 10, {"a": "input up to 18 times .*, grad_output up to 17 times .*, 10 times beyond 4"}),
        ([[float("inf"), float("nan"), 1.0]] * 3, {}),  # steps that are skipped
    ],
)
def test_layers_are_named_whose_tensors_went_far_beyond_their_scale(
    steps: list[list[float]], found: dict[str, str]
) -> None:
    overshoots = counted(*steps)
    assert overshoots.problems() is None  # nothing was sent
    overshoots.send()
    problems = overshoots.problems()
    assert problems is not None and list(problems) == list(found)
    for layer, pattern in found.items():
        assert re.match(pattern, problems[layer]), problems
    assert overshoots.problems() is None
    overshoots.send()
    assert overshoots.problems() == {}  # another interval


def test_steps_before_the_history_has_settled_do_not_count() -> None:
    overshoots = counted([1e5, 0.0, 0.0], num_updates=NUM_UPDATES_TO_SETTLE - 1)
    overshoots.send()
    assert overshoots.problems() == {}


def test_a_resumed_run_counts_on_and_judges_what_was_sent() -> None:
    saved = counted([2000.0, 0.0, 8000.0])
    saved.send()
    saved.count(torch.tensor([2000.0, 0.0, 0.0]), torch.ones(3), NUM_UPDATES_TO_SETTLE)
    resumed = counted([1e9, 1e9, 1e9])
    resumed.load_state_dict(saved.state_dict())
    assert list(resumed.problems() or {}) == ["b.c"]
    resumed.count(torch.tensor([2000.0, 0.0, 0.0]), torch.ones(3), NUM_UPDATES_TO_SETTLE)
    resumed.send()
    assert list(resumed.problems() or {}) == ["a"]
    for other in (None, {**saved.state_dict(), "names": ["a input", "a grad_output", "c input"]}):
        resumed.count(torch.tensor([2000.0, 0.0, 8000.0]), torch.ones(3), NUM_UPDATES_TO_SETTLE)
        resumed.send()
        resumed.load_state_dict(other)  # of other layers, too: nothing has been counted
        assert resumed.problems() is None
        resumed.send()
        assert resumed.problems() == {}


@pytest.mark.parametrize(
    ("counts", "waiting"),
    [([[0.0] * 3], None), (None, None), ([[0.0] * 3, [float("nan")] * 3], None), ([[0.0] * 3] * 2, [[-1.0] * 3] * 2)],
)
def test_a_state_that_no_save_writes_is_refused(counts: object, waiting: object) -> None:
    with pytest.raises(ValueError, match=r"expected counts of shape \(2, 3\)"):
        tables_of({"names": list(NAMES), "counts": counts, "waiting": waiting})


def test_layers_in_bf16_are_not_counted() -> None:
    overshoots = Overshoots(NAMES, torch.tensor([448.0, 57344.0, 448.0]))
    for layers in (["a"], ["b.c"], ["a", "b.c"]):
        overshoots.leave_out(layers)
        overshoots.count(torch.tensor([2000.0, 0.0, 8000.0]), torch.ones(3), NUM_UPDATES_TO_SETTLE)
    overshoots.send()
    assert list(overshoots.problems() or {}) == ["b.c"]  # once; "a" had one such step, which is too few


def test_a_history_counts_by_the_scale_that_was_in_use() -> None:
    history = AmaxHistory(1, [448.0], names=["a input"])
    history.overshoots = Overshoots(history.names, history.fp8_max)
    for step in range(NUM_UPDATES_TO_SETTLE + 40):
        # The scale holds 2 once it has settled; each 20th step has 40, which the history forgets in 16.
        history.update(torch.tensor([40.0 if step > NUM_UPDATES_TO_SETTLE and step % 20 == 0 else 2.0]))
    history.overshoots.send()
    assert history.overshoots.problems() == {"a": "input up to 20 times what its scale holds, 1 times beyond 4"}
