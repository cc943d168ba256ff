"""Megatron on a CPU: what torch.cuda says there, and where the compiled dataset helper of a fresh clone is from."""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron-core==0.16.1")

import torch.distributed as dist
from megatron.core import datasets

from megatron_patches import cpu

NAME = f"helpers_cpp{importlib.machinery.EXTENSION_SUFFIXES[0]}"


def test_a_torch_for_cuda_has_no_device_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's import makes torch count devices, of which Megatron is told that there is one."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    monkeypatch.setattr("torch.cuda._is_compiled", lambda: True)
    with cpu.on_cpu():
        assert cpu.torch.cuda.device_count() == 1 and not cpu.torch.cuda.is_available()


@pytest.mark.parametrize(("rank", "is_installed", "num_compiled"), [(0, True, 0), (0, False, 1), (1, False, 0)])
def test_on_cpu_megatron_has_it_before_it_builds_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, is_installed: bool, num_compiled: int
) -> None:
    """A clone before an installed megatron-core, whose helper is copied if it has one."""
    clone, installed = (tmp_path / name / "megatron/core/datasets" for name in ("clone", "site"))
    for folder in (clone, installed):
        folder.mkdir(parents=True)
    if is_installed:
        (installed / NAME).write_text("installed")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "clone"), "", str(tmp_path / "site")])
    calls: list[str] = []
    utils: Any = ModuleType("megatron.core.datasets.utils")
    utils.__file__, utils.compile_helpers = str(clone / "utils.py"), lambda: calls.append("compile")
    monkeypatch.setattr(datasets, "utils", utils, raising=False)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "barrier", lambda: calls.append("barrier"))
    cpu._replacements(training=True)["megatron.training.initialize._compile_dependencies"](object())()
    assert calls == [*["compile"] * num_compiled, "barrier"]
    assert (clone / NAME).exists() is (rank == 0 and is_installed)
