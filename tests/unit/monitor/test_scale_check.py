"""ScaleCheck: which amaxes and scales are named, after how many steps, and how often."""

import copy

import pytest
import torch

from fp8_ds.monitor.scale_check import ScaleCheck
from fp8_ds.numerics.scale import AmaxHistory

NAN, INF = float("nan"), float("inf")
LOW, HIGH, FITS = 0.03, 8000.0, 448.0
"""Amaxes that a scale of 1 makes underflow, saturate, fill E4M3."""


def checked(num_slots=1, fp8_max=448.0):
    said = []
    names = [f"layer{i} input" for i in range(num_slots)]
    vector = torch.zeros(num_slots)
    return ScaleCheck(names, vector, torch.full((num_slots,), fp8_max), said.append), said


def feed(check, *amaxes, scale=1.0):
    """A step of each; one slot."""
    for amax in amaxes:
        check.after_step(torch.tensor([amax]), torch.tensor([scale]))


def test_the_third_step_in_a_row_is_named_when_the_fourth_has_ended():
    for amax, what in ((LOW, "underflows"), (HIGH, "saturates")):
        check, said = checked()
        feed(check, *[amax, amax, FITS] * 5, amax, amax, amax)
        assert not said  # a step that fits ends the run
        feed(check, FITS)
        assert len(said) == 1 and f"layer0 input {what}" in said[0] and f"{amax:.2g}" in said[0]
    for amaxes in ((LOW, HIGH, LOW, FITS), *((LOW, one, LOW, one, one, LOW, one) for one in (0.0, NAN, INF))):
        check, said = checked()  # steps without an amax neither count nor end the run
        feed(check, *amaxes)
        assert len(said) == 1


@pytest.mark.parametrize(
    ("scaled", "fp8_max", "is_named"),
    [
        (1 / 16, 448.0, False),
        (0.999 / 16, 448.0, True),
        (16 * 448.0, 448.0, False),
        (16.01 * 448.0, 448.0, True),
        (16.01 * 448.0, 57344.0, False),
        (16.01 * 57344.0, 57344.0, True),
    ],
)
def test_limits_are_of_the_product_and_of_the_slots_own_format(scaled, fp8_max, is_named):
    check, said = checked(fp8_max=fp8_max)
    feed(check, *[scaled / 1024] * 4, scale=1024.0)
    assert len(said) == is_named


def test_a_slot_is_named_once_and_those_of_one_step_together():
    check, said = checked(7)
    amaxes = torch.full((7,), FITS)
    amaxes[:6] = LOW
    for _ in range(9):
        check.after_step(amaxes, torch.ones(7))
    assert len(said) == 1 and ": 6 (" in said[0] and "and 2 more" in said[0]
    assert [f"layer{i} input" in said[0] for i in range(7)] == [True] * 4 + [False] * 3
    amaxes[6] = HIGH
    for _ in range(4):
        check.after_step(amaxes, torch.ones(7))
    assert len(said) == 2 and ": 1 (" in said[1] and "layer6 input saturates" in said[1]
    check.restart()
    for _ in range(4):
        check.after_step(amaxes, torch.ones(7))
    assert len(said) == 2


def make(fp8_max=448.0):
    said = []
    history = AmaxHistory(1, [fp8_max], names=["up grad_output"])
    history.check = ScaleCheck(history.names, history.amax_local, history.fp8_max, said.append)
    return history, said


def update(history, *amaxes):
    for amax in amaxes:
        history.update(torch.tensor([amax]))


def test_an_amax_is_judged_by_the_scale_of_its_step_and_not_by_the_next():
    history, said = make()
    update(history, 1.0)
    for _ in range(4):
        history.scale.fill_(1e-4)  # put in behind the update, which sets the right one each time
        update(history, 1.0)
    assert len(said) == 1 and "up grad_output underflows: amax x scale is 0.0001" in said[0]


def test_scales_that_follow_are_never_named():
    """Amaxes that grow or fall by factors, begin at zero, come back after a pause or after an outlier."""
    growing, falling = [2.0**-20 * 8.0**i for i in range(20)], [2.0**20 / 1.7**i for i in range(40)]
    late = [0.0, 0.0, 1e-9, 1e-7, 1e-6, 3e-6]
    paused, outlier = [1.0, *[0.0] * 40, 1e-2, 1e-2, 1e-2, 1e-2], [1.0, 1e3, *[1.0] * 20]
    for fp8_max in (448.0, 57344.0):
        for amaxes in (growing, falling, late, paused, outlier):
            history, said = make(fp8_max)
            update(history, *amaxes, amaxes[-1])
            assert not said


def test_before_the_first_update_there_is_no_scale_to_judge():
    """But a 1 that nothing is cast by: with it and the two steps after it there would be three."""
    history, said = make()
    for _ in range(2):
        update(history, 1e-3)
        for _ in range(2):
            history.scale.fill_(1.0)
            update(history, 1e-3)
        update(history, 1e-3, 1e-3)
        assert not said
        history.forget()


@pytest.mark.parametrize("how", ["forget", "load"])
def test_a_run_begins_anew_with_another_history(how):
    history, said = make()
    assert copy.deepcopy(history).check is None  # copies of a model are not checked
    update(history, 1.0, 1e9, 1.0, 1.0)  # saturates once, underflows twice: named when one more has ended
    if how == "load":
        history.load_state_dict(history.state_dict())
        update(history, 1.0, 1.0, 1.0)
        assert not said
        update(history, 1.0)
        assert len(said) == 1  # its scale is as wrong as it was
    else:
        history.forget()
        update(history, 1.0, 1.0, 1.0, 1.0)
        assert not said
