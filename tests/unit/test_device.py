"""DS_ACCELERATOR=cpu on a machine with GPUs means the CPU: nothing of ours asks torch alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8_ds import diagnosis, judgement
from fp8_ds.device import num_gpus, uses_cuda
from fp8_ds.monitor.gauges import mark, milliseconds
from fp8_ds.parity import worker

ASKS_TORCH = {
    "fp8_ds/device.py": "is who asks",
    "fp8_ds/diagnosis.py": "lists the machine's GPUs",
    "fp8_ds/ops/grouped/__init__.py": "is given a device of tensors, and reads its capability where there is one",
    "fp8_ds/testing/waits.py": "counts waits for CUDA",
    "fp8_ds/tp/batch.py": "reads options of a group that has another backend than gloo",
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
    assert judgement._this_device().type == ("cuda" if number else "cpu")
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


def test_time_is_that_of_the_host(gpus: None) -> None:
    assert milliseconds(mark(), mark()) >= 0.0


def test_a_run_of_parity_is_on_the_cpu(monkeypatch: pytest.MonkeyPatch, gpus: None, tmp_path: Path) -> None:
    """From its command line to its end, but for the training."""
    import deepspeed

    seen: dict[str, Any] = {}

    class Trainer(worker.EngineTrainer):
        def __init__(self, spec: dict[str, Any], device: torch.device) -> None:
            self.spec, self.device, self.rank, self.ranks = spec, device, 0, worker.device_ranks(device)
            self.engine = torch.nn.Module()
            self.engine.module = torch.nn.Linear(2, 3)
            self.engine.save_checkpoint = self.engine.load_checkpoint = lambda *_, **__: None
            self.world, self.order, self.windows = 1, torch.zeros(4), type("Windows", (), {"num_windows": 4})
            seen["device"] = device

        tokens_per_step = 8

    def train(trainer: Trainer, *_: Any) -> float:
        trainer.save(tmp_path)
        torch.manual_seed(5)
        after = torch.get_rng_state()
        trainer.load(tmp_path)
        seen["is_restored"] = not torch.equal(torch.get_rng_state(), after)
        return 1.0

    monkeypatch.setattr(worker, "EngineTrainer", Trainer)
    monkeypatch.setattr(worker, "train", train)
    monkeypatch.setattr(deepspeed, "init_distributed", lambda backend: seen.update(backend=backend))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    spec = {"seconds": None, "config": {}, "compile": False, "steps": 4, "identity": {}, "seed": 0}
    (tmp_path / "spec.json").write_text(
        json.dumps({**spec, "log": str(tmp_path / "log.csv"), "state": str(tmp_path / "state")})
    )
    monkeypatch.setattr(sys, "argv", ["worker", str(tmp_path / "spec.json"), "--local_rank=1"])
    worker.main()
    assert seen == {"device": torch.device("cpu"), "is_restored": True, "backend": "gloo"}
    assert json.loads((tmp_path / "log.json").read_text())["peak_gib"] is None


def test_nothing_else_asks_torch_whether_there_is_a_gpu() -> None:
    root = Path(__file__).resolve().parents[2]
    files = (file for folder in ("fp8_ds", "examples", "benchmarks") for file in (root / folder).rglob("*.py"))
    asking = {str(file.relative_to(root)) for file in files if "cuda.is_available" in file.read_text()}
    assert asking == ASKS_TORCH.keys()
