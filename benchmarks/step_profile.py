"""Where a training step spends its time and memory, from two traces of torch's profiler and a memory snapshot.

end_to_end.py --profile calls `profile_steps`. A trace of the device alone hardly slows the host: it has what kernels
take, and the moments in which nothing runs. A trace of host and device says who launched a kernel, and how often the
host waited.
"""

from __future__ import annotations

import gzip
import itertools
import json
import linecache
import math
import re
import tempfile
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

NUM_STEPS, NUM_TIMED, TOP = 3, 20, 40
"""Steps of a trace, steps timed one by one before them, kernels of the table."""
MIB, GIB = 2**20, 2**30
FP8, BF16, ATTENTION, CAST = "GEMM fp8", "GEMM bf16", "attention", "cast/transpose"
ELEMENTWISE, OPTIMIZER, MEMCPY, NCCL, OTHER = "norm/elementwise", "optimizer", "memcpy", "nccl", "other"
GROUPS = (FP8, BF16, ATTENTION, CAST, ELEMENTWISE, OPTIMIZER, MEMCPY, NCCL, OTHER)
PHASES, MARK = ("forward", "backward", "update"), "phase "
"""Ranges that a step marks with `record_function(MARK + name)`, and the methods of a trainer that they hold."""

_OUR_CASTS = r"amax|quantize|parts?|quantize_and_transpose|amax_cols|rowwise|transpose|block_amax"
_NOT_FUSED = r"^(?!triton_(?:poi|red|per|for)_).*"
"""Inductor names its pointwise and reduction kernels after everything around them."""
_RULES = (
    (NCCL, r"^nccl"),
    (MEMCPY, r"^Mem(cpy|set)"),
    (ATTENTION, rf"{_NOT_FUSED}(sdpa|flash|fmha|mem_eff|attention)"),
    # Fused Adam of torch, DeepSpeed and ours; foreach norms and clipping; a compiled Adam has lerp in its name.
    (OPTIMIZER, r"multi_tensor_apply|adam|_lerp"),
    # cuBLAS names types by letter: "tst" is bf16 throughout, "qqtst" has two FP8 operands before output and sum.
    (FP8, rf"nvjet_(sm\d+_)?[a-z]{{5}}_|{_NOT_FUSED}((gemm|cutlass|cublas|xmma).*(e4m3|e5m2)|deep_?gemm|_scaled_mm)"),
    (BF16, rf"{_NOT_FUSED}(nvjet_|gemm|gemv|cutlass|cublas|splitKreduce|xmma|triton_(tem|mm))"),
    (CAST, rf"^_?({_OUR_CASTS})_kernel|float8|e4m3|e5m2"),
    # Inductor's fused casts to FP8 clamp first, and its amaxes carry abs_max or amax.
    (CAST, r"^triton_.*(abs_max|amax|(to_copy|_to_fp8).*clamp|clamp.*to_copy|transpose)"),
    (CAST, r"(direct_copy|bfloat16_copy|float16_copy|unrolled.*copy)_kernel"),
    (ELEMENTWISE, r"^triton_|^void at::|at::native|^_?(rmsnorm|swiglu|sum_partials)|elementwise|reduce_kernel|softmax"),
)
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_NODE = "autograd::engine::evaluate_function: "
_ENGINES_NODES = re.compile(r"AccumulateGrad$|BackwardHookFunction|P(re|ost)BackwardFunction")
"""In which ZeRO's hooks run: on gradients, and before and after a module's or a leaf's backward."""
_LIBRARY = ("/torch/", "/contextlib.py", "/step_profile.py")
"""Frames that say nothing: those of torch itself. Inductor's generated code lies elsewhere."""

Interval = tuple[float, float]
"""[start, stop), in microseconds."""
Events = Sequence[Mapping[str, Any]]
""""traceEvents" of Chrome's format."""


def kernel_group(name: str) -> str:
    """The group of a kernel, copy or fill by its name; the first rule that fits."""
    return next((found for found, pattern in _RULES if re.search(pattern, name, re.IGNORECASE)), OTHER)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals, in order, that cover the same points."""
    result: list[Interval] = []
    for start, stop in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return result


def union_ms(intervals: Iterable[Interval]) -> float:
    """Milliseconds covered by at least one of the intervals."""
    return sum(stop - start for start, stop in merged(intervals)) / 1e3


def _on_device(events: Events) -> list[Mapping[str, Any]]:
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return sorted((e for e in events if e.get("ph") == "X" and e.get("cat") in kinds), key=lambda e: e["ts"])


def _calls(events: Events) -> dict[Any, Mapping[str, Any]]:
    """The host's call of CUDA by its correlation, which the kernels that it launches have, too."""
    runtime = ("cuda_runtime", "cuda_driver")
    return {e.get("args", {}).get("correlation"): e for e in events if e.get("ph") == "X" and e.get("cat") in runtime}


