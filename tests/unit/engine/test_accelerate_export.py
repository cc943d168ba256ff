from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fp8_ds.engine import accelerate_export, activation
from fp8_ds.engine.accelerate_export import patch_accelerate
from fp8_ds.errors import SeamError
from fp8_ds.zero.stage12 import Fp8ZeroStage12


class Accelerator:
    def get_state_dict(self, model: Any, unwrap: bool = True) -> list[str]:
        return ["read", *model.log]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for accelerate.accelerator, and a patch record of its own."""
    stub: Any = ModuleType("accelerate.accelerator")
    stub.Accelerator = type("Accelerator", (), dict(vars(Accelerator)))
    monkeypatch.setitem(sys.modules, "accelerate.accelerator", stub)
    monkeypatch.setattr(accelerate_export, "RECORD", activation._PatchRecord())
    return stub


class Exporting(Fp8ZeroStage12):
    """An optimizer that notes when it exports."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def fp8_export(self, wanted: bool, on_device: bool = False) -> Any:
        from contextlib import contextmanager

        @contextmanager
        def manager() -> Any:
            self.log.append("export")
            yield
            self.log.append("done")

        return manager()


def test_only_what_reads_an_fp8_optimizer_is_an_export(host: Any) -> None:
    stock = host.Accelerator.get_state_dict
    patch_accelerate()
    patch_accelerate()  # once is enough
    assert host.Accelerator.get_state_dict.fp8_ds_stock is stock
    log: list[str] = []
    assert host.Accelerator().get_state_dict(SimpleNamespace(optimizer=Exporting(log), log=log)) == ["read", "export"]
    assert log == ["export", "done"]
    for other in (SimpleNamespace(log=[]), SimpleNamespace(optimizer=object(), log=[])):
        assert host.Accelerator().get_state_dict(other, unwrap=False) == ["read"]
    accelerate_export.RECORD.undo()
    assert host.Accelerator.get_state_dict is stock


def test_another_accelerate_is_refused(host: Any) -> None:
    host.Accelerator.get_state_dict = lambda self, engine: None
    with pytest.raises(SeamError, match=r"expected accelerate\.Accelerator"):
        patch_accelerate()


def test_the_installed_accelerate_is_the_one_that_is_known() -> None:
    accelerator = pytest.importorskip("accelerate.accelerator")
    found = getattr(accelerator.Accelerator.get_state_dict, "fp8_ds_stock", accelerator.Accelerator.get_state_dict)
    assert found.__code__.co_varnames[:2] == ("self", "model")
