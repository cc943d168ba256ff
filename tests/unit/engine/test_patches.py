from __future__ import annotations

import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from torch import nn

from fp8_ds.engine import patches
from fp8_ds.engine.patches import patch_accelerate
from fp8_ds.errors import SeamError, UnsupportedError
from fp8_ds.tp import ColumnParallelLinear
from fp8_ds.zero.stage12 import Fp8ZeroStage12


class Accelerator:
    deepspeed_config: ClassVar[dict[str, Any]] = {"zero_optimization": {"stage": 2}}

    def get_state_dict(self, model: Any, unwrap: bool = True) -> list[str]:
        return ["read", *model.log]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for accelerate.accelerator, and a patch record of its own."""
    stub: Any = ModuleType("accelerate.accelerator")
    stub.Accelerator = type("Accelerator", (), dict(vars(Accelerator)))
    monkeypatch.setitem(sys.modules, "accelerate.accelerator", stub)
    monkeypatch.setattr(patches, "RECORD", patches.PatchRecord())
    return stub


class Exporting(Fp8ZeroStage12):
    """An optimizer that notes when it exports."""

    def __init__(self, log: list[str]) -> None:
        @contextmanager
        def export(wanted: bool) -> Any:
            log.append("export")
            yield
            log.append("done")

        self.fp8: Any = SimpleNamespace(export=export)


def engine(log: list[str], autotp_size: int = 0) -> Any:
    found = SimpleNamespace(optimizer=Exporting(log), log=log, module=nn.Linear(2, 2), autotp_size=lambda: autotp_size)
    found._fp8_note_save = lambda: None
    return found


def test_only_what_reads_an_fp8_optimizer_is_an_export(host: Any) -> None:
    stock = host.Accelerator.get_state_dict
    patch_accelerate()
    patch_accelerate()  # once is enough
    assert host.Accelerator.get_state_dict.fp8_ds_original is stock
    log: list[str] = []
    assert host.Accelerator().get_state_dict(engine(log)) == ["read", "export"]
    assert log == ["export", "done"]
    for other in (SimpleNamespace(log=[]), SimpleNamespace(optimizer=object(), log=[])):
        assert host.Accelerator().get_state_dict(other, unwrap=False) == ["read"]
    patches.RECORD.undo()
    assert host.Accelerator.get_state_dict is stock


def test_a_rank_s_part_is_not_exported_as_if_it_were_whole(host: Any) -> None:
    """Accelerate knows of AutoTP's cut by its configuration, and gathers then; not of one by tp_model_init or ours."""
    patch_accelerate()
    log: list[str] = []
    cut = engine(log)
    ColumnParallelLinear.from_full(cut.module, cast(Any, SimpleNamespace(size=2, rank=0)))
    for one, how in ((engine(log, 2), r"autotp_size 2"), (cut, r"fp8_ds\.tp\.parallelize has sharded")):
        with pytest.raises(UnsupportedError, match=f"Accelerator.get_state_dict: .*{how}"):
            host.Accelerator().get_state_dict(one)
    assert not log
    host.Accelerator.deepspeed_config = {"tensor_parallel": {"autotp_size": 2}}
    assert host.Accelerator().get_state_dict(engine(log, 2)) == ["read", "export"]


def test_another_accelerate_is_refused(host: Any) -> None:
    host.Accelerator.get_state_dict = lambda self, engine: None
    with pytest.raises(SeamError, match=r"accelerate\.Accelerator"):
        patch_accelerate()


def test_the_installed_accelerate_is_the_one_that_is_known() -> None:
    accelerator = pytest.importorskip("accelerate.accelerator")
    found = getattr(accelerator.Accelerator.get_state_dict, "fp8_ds_original", accelerator.Accelerator.get_state_dict)
    assert found.__code__.co_varnames[:2] == ("self", "model")
