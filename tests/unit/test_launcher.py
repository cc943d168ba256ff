"""Which GPUs DeepSpeed's launcher is told to use, and which port."""

import random
import socket

import pytest
import torch

from fp8_ds import host
from fp8_ds.errors import ConfigError
from fp8_ds.host import free_port, which_gpus


@pytest.fixture(autouse=True)
def _on_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("DS_ACCELERATOR")


@pytest.mark.parametrize(
    ("named", "number", "expected"),
    [
        ("", 2, ["--num_gpus", "2"]),
        ("GPU-8932f937", 1, ["--num_gpus", "1"]),
        ("1", 1, ["--include", "localhost:1"]),
        ("4,5,6,7", 2, ["--include", "localhost:4,5"]),
    ],
)
def test_named_gpus_are_used(monkeypatch, named, number, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert which_gpus(number) == expected


def test_more_than_are_named_is_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ConfigError, match=r"expected 2 GPUs, got 3\. Name more"):
        which_gpus(2)


@pytest.mark.parametrize("has_gpus", [False, True])
def test_on_the_cpu_the_launcher_counts_for_itself(monkeypatch, has_gpus):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpus)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert which_gpus(2) == ["--num_gpus", "2"]


def test_the_launcher_itself_takes_those(monkeypatch):
    """What it makes of `--include`: a pool of these slots, where a number gives it the first ones."""
    from deepspeed.launcher.runner import parse_inclusion_exclusion

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    _, include = which_gpus(2)
    assert parse_inclusion_exclusion({"localhost": 4}, include, "") == {"localhost": [2, 3]}


def test_a_port_is_none_that_the_system_gives_a_connection():
    """Between its choice and the ranks' start, another program's connection once took the port."""
    ports = {free_port() for _ in range(50)}
    assert len(ports) > 40 and ports <= set(range(10_000, 32_768))
    with socket.socket() as listener:  # it is for ranks to listen at
        listener.bind(("127.0.0.1", ports.pop()))


def test_processes_with_one_seed_draw_different_ports():
    drawn = []
    for _ in range(2):
        random.seed(0)
        drawn.append([free_port() for _ in range(3)])
    assert drawn[0] != drawn[1]


def test_a_port_in_use_is_passed_over(monkeypatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        taken = listener.getsockname()[1]
        spare = free_port()
        monkeypatch.setattr(host, "_PORTS", [taken] * 99 + [spare])
        assert free_port() == spare
        monkeypatch.setattr(host, "_PORTS", [taken] * 100)
        with pytest.raises(OSError, match=rf"expected a free port among {taken} to {taken}, got none in 100 tries"):
            free_port()
