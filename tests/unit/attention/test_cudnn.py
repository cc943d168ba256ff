"""cuDNN's attention: which GPUs prefer it, and which cuDNN is older than the one that torch was built with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fp8_ds.attention.packages import older_cudnn, prefers_cudnn


@pytest.mark.parametrize(("loaded", "is_older"), [((9, 14, 0), True), ((9, 19, 0), False), ((10, 0, 0), False)])
def test_an_older_cudnn_than_torchs_is_noticed(
    monkeypatch: pytest.MonkeyPatch, loaded: tuple[int, ...], is_older: bool
) -> None:
    cudnn = SimpleNamespace(getRuntimeVersion=lambda: loaded, getCompileVersion=lambda: (9, 19, 0))
    monkeypatch.setattr(torch._C, "_cudnn", cudnn, raising=False)
    assert (older_cudnn() is not None) == is_older


@pytest.mark.parametrize(("capability", "prefers"), [((9, 0), True), ((10, 0), True), ((8, 9), False)])
def test_cudnn_is_preferred_by_compute_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], prefers: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert prefers_cudnn(torch.device("cuda", 0)) is prefers
    assert not prefers_cudnn(torch.device("cpu"))
