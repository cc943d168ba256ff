"""torch's default dtype is the user's: nothing of ours is made in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKE_FLOATS = {"empty", "full", "linspace", "ones", "rand", "randn", "zeros"}


def without_dtype(source: str) -> Iterator[tuple[int, str]]:
    """(line, call) of each `torch.zeros` and its like that takes torch's default dtype."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        is_factory = isinstance(owner, ast.Name) and owner.id == "torch" and node.func.attr in MAKE_FLOATS
        if is_factory and not any(keyword.arg in ("dtype", None) for keyword in node.keywords):
            yield node.lineno, ast.unparse(node)


@pytest.mark.parametrize("package", ["fp8_ds", "megatron_patches"])
def test_every_tensor_of_ours_names_its_dtype(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {call}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, call in without_dtype(path.read_text())
    ]
    assert found == []


def test_a_call_without_a_dtype_is_found() -> None:
    source = "a = torch.zeros(3, device=d)\nb = torch.zeros(3, dtype=x)\nc = torch.arange(3)\nd = f(torch.ones(()))"
    assert list(without_dtype(source)) == [(1, "torch.zeros(3, device=d)"), (4, "torch.ones(())")]