def _call_of(event: Mapping[str, Any], calls: Mapping[Any, Mapping[str, Any]]) -> Mapping[str, Any] | None:
    correlation = event.get("args", {}).get("correlation")
    return None if correlation is None else calls.get(correlation)


def summarize_device(events: Events, num_steps: int) -> dict[str, Any]:
    """Kernels and idle time per step of a trace of `num_steps` steps.

    Returns:
        `busy_ms`: with at least one kernel, copy or fill; `exposed_nccl_ms`: with none but NCCL's; `idle_ms`: from the
        first to the last, with none; `late_ms`: of that, the time before the host's call that launches the next one;
        `groups_ms`: a sum, which streams that overlap make exceed `busy_ms`; `kernels`: the first `TOP` as [name,
        group, ms, count]; `num_kernels`.
    """
    device, calls = _on_device(events), _calls(events)
    spent, count, groups = defaultdict[str, float](float), Counter[str](), dict.fromkeys(GROUPS, 0.0)
    intervals, computing = [], []
    idle, late, end = 0.0, 0.0, math.inf
    for event in device:
        name, start, stop = event["name"], event["ts"], event["ts"] + event["dur"]
        spent[name] += event["dur"] / 1e3
        count[name] += 1
        groups[kernel_group(name)] += event["dur"] / 1e3
        intervals.append((start, stop))
        if kernel_group(name) != NCCL:
            computing.append((start, stop))
        if start > end:
            call = _call_of(event, calls)
            idle += start - end
            late += max(0.0, min(call["ts"], start) - end) if call else 0.0
        end = stop if math.isinf(end) else max(end, stop)
    busy = union_ms(intervals)
    return {
        "busy_ms": round(busy / num_steps, 3),
        "exposed_nccl_ms": round((busy - union_ms(computing)) / num_steps, 3),
        "idle_ms": round(idle / 1e3 / num_steps, 3),
        "late_ms": round(late / 1e3 / num_steps, 3),
        "groups_ms": {name: round(ms / num_steps, 3) for name, ms in groups.items()},
        "num_kernels": round(len(device) / num_steps),
        "kernels": [
            [name, kernel_group(name), round(ms / num_steps, 4), round(count[name] / num_steps, 2)]
            for name, ms in sorted(spent.items(), key=lambda row: -row[1])[:TOP]
        ],
    }


class _Ranges:
    """Disjoint ranges of one thread, or of all."""

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        self.rows = sorted((event["ts"], event["ts"] + event["dur"], event["name"]) for event in events)
        self.starts = [row[0] for row in self.rows]

    def at(self, ts: float) -> str | None:
        """The name of the range that holds `ts`, without MARK."""
        index = bisect_right(self.starts, ts) - 1
        return self.rows[index][2].removeprefix(MARK) if index >= 0 and ts < self.rows[index][1] else None


def summarize_host(events: Events, num_steps: int) -> dict[str, Any]:
    """Device time per step by who launched it, and waits of the host, of a trace with `PHASES` marked.

    A kernel is the engine's if it was launched in the update, in a node in which ZeRO's hooks run (`_ENGINES_NODES`),
    or in the backward outside of every autograd node (ZeRO's epilogue). All others are the model's. NCCL is counted
    apart.

    Returns:
        `owner_ms`: {"model", "engine in backward", "engine in update", "nccl"}; `waits`: {phase: cuda*Synchronize calls
        and copies to the host}; `cpu_ops`: operators, nested ones included.
    """
    events = [event for event in events if event.get("ph") == "X"]
    marks = [MARK + phase for phase in PHASES]
    phases = _Ranges(e for e in events if e.get("cat") == "user_annotation" and e["name"] in marks)
    nodes: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op" and event["name"].startswith(_NODE):
            nodes[event["tid"]].append(event)
    by_thread = {tid: _Ranges(some) for tid, some in nodes.items()}
    waits = Counter(phases.at(event["ts"]) for event in events if event["name"] in _WAITS)
    owners = dict.fromkeys(("model", "engine in backward", "engine in update", "nccl"), 0.0)
    calls = _calls(events)
    for event in _on_device(events):
        call = _call_of(event, calls)
        if call is None:
            continue
        phase, ranges = phases.at(call["ts"]), by_thread.get(call["tid"])
        waits[phase] += event["name"].startswith("Memcpy DtoH")
        node = ranges.at(call["ts"]) if ranges else None
        if kernel_group(event["name"]) == NCCL:
            owner = "nccl"
        elif phase == "update":
            owner = "engine in update"
        elif phase == "backward" and (node is None or _ENGINES_NODES.search(node)):
            owner = "engine in backward"
        else:
            owner = "model"
        owners[owner] += event["dur"] / 1e3
    return {
        "owner_ms": {name: round(ms / num_steps, 3) for name, ms in owners.items()},
        "waits": {phase: round(waits[phase] / num_steps, 2) for phase in PHASES},
        "cpu_ops": round(sum(event.get("cat") == "cpu_op" for event in events) / num_steps),
    }


