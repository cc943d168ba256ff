"""The adapter of ZeRO-1 and 2: its methods are the rows of seams.py, and one attribute is all that it adds."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from support.threads import on_threads
from support.zero_hosts import RAGGED, zero_optimizer
from support.zero_seams import declared, methods_of, mixins_of, rows_of
from support.zero_training import fp8_states, gradients

from fp8_ds.zero.stage import Host12
from fp8_ds.zero.stage12 import Fp8ZeroStage12
from fp8_ds.zero.zero12 import patched_all_gather


def test_every_method_of_the_adapter_has_a_row_and_every_row_a_method() -> None:
    rows, own = rows_of(DeepSpeedZeroOptimizer), methods_of(Fp8ZeroStage12) - {"fp8_init"}
    of_others = set().union(*map(methods_of, mixins_of(DeepSpeedZeroOptimizer)))
    assert len(own) > 10 and own <= rows
    assert of_others <= rows
    assert rows - own - of_others == set()


def test_the_adapter_replaces_only_what_deepspeeds_class_has() -> None:
    own = methods_of(Fp8ZeroStage12) - {"fp8_init"}
    assert [name for name in own if not callable(getattr(DeepSpeedZeroOptimizer, name, None))] == []


def test_the_protocol_names_only_what_deepspeeds_class_has() -> None:
    source = inspect.getsource(stage_1_and_2)
    known = {
        name
        for name in declared(Host12)
        if hasattr(DeepSpeedZeroOptimizer, name) or re.search(rf"self\.{name}\b", source)
    }
    assert len(known) > 20 and declared(Host12) - known == set()


@pytest.mark.parametrize("block", [{}, fp8_states("e4m11")], ids=["fp32", "fp8"])
def test_the_optimizer_gets_one_attribute_besides_deepspeeds_own(
    monkeypatch: pytest.MonkeyPatch, block: dict[str, Any]
) -> None:
    """At the start, in a step, and in what users call; what stage.py names is DeepSpeed's."""
    before: list[set[str]] = []
    stock = Fp8ZeroStage12.fp8_init

    def watched(zero: Any, context: Any) -> None:
        before.append(set(vars(zero)))
        stock(zero, context)

    monkeypatch.setattr(Fp8ZeroStage12, "fp8_init", watched)
    patched = patched_all_gather(stage_1_and_2.all_gather_dp_groups)
    monkeypatch.setattr(stage_1_and_2, "all_gather_dp_groups", patched)

    def use() -> set[str]:
        zero = zero_optimizer(2, RAGGED, **block)
        zero.give(gradients(RAGGED, 0))
        zero.step()
        zero.fp8.set_bf16({"up"})
        with zero.fp8.export(wanted=True):
            pass
        with zero.fp8.load():
            pass
        zero.offload_states()
        zero.reload_states()
        zero._restore_from_bit16_weights()
        return set(vars(zero))

    [after] = on_threads(1, use)
    assert after - before[0] - declared(Host12) == {"fp8"}
