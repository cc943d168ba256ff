"""What session.py can run: one measurement."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One measurement.

    Args:
        name: of it.
        command: of a shell in this checkout; {python}, {out} and {own}, a folder in it for this step alone, are filled
            in; {seconds} is what it may take, up to 1.3 times `seconds`.
        seconds: that it takes on an H200, about.
        why: what is shown by it.
        gpus: that it needs.
        after: the step that must have ended before, where that one is in the list.
    """

    name: str
    command: str
    seconds: float
    why: str
    gpus: int = 1
    after: str = ""


def benchmark(script: str, arguments: str) -> str:
    return f"{{python}} benchmarks/{script}.py {arguments} --out {{out}}"