def where(frames: Iterable[Mapping[str, Any]], depth: int = 2) -> str:
    """The innermost lines outside of torch, the text of generated code's instead of its file's name."""
    lines = []
    for frame in frames:
        name = str(frame["filename"])
        if not name.startswith("??") and not any(part in name for part in _LIBRARY):
            text = linecache.getline(name, int(frame["line"])).strip()
            lines.append(text if "torchinductor" in name else f"{name.rsplit('/', 1)[-1]}:{frame['line']} {text}")
    return " < ".join(line[:150] for line in lines[:depth]) or "torch"


def live_at_peak(events: Events, min_mib: float = 4.0) -> list[tuple[float, int, str]]:
    """Allocations of a step that are there together at its peak: (MiB, number, `where`), the largest first.

    Args:
        events: trace of torch.cuda.memory's history, with "action" (alloc, free_completed), "addr", "size" in bytes,
            and "frames", innermost first.
        min_mib: lines of less are added up as one.
    """
    changes = {"alloc": 1, "free_completed": -1}
    sizes = list(itertools.accumulate(changes.get(event["action"], 0) * event["size"] for event in events))
    live: dict[int, Mapping[str, Any]] = {}
    for event in events[: sizes.index(max(sizes)) + 1] if sizes else ():
        if event["action"] == "alloc":
            live[event["addr"]] = event
        elif event["action"] == "free_completed":
            live.pop(event["addr"], None)
    found: dict[str, list[int]] = defaultdict(list)
    for event in live.values():
        found[where(event.get("frames", ()))].append(event["size"])
    rows = sorted(((round(sum(sizes) / MIB, 2), len(sizes), line) for line, sizes in found.items()), reverse=True)
    rest = [row for row in rows if row[0] < min_mib]
    others = [(round(sum(row[0] for row in rest), 2), sum(row[1] for row in rest), "all others")] if rest else []
    return [row for row in rows if row not in rest] + others


def profile_memory(trainer: Any, step: Callable[[], object]) -> dict[str, Any]:
    """One step on the current GPU: {"before_gib", "peak_gib": {phase: GiB}, "blocks": `live_at_peak`}."""
    peaks: dict[str, float] = {}

    def watched(phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            torch.cuda.reset_peak_memory_stats()
            result = call(*args)
            peaks[phase] = round(torch.cuda.max_memory_allocated() / GIB, 3)
            return result

        return run

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=1_000_000)
    try:
        for phase in PHASES:
            setattr(trainer, phase, watched(phase, getattr(trainer, phase)))
        step()
        torch.cuda.synchronize()
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
        for phase in PHASES:
            vars(trainer).pop(phase, None)
    return {"before_gib": round(before / GIB, 3), "peak_gib": peaks, "blocks": live_at_peak(events)}


def time_steps(step: Callable[[int], Any], num_steps: int, on_cuda: bool) -> dict[str, float]:
    """One rank's medians in ms: `device_ms`, from one step's end to the next one's on the device's stream (on a CPU the
    host's); `host_ms`, in the call; `cpu_ms`, of that the calling thread's own work, waits left out."""
    marks, host, cpu = [], [], []

    def mark() -> None:
        marks.append(torch.cuda.Event(enable_timing=True) if on_cuda else time.perf_counter())
        if on_cuda:
            marks[-1].record()

    mark()
    for number in range(num_steps):
        began, worked = time.perf_counter(), time.thread_time()
        step(number)
        host.append(1000 * (time.perf_counter() - began))
        cpu.append(1000 * (time.thread_time() - worked))
        mark()
    if on_cuda:
        torch.cuda.synchronize()
    device = [a.elapsed_time(b) if on_cuda else 1000 * (b - a) for a, b in itertools.pairwise(marks)]
    columns = {"device_ms": device, "host_ms": host, "cpu_ms": cpu}
    return {name: round(median(values), 3) for name, values in columns.items()}


