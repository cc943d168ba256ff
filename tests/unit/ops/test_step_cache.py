"""A value that a graph was captured with is kept."""

from __future__ import annotations

import pytest
import torch

from fp8_ds.ops.step_cache import StepCache


def test_what_a_graph_was_captured_with_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = StepCache[str, object]()
    with monkeypatch.context() as patch:
        for name in ("is_initialized", "is_current_stream_capturing"):
            patch.setattr(torch.cuda, name, lambda: True)
        captured = cache.get("bucket", object)
    for _ in range(8):
        cache.next_step()
    assert cache.get("bucket", object) is captured
