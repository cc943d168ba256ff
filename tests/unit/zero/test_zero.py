"""What all stages do alike: offloads of weights, and dense masters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

from fp8_ds.config import Fp8Config
from fp8_ds.zero.split_states import Masters
from fp8_ds.zero.zero import Zero

LP, HP = OffloadStateTypeEnum.lp_params, OffloadStateTypeEnum.hp_params


class SomeMasters(Masters):
    """Masters that say what is done to them."""

    def __init__(self, log: list[str], is_dense: bool) -> None:
        self.log = log
        self.found = is_dense

    @property
    def is_dense(self) -> bool:
        return self.found

    def point(self) -> None:
        self.log.append("point")

    @contextmanager
    def dense(self) -> Iterator[dict[str, Any]]:
        self.log.append("dense")
        try:
            yield {}
        finally:
            self.log.append("absorb")


class Stage(Zero):
    """A stage that says what it does, in the order in which it does it."""

    def __init__(self, is_dense: bool = False) -> None:
        host: Any = SimpleNamespace(offloaded_states=set(), clip_grad=1.0, model_parallel_group=None)
        context: Any = SimpleNamespace(config=Fp8Config.from_block({"enabled": True, "preset": None}))
        super().__init__(host, context)
        self.log: list[str] = []
        self.masters = SomeMasters(self.log, is_dense)
        self.by_deepspeed: list[Any] = []

    def refresh(self, is_step: bool) -> None:
        self.log.append("refresh")

    def end_dense(self) -> None:
        self.log.append("end")

    def move(self, device: torch.device) -> None:
        self.log.append(f"to {device.type}")

    def deepspeeds(self, **keys: Any) -> None:
        self.log.append("deepspeed")
        self.by_deepspeed.append(keys)


def test_an_offload_moves_weights_once_and_leaves_the_rest_to_deepspeed() -> None:
    zero = Stage()
    zero.offload(zero.deepspeeds, None, None, pin_memory=True)
    rest = {"include": set(OffloadStateTypeEnum) - {LP}, "device": OffloadDeviceEnum.cpu, "pin_memory": True}
    assert zero.by_deepspeed == [rest] and zero.log == ["deepspeed", "to cpu", "point"]
    zero.log.clear()
    zero.offload(zero.deepspeeds, [LP, HP], None)  # weights have left already
    assert zero.by_deepspeed[1:] == [{"include": {HP}, "device": OffloadDeviceEnum.cpu}]
    assert zero.log == ["deepspeed", "point"]
    zero.offload(zero.deepspeeds, [LP], None)
    assert len(zero.by_deepspeed) == 2


@pytest.mark.parametrize("include", [[LP], [HP], None])
def test_memory_of_what_has_left_is_given_back_at_the_end_whoever_moved_it(
    include: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage()
    accelerator = SimpleNamespace(empty_cache=lambda: stage.log.append("empty"))
    monkeypatch.setattr("fp8_ds.zero.zero.get_accelerator", lambda: accelerator)
    stage.offload(stage.deepspeeds, include, None)
    assert stage.log[-2:] == ["point", "empty"]


def test_weights_come_back_once_and_before_what_deepspeed_moves() -> None:
    zero = Stage()
    zero.offload(zero.deepspeeds, [LP], None)
    for expected in (["to cpu", "deepspeed", "point"], ["deepspeed", "point"]):
        zero.log.clear()
        zero.reload(zero.deepspeeds, non_blocking=False)
        assert zero.log == expected


def test_weights_follow_masters_that_were_dense_also_after_an_error() -> None:
    zero = Stage()
    with pytest.raises(KeyError), zero.dense():
        raise KeyError
    assert zero.log == ["dense", "absorb", "refresh", "end"]
    already = Stage(is_dense=True)
    with already.dense():
        pass
    assert already.log == []