def profile_steps(trainer: Any, gauge: Any, step: Callable[[int], Any], traces: Path | None = None) -> dict[str, Any]:
    """`ranks` of `time_steps`, `device`, `host`, and on a GPU `memory`; all ranks take the steps.

    Args:
        trainer: of end_to_end_trainers.py.
        gauge: of end_to_end_worker.py.
        step: of a number; called with 0 to `NUM_TIMED` - 1.
        traces: a folder for the traces, in Chrome's format.
    """
    ranks: list[Any] = [time_steps(step, NUM_TIMED, gauge.on_cuda)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        mine, ranks = ranks[0], [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
    cuda = [ProfilerActivity.CUDA] if gauge.on_cuda else []
    events = {}
    for name, activities in (("device", cuda or [ProfilerActivity.CPU]), ("both", [ProfilerActivity.CPU, *cuda])):
        gauge.synchronize()
        with profile(activities=activities) as profiler:
            for number in range(NUM_STEPS):
                step(number)
            gauge.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(path))
            text = path.read_bytes()
        events[name] = json.loads(text)["traceEvents"]
        if traces is not None:
            (traces / f"{name}.json.gz").write_bytes(gzip.compress(text))
    device, host = summarize_device(events["device"], NUM_STEPS), summarize_host(events["both"], NUM_STEPS)
    memory = {"memory": profile_memory(trainer, lambda: step(0))} if gauge.on_cuda else {}
    return {"ranks": ranks, "device": device, "host": host, **memory}


def table(arm: str, result: Mapping[str, Any]) -> str:
    """Markdown of one profiled arm.

    Args:
        result: of `profile_steps`, and `step_ms`, timed without a profiler.
    """
    device, host, memory, step_ms = result["device"], result["host"], result.get("memory"), result["step_ms"]
    owners, idle = host["owner_ms"], step_ms - device["busy_ms"]
    in_backward, in_update = owners["engine in backward"], owners["engine in update"]
    lines = [
        f"## {arm}",
        "",
        f"{step_ms:.1f} ms per step, device busy {device['busy_ms']:.1f}, idle {idle:.1f} (in the trace "
        f"{device['idle_ms']:.1f}, of which the host was late for {device['late_ms']:.1f}); {device['num_kernels']} "
        f"kernels, {host['cpu_ops']} operators (nested ones included).",
        f"Outside the model's kernels: **{idle + in_backward + in_update:.1f} ms** = idle {idle:.1f} + engine in "
        f"backward {in_backward:.1f} + in update {in_update:.1f}; nccl {owners['nccl']:.1f}, of which "
        f"{device['exposed_nccl_ms']:.1f} with nothing else running.",
        "The host waits, times a step: " + ", ".join(f"{phase} {n:g}" for phase, n in host["waits"].items()) + ".",
        "",
        "| rank | device, ms a step | host in the call | of it at work |",
        "|---|---|---|---|",
        *(f"| {k} | " + " | ".join(f"{ms:.1f}" for ms in row.values()) + " |" for k, row in enumerate(result["ranks"])),
        *("", "| group | ms per step |", "|---|---|"),
        *(f"| {name} | {ms:.2f} |" for name, ms in device["groups_ms"].items()),
        *(f"| idle | {idle:.2f} |", "", "| kernel | group | ms per step | count |", "|---|---|---|---|"),
    ]  # fmt: skip
    for name, group, ms, count in device["kernels"]:
        lines.append(f"| `{name[:100].replace('|', '/')}` | {group} | {ms:.3f} | {count:g} |")
    if memory is not None:
        peaks = ", ".join(f"{phase} {gib:.2f}" for phase, gib in memory["peak_gib"].items())
        lines += ["", f"GiB allocated: {memory['before_gib']:.2f} when the step begins; at the peak of {peaks}.", ""]
        lines += ["| MiB at the step's peak | allocations | by |", "|---|---|---|"]
        lines += [f"| {mib:.1f} | {num} | `{line.replace('|', '/')}` |" for mib, num, line in memory["blocks"]]
    return "\n".join(lines) + "\n"
