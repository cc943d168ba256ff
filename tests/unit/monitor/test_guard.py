"""The guard names what passes a limit, once, and sends it to bf16."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fp8_ds.monitor.guard import Guard, Problems, problems
from fp8_ds.monitor.sinks import STEP_SKIPPED, Report
from fp8_ds.monitor.statistics import LayerStatistics, TensorStatistics


def tensor(saturation: float = 0.0, underflow: float = 0.0) -> TensorStatistics:
    return TensorStatistics(amax=1.0, scale=256.0, saturation=saturation, underflow=underflow, num=1000)


def guard(
    action: str, said: list[str], sent: list[Sequence[str]], others: Problems | None = None, frozen: str = ""
) -> Guard:
    changeable = [name for name in ("a", "b", "c") if name != frozen and action == "bf16"]

    def send(names: Sequence[str], to: str) -> None:
        sent.append(names if to == "bf16" else [f"{name} back" for name in names])

    return Guard(lambda mine: {**mine, **(others or {})}, send, changeable, said.append)


def report(layers: LayerStatistics, step: int = 1) -> Report:
    return Report(step, step, layers)


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (tensor(saturation=0.011), "saturation of input 0.011 above 0.01"),
        (tensor(underflow=0.21), "underflow of input 0.21 above 0.2"),
        (tensor(0.5, 1.0), "saturation of input 0.5 above 0.01, underflow of input 1 above 0.2"),
        (tensor(0.01, 0.2), ""),
    ],
)
def test_a_share_above_its_limit_is_a_problem(one: TensorStatistics, text: str) -> None:
    found = problems({"a": {"input": one}, "b": {"weight": tensor()}})
    assert found == ({"a": text} if text else {})


def test_small_elements_of_a_gradient_are_no_problem_and_those_beyond_its_scale_are() -> None:
    found = problems({"a": {"grad_output": tensor(underflow=0.93)}, "b": {"grad_output": tensor(0.02, 0.93)}})
    assert found == {"b": "saturation of grad_output 0.02 above 0.01"}


def test_a_layer_is_named_when_it_begins_to_misbehave_and_again_after_it_had_stopped_or_was_loaded() -> None:
    said: list[str] = []
    watch = guard("report", said, [], others={"z": ("text", True)})
    bad, good = {"a": {"input": tensor(underflow=0.5)}}, {"a": {"input": tensor()}}
    for step, layers in enumerate([good, bad, bad, good, bad], 1):
        watch(report(layers, step))
    assert [f"step {step}" in line for step, line in zip((1, 2, 5), said, strict=True)] == [True] * 3
    assert "z: text" in said[0] and "a: underflow of input 0.5 above 0.2" in said[1]
    state = watch.state_dict()
    assert state["named"] == ["a", "z"]  # the same on all ranks
    watch.load_state_dict(state)
    watch(report(bad, 6))
    assert len(said) == 3
    watch.load_state_dict(None)
    watch(report(bad, 7))
    assert len(said) == 4


def test_layers_go_to_bf16_those_of_other_stages_too_and_frozen_ones_are_only_named() -> None:
    said: list[str] = []
    sent: list[Sequence[str]] = []
    watch = guard("bf16", said, sent, others={"z": ("saturation of weight 1 above 0.01", True)}, frozen="b")
    watch(report({name: {"grad_output": tensor(saturation=0.5)} for name in ("b", "a")}))
    assert sent == [["a", "z"]]
    sent.clear()
    guard("bf16", said, sent, others={"z": ("text", True)})(report({}))  # a rank without problems takes part
    assert sent == [["z"]]
    assert "b: saturation of grad_output" in said[0]


def test_a_step_that_was_skipped_is_not_judged_and_changes_nothing_of_what_was_named() -> None:
    said: list[str] = []
    sent: list[Sequence[str]] = []
    watch = guard("bf16", said, sent)
    bad = {name: {"grad_output": tensor(saturation=1.0)} for name in ("a", "b")}
    watch(report({"c": {"input": tensor(underflow=0.5)}}, 1))
    for step, skipped in ((2, 1.0), (3, 0.0)):
        watch(Report(step, step, bad, {STEP_SKIPPED: skipped}))
        assert sent == [["c"], ["a", "b"]][: step - 1]
    assert watch.state_dict()["named"] == ["a", "b"]


def test_a_layer_comes_back_after_a_stay_that_doubles_also_over_a_resume_and_not_once_a_user_has_set_it() -> None:
    sent: list[Sequence[str]] = []
    bad, nothing = {"a": {"input": tensor(saturation=0.5)}}, {}
    watch = guard("bf16", [], sent)
    steps = {100: bad, 200: nothing, 1000: nothing, 1100: nothing, 1200: bad, 3100: nothing, 3200: nothing, 3300: bad}
    for step, layers in steps.items():
        state = watch.state_dict()
        watch = guard("bf16", [], sent)
        watch.load_state_dict(state)
        watch(report(layers, step))  # type: ignore[arg-type]
        assert (
            sent
            == [["a"], ["a back"], ["a"], ["a back"], ["a"]][: sum(at <= step for at in (100, 1100, 1200, 3200, 3300))]
        )
    watch.forget(["a", "of another stage"])
    watch(report({}, 10_000))
    assert len(sent) == 5
    watch(report(bad, 10_100))  # type: ignore[arg-type]
    assert watch.state_dict()["stays"] == {"a": [1000, 11_100]}
