"""Which GPUs DeepSpeed's launcher is told to use."""

import pytest
import torch

from fp8_ds.errors import ConfigError
from fp8_ds.launcher import which_gpus


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
