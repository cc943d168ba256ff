"""DS_ACCELERATOR=cpu on a machine with GPUs means the CPU: nothing of ours asks torch alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fp8_ds.host import num_gpus, uses_cuda
from fp8_ds.tools.doctor import diagnosis

ASKS_TORCH = {
    "fp8_ds/host.py": "is who asks",
    "fp8_ds/tools/doctor/diagnosis.py": "lists the machine's GPUs",
    "fp8_ds/ops/grouped/__init__.py": "is given a device of tensors, and reads its capability where there is one",
    "fp8_ds/tp/group.py": "reads options of a group that has another backend than gloo",
}
"""Why these may."""


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two, of which torch alone knows, and which cannot be used."""

    def refused(*_: Any) -> None:
        raise RuntimeError("a GPU is used")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("set_device", "Event", "get_rng_state", "set_rng_state", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, refused)


@pytest.mark.parametrize(("named", "number"), [(None, 2), ("cuda", 2), ("cpu", 0)])
def test_deepspeeds_choice_is_known_without_deepspeed(
    monkeypatch: pytest.MonkeyPatch, gpus: None, named: str | None, number: int
) -> None:
    monkeypatch.delenv("DS_ACCELERATOR") if named is None else monkeypatch.setenv("DS_ACCELERATOR", named)
    assert num_gpus() == number and uses_cuda() == bool(number)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert num_gpus() == 0


def test_a_gpu_that_is_left_unused_is_told(monkeypatch: pytest.MonkeyPatch, gpus: None) -> None:
    class Properties:
        name, major, minor, total_memory = "H100", 9, 0, 80 * 2**30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: Properties)
    assert {check.status for check in diagnosis._gpu()} == {"warning"}
    assert all("unset it" in check.remedy for check in diagnosis._gpu())
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    assert {check.status for check in diagnosis._gpu()} == {"ok"}


def test_nothing_else_asks_torch_whether_there_is_a_gpu() -> None:
    root = Path(__file__).resolve().parents[2]
    files = (file for folder in ("fp8_ds", "examples", "benchmarks") for file in (root / folder).rglob("*.py"))
    asking = {str(file.relative_to(root)) for file in files if "cuda.is_available" in file.read_text()}
    assert asking == ASKS_TORCH.keys()
