"""The adapter of ZeRO-3: its methods are the rows of seams.py, and one attribute is all that it adds."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from support.threads import on_threads
from support.zero_hosts import RAGGED, zero_optimizer
from support.zero_seams import declared, methods_of, mixins_of, rows_of
from support.zero_training import fp8_states, gradients

from fp8_ds.zero.stage import Host3
from fp8_ds.zero.stage3 import Fp8ZeroStage3


def test_every_method_of_the_adapter_has_a_row_and_every_row_a_method() -> None:
    rows, own = rows_of(DeepSpeedZeroOptimizer_Stage3), methods_of(Fp8ZeroStage3) - {"fp8_init"}
    of_others = set().union(*map(methods_of, mixins_of(DeepSpeedZeroOptimizer_Stage3)))
    assert len(own) > 10 and own <= rows
    assert of_others <= rows
    assert rows - own - of_others == set()


def test_the_adapter_replaces_only_what_deepspeeds_class_has() -> None:
    own = methods_of(Fp8ZeroStage3) - {"fp8_init"}
    assert [name for name in own if not callable(getattr(DeepSpeedZeroOptimizer_Stage3, name, None))] == []


def test_the_protocol_names_only_what_deepspeeds_class_has() -> None:
    source = inspect.getsource(stage3)
    known = {
        name
        for name in declared(Host3)
        if hasattr(DeepSpeedZeroOptimizer_Stage3, name) or re.search(rf"self\.{name}\b", source)
    }
    assert len(known) > 20 and declared(Host3) - known == set()


@pytest.mark.parametrize("block", [{}, fp8_states("e4m11")], ids=["fp32", "fp8"])
def test_the_optimizer_gets_one_attribute_besides_deepspeeds_own(
    monkeypatch: pytest.MonkeyPatch, block: dict[str, Any]
) -> None:
    """At the start, in a step, and in what users call; what stage.py names is DeepSpeed's."""
    before: list[set[str]] = []
    stock = Fp8ZeroStage3.fp8_init

    def watched(zero: Any, context: Any) -> None:
        before.append(set(vars(zero)))
        stock(zero, context)

    monkeypatch.setattr(Fp8ZeroStage3, "fp8_init", watched)

    def use() -> set[str]:
        zero = zero_optimizer(3, RAGGED, **block)
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
    assert after - before[0] - declared(Host3) == {"fp8"}
