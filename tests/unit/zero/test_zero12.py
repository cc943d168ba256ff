"""FP8 of a ZeRO-1/2 optimizer as a whole, on stub hosts whose ranks are threads."""

from __future__ import annotations

import torch
from support.threads import on_threads
from support.zero_hosts import RAGGED, values_of, zero_optimizer
from support.zero_training import (
    assert_follow,
    assert_same,
    other_values,
    refresh,
)


def exported_and_loaded() -> None:
    zero, values = zero_optimizer(2, RAGGED), values_of(RAGGED)
    with zero.fp8.export(wanted=True):
        assert_same({n: zero.read(n).cpu() for n in RAGGED}, {n: v.bfloat16() for n, v in values.items()})
    with zero.fp8.export(wanted=False):
        assert zero.params["up"].detach().is_meta
    zero.params["gain"].data = torch.zeros(RAGGED["gain"], dtype=torch.bfloat16)  # as user code may
    with zero.fp8.load():
        for name in RAGGED:
            zero.write(name, lambda _, name=name: other_values(name))
    loaded = {name: other_values(name).float() for name in RAGGED}
    assert_same(zero.masters(), loaded)
    refresh(zero, 2)
    assert_follow(zero, "tensorwise", loaded)


def test_exports_give_bf16_of_the_masters_and_a_load_sets_them_bit_for_bit() -> None:
    on_threads(2, exported_and_loaded)
