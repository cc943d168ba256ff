"""Which GPUs are used: none with DS_ACCELERATOR=cpu; those that are named, by the launcher; and which port."""

from __future__ import annotations

import random
import socket
from typing import Any

import pytest
import torch

from fp8_ds import host
from fp8_ds.errors import ConfigError
from fp8_ds.host import free_port, num_gpus, uses_cuda, which_gpus
from fp8_ds.tools.doctor import diagnosis


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


@pytest.mark.parametrize(
    ("named", "number", "accelerator", "expected"),
    [
        ("", 2, "cuda", ["--num_gpus", "2"]),
        ("GPU-8932f937", 1, "cuda", ["--num_gpus", "1"]),
        ("1", 1, "cuda", ["--include", "localhost:1"]),
        ("4,5,6,7", 2, "cuda", ["--include", "localhost:4,5"]),
        ("3", 2, "cpu", ["--num_gpus", "2"]),
    ],
)
def test_named_gpus_are_used(
    monkeypatch: pytest.MonkeyPatch, gpus: None, named: str, number: int, accelerator: str, expected: list[str]
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", accelerator)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert which_gpus(number) == expected


def test_more_gpus_than_are_named_are_refused(monkeypatch: pytest.MonkeyPatch, gpus: None) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ConfigError, match=r"expected 2 GPUs, got 3\."):
        which_gpus(2)


def test_a_port_is_none_that_the_system_gives_a_connection() -> None:
    """Between its choice and the ranks' start, another program's connection once took the port."""
    ports = {free_port() for _ in range(50)}
    assert len(ports) > 40 and ports <= set(range(10_000, 32_768))
    with socket.socket() as listener:  # it is for ranks to listen at
        listener.bind(("127.0.0.1", ports.pop()))


def test_a_port_in_use_is_passed_over_and_a_seed_does_not_choose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    for _ in range(2):
        random.seed(0)
        drawn.append([free_port() for _ in range(3)])
    assert drawn[0] != drawn[1]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        taken, spare = listener.getsockname()[1], free_port()
        monkeypatch.setattr(host, "_PORTS", [taken] * 99 + [spare])
        assert free_port() == spare
