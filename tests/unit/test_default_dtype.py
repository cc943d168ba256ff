"""torch's default dtype is the user's: nothing of ours is made in it (engines: tests/distributed/test_modes.py)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKE_FLOATS = {f"torch.{name}" for name in ("empty", "full", "linspace", "ones", "rand", "randn", "zeros")}


@pytest.mark.parametrize("package", ["fp8_ds", "megatron_patches"])
def test_every_tensor_of_ours_names_its_dtype(package: str) -> None:
    calls = [
        (f"{path}:{node.lineno}", {keyword.arg for keyword in node.keywords})
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in MAKE_FLOATS
    ]
    assert calls and [place for place, keywords in calls if not keywords & {"dtype", None}] == []
