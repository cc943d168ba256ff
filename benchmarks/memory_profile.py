"""What lies in a GPU's memory where a step needs most of it, by the lines of code that asked for it."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

MIB = 2**20
_LIBRARY = ("/torch/", "/contextlib.py", "/memory_profile.py")
"""Frames that say nothing: those of torch itself. Inductor's generated code lies elsewhere."""


def where(frames: Iterable[Mapping[str, Any]], depth: int = 2) -> str:
    """The innermost lines outside of torch, the text of generated code's instead of its file's name."""
    lines = []
    for frame in frames:
        name = str(frame["filename"])
        if name.startswith("??") or any(part in name for part in _LIBRARY):
            continue
        text = linecache.getline(name, int(frame["line"])).strip()
        lines.append(text if "torchinductor" in name else f"{name.rsplit('/', 1)[-1]}:{frame['line']} {text}")
        if len(lines) == depth:
            break
    return " < ".join(line[:150] for line in lines) or "torch"


def live_at_peak(events: Sequence[Mapping[str, Any]], min_mib: float = 4.0) -> dict[str, Any]:
    """Of a step's allocations (a trace of torch.cuda.memory's history): those that are there together at the peak.

    Args:
        events: with "action" (alloc, free_completed), "addr", "size" in bytes, and "frames", innermost first.
        min_mib: lines of less are added up as one.

    Returns:
        "step_mib": allocated by the step at its peak, less what it had freed of before; "blocks": (MiB, number, where).
    """
    live, size, peak, at_peak = {}, 0, 0, 0
    for number, event in enumerate(events):
        if event["action"] == "alloc":
            size += event["size"]
            if size > peak:
                peak, at_peak = size, number
        elif event["action"] == "free_completed":
            size -= event["size"]
    for event in events[: at_peak + 1]:
        if event["action"] == "alloc":
            live[event["addr"]] = event
        elif event["action"] == "free_completed":
            live.pop(event["addr"], None)
    found: dict[str, list[int]] = {}
    for event in live.values():
        found.setdefault(where(event.get("frames", ())), []).append(event["size"])
    rows = sorted(((sum(sizes) / MIB, len(sizes), line) for line, sizes in found.items()), reverse=True)
    large = [(round(mib, 2), num, line) for mib, num, line in rows if mib >= min_mib]
    rest = [(mib, num) for mib, num, _ in rows if mib < min_mib]
    if rest:
        large.append((round(sum(mib for mib, _ in rest), 2), sum(num for _, num in rest), "all others"))
    return {"step_mib": round(peak / MIB, 2), "blocks": large}


def profile_memory(step: Callable[[], object]) -> dict[str, Any]:
    """`live_at_peak` of one step on the current GPU, and "before_mib": what was there when it began."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=1_000_000)
    try:
        step()
        torch.cuda.synchronize()
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return {"before_mib": round(before / MIB, 2), **live_at_peak(events)}


def table(memory: Mapping[str, Any] | None) -> str:
    """Markdown; nothing of a run that has no such profile."""
    if memory is None:
        return ""
    peak = (memory["before_mib"] + memory["step_mib"]) / 1024
    lines = [
        f"At the peak {peak:.2f} GiB are allocated, {memory['before_mib'] / 1024:.2f} of them when the step begins.",
        "",
        "| MiB at the peak | allocations | by |",
        "|---|---|---|",
        *(f"| {mib:.1f} | {number} | `{line.replace('|', '/')}` |" for mib, number, line in memory["blocks"]),
    ]
    return "\n".join(lines) + "\n"
