"""Where a training step spends its time: from the events of torch's chrome trace to a compact table.

Two traces: one of the device alone (`summarize_device`), so that the profiler hardly slows the host, and one of host
and device (`summarize_host`), which says who launched a kernel and how often the host waited for the device.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import step_times

TOP, TOP_GAPS = 40, 12
MIN_PAUSE_US = 5.0
"""Of the compute stream: what is shorter lies between two launches."""
FP8, BF16, ATTENTION, CAST = "GEMM fp8", "GEMM bf16", "attention", "cast/transpose"
ELEMENTWISE, OPTIMIZER, MEMCPY, NCCL, OTHER = "norm/elementwise", "optimizer", "memcpy", "nccl", "other"
CLASSES = (FP8, BF16, ATTENTION, CAST, ELEMENTWISE, OPTIMIZER, MEMCPY, NCCL, OTHER)

_OUR_CASTS = r"amax|quantize|parts?|planes|amax_cols|rowwise|transpose|block_amax"
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
_COMPILED_RULES = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _RULES)


def kernel_class(name: str) -> str:
    """The class of a kernel, copy or fill by its name; the first rule that fits."""
    return next((found for found, pattern in _COMPILED_RULES if pattern.search(name)), OTHER)


Interval = tuple[float, float]
"""[start, stop), in microseconds."""


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


def idle_gaps(
    device: Sequence[Mapping[str, Any]], num_steps: int, launched: Mapping[Any, float] | None = None
) -> list[list[Any]]:
    """Where nothing runs: [what ran before, what runs after, ms a step, times a step, ms of it that the host was late],
    the longest in all first.

    The host is late for as long as its call that launches what runs after has not begun.

    Args:
        device: events of kernels, copies and fills, of all streams.
        launched: when the host's call began, by correlation, in microseconds.
    """
    spent: dict[tuple[str, str], float] = defaultdict(float)
    late: dict[tuple[str, str], float] = defaultdict(float)
    count: Counter[tuple[str, str]] = Counter()
    end, before = math.inf, ""
    for event in sorted(device, key=lambda one: one["ts"]):
        if event["ts"] > end:
            spent[before, event["name"]] += (event["ts"] - end) / 1e3
            count[before, event["name"]] += 1
            call = (launched or {}).get(_correlation(event), end)
            late[before, event["name"]] += max(0.0, min(call, event["ts"]) - end) / 1e3
        if not before or event["ts"] + event["dur"] > end:
            end, before = event["ts"] + event["dur"], event["name"]
    longest = sorted(spent, key=lambda pair: -spent[pair])[:TOP_GAPS]
    return [
        [*pair, *(round(some[pair] / num_steps, digits) for some, digits in ((spent, 4), (count, 2), (late, 4)))]
        for pair in longest
    ]


def _stream(event: Mapping[str, Any]) -> tuple[Any, Any]:
    """(device, stream)."""
    args = event.get("args", {})
    return args.get("device"), args.get("stream")


def _compute_stream(device: Sequence[Mapping[str, Any]]) -> tuple[Any, Any] | None:
    """The one whose kernels other than NCCL's take most time; None without any."""
    spent: dict[tuple[Any, Any], float] = defaultdict(float)
    for event in device:
        if event["cat"] == "kernel" and kernel_class(event["name"]) != NCCL:
            spent[_stream(event)] += event["dur"]
    return max(spent, key=lambda stream: spent[stream], default=None)


def _covered(pause: Interval, others: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Microseconds of the pause by what runs: NCCL's kernels before all others, then what began first.

    Args:
        others: events of other streams, by their start.
    """
    start, stop = pause
    clipped = [(max(start, event["ts"]), min(stop, event["ts"] + event["dur"]), event["name"]) for event in others]
    ranked = sorted(clipped, key=lambda one: kernel_class(one[2]) != NCCL)
    spent: dict[str, float] = defaultdict(float)
    for left, right in pairwise(sorted({edge for one in clipped for edge in one[:2]})):
        name = next((name for begun, ended, name in ranked if begun <= left and ended >= right), None)
        if name is not None:
            spent[name] += right - left
    return spent


def stream_waits(device: Sequence[Mapping[str, Any]], num_steps: int) -> tuple[list[list[Any]], float]:
    """Where the compute stream pauses while other streams of its device work.

    The compute stream is the one whose kernels other than NCCL's take most time. All that runs on it counts as its own,
    NCCL's kernels and copies too. Pauses of less than `MIN_PAUSE_US`, and moments in which nothing runs (`idle_gaps`),
    are left out. A moment is an NCCL kernel's if one runs; else that of the kernel or copy that began first.

    Args:
        device: events of kernels, copies and fills, of all streams.

    Returns:
        ([what runs meanwhile, what the compute stream runs before the pause, what after it, ms a step, times a step],
        the longest in all first; ms a step of all such pauses).
    """
    stream = _compute_stream(device)
    if stream is None:
        return [], 0.0
    ordered = sorted(device, key=lambda event: event["ts"])
    own = [event for event in ordered if _stream(event) == stream]
    others = deque(event for event in ordered if _stream(event) != stream and _stream(event)[0] == stream[0])
    spent: dict[tuple[str, str, str], float] = defaultdict(float)
    count: Counter[tuple[str, str, str]] = Counter()
    running: list[Mapping[str, Any]] = []
    end, before = math.inf, ""
    for event in own:
        if event["ts"] - end >= MIN_PAUSE_US:
            while others and others[0]["ts"] < event["ts"]:
                running.append(others.popleft())
            running = [other for other in running if other["ts"] + other["dur"] > end]
            for name, us in _covered((end, event["ts"]), running).items():
                spent[name, before, event["name"]] += us / 1e3
                count[name, before, event["name"]] += 1
        if not before or event["ts"] + event["dur"] > end:
            end, before = event["ts"] + event["dur"], event["name"]
    longest = sorted(spent, key=lambda row: -spent[row])[:TOP_GAPS]
    rows = [[*row, round(spent[row] / num_steps, 4), round(count[row] / num_steps, 2)] for row in longest]
    return rows, round(sum(spent.values()) / num_steps, 3)


def _is_call(event: Mapping[str, Any]) -> bool:
    """Whether it is one of the host, of CUDA."""
    return event.get("ph") == "X" and event.get("cat") in ("cuda_runtime", "cuda_driver")


def _correlation(event: Mapping[str, Any]) -> Any:
    """What a call of the host and the kernels that it launches have in common."""
    return event.get("args", {}).get("correlation")


def _on_device(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return [event for event in events if event.get("ph") == "X" and event.get("cat") in kinds]


def summarize_device(events: Sequence[Mapping[str, Any]], num_steps: int) -> dict[str, Any]:
    """Per step: kernels by time, classes, and what the device was busy.

    Args:
        events: "traceEvents" of a trace of `num_steps` steps.

    Returns:
        `busy_ms`: with at least one kernel; `span_ms`: first start to last end, divided; `classes_ms` (a sum: streams
        that overlap make it exceed `busy_ms`); `kernels`: the top 40 as [name, class, ms, count]; `num_kernels`;
        `gaps`: see `idle_gaps`; `waits` and `exposed_ms`: see `stream_waits`.
    """
    device = _on_device(events)
    spent: dict[str, float] = defaultdict(float)
    count: Counter[str] = Counter()
    for event in device:
        spent[event["name"]] += event["dur"] / 1e3
        count[event["name"]] += 1
    classes = dict.fromkeys(CLASSES, 0.0)
    for name, ms in spent.items():
        classes[kernel_class(name)] += ms / num_steps
    intervals = [(event["ts"], event["ts"] + event["dur"]) for event in device]
    span = (max(stop for _, stop in intervals) - min(start for start, _ in intervals)) / 1e3 if intervals else 0.0
    top = sorted(spent, key=lambda name: -spent[name])[:TOP]
    waits, exposed_ms = stream_waits(device, num_steps)
    return {
        "busy_ms": round(union_ms(intervals) / num_steps, 3),
        "span_ms": round(span / num_steps, 3),
        "classes_ms": {name: round(ms, 3) for name, ms in classes.items()},
        "num_kernels": round(len(device) / num_steps),
        "kernels": [
            [name, kernel_class(name), round(spent[name] / num_steps, 4), round(count[name] / num_steps, 2)]
            for name in top
        ],
        "gaps": idle_gaps(device, num_steps, {_correlation(event): event["ts"] for event in events if _is_call(event)}),
        "waits": waits,
        "exposed_ms": exposed_ms,
    }


PHASES, MARK = ("forward", "backward", "update"), "phase "
"""Ranges that a step marks with `record_function(MARK + name)`."""
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_READS = ("aten::item", "aten::nonzero")
_NODE = "autograd::engine::evaluate_function: "
_ENGINES_NODES = re.compile(r"AccumulateGrad$|BackwardHookFunction|P(re|ost)BackwardFunction")
"""In which ZeRO's hooks run: on gradients, and before and after a module's or a leaf's backward."""


class _Ranges:
    """Disjoint ranges of one thread, or of all."""

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        self.rows = sorted((event["ts"], event["ts"] + event["dur"], event["name"]) for event in events)
        self.starts = [row[0] for row in self.rows]

    def at(self, ts: float) -> str | None:
        """The name of the range that holds `ts`, without MARK."""
        index = bisect_right(self.starts, ts) - 1
        return self.rows[index][2].removeprefix(MARK) if index >= 0 and ts < self.rows[index][1] else None


def summarize_host(events: Sequence[Mapping[str, Any]], num_steps: int) -> dict[str, Any]:
    """Per step: waits of the host by phase, and device time by who launched it.

    A kernel is the engine's if it was launched in the update, in a node in which ZeRO's hooks run (`_ENGINES_NODES`),
    or in the backward outside of every autograd node (ZeRO's epilogue). All others are the model's. NCCL is counted
    apart.

    Args:
        events: "traceEvents" of a trace with `PHASES` marked.

    Returns:
        `waits`: {phase: {name: count}} with cuda*Synchronize calls, "memcpy DtoH", aten::item, aten::nonzero;
        `owner_ms`: {"model", "engine in backward", "engine in update", "nccl"}; `cpu_ops`: operators, nested ones
        included.
    """
    events = [event for event in events if event.get("ph") == "X"]
    marks = [MARK + phase for phase in PHASES]
    phases = _Ranges(e for e in events if e.get("cat") == "user_annotation" and e["name"] in marks)
    nodes: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op" and event["name"].startswith(_NODE):
            nodes[event["tid"]].append(event)
    by_thread = {tid: _Ranges(some) for tid, some in nodes.items()}

    waits = {phase: Counter[str]() for phase in PHASES}
    launches: dict[Any, tuple[float, Any]] = {}
    for event in events:
        phase, name = phases.at(event["ts"]), event["name"]
        if _is_call(event):
            launches[_correlation(event)] = (event["ts"], event["tid"])
        if phase is not None and (name in _WAITS or (event.get("cat") == "cpu_op" and name in _READS)):
            waits[phase][name] += 1
    owners = dict.fromkeys(("model", "engine in backward", "engine in update", "nccl"), 0.0)
    for event in _on_device(events):
        launch = launches.get(_correlation(event))
        if launch is None:
            continue
        ts, tid = launch
        phase = phases.at(ts)
        if event["name"].startswith("Memcpy DtoH") and phase is not None:
            waits[phase]["memcpy DtoH"] += 1
        node = by_thread[tid].at(ts) if tid in by_thread else None
        owners[_owner(event["name"], phase, node)] += event["dur"] / 1e3
    return {
        "waits": {
            phase: {name: round(n / num_steps, 2) for name, n in sorted(some.items())} for phase, some in waits.items()
        },
        "owner_ms": {name: round(ms / num_steps, 3) for name, ms in owners.items()},
        "cpu_ops": round(sum(event.get("cat") == "cpu_op" for event in events) / num_steps),
    }


def _owner(name: str, phase: str | None, node: str | None) -> str:
    if kernel_class(name) == NCCL:
        return "nccl"
    if phase == "update":
        return "engine in update"
    if phase == "backward" and (node is None or _ENGINES_NODES.search(node)):
        return "engine in backward"
    return "model"


def host_waits(host: Mapping[str, Any]) -> float:
    """cuda*Synchronize calls per step within forward and backward."""
    return sum(host["waits"][phase].get(name, 0.0) for phase in ("forward", "backward") for name in _WAITS)


def table(arm: str, result: Mapping[str, Any]) -> str:
    """Markdown of one profiled arm.

    Args:
        result: `step_ms` (timed without a profiler), `device`, `host`, and `dispatches_per_linear` or None.
    """
    device, host, step_ms = result["device"], result["host"], result["step_ms"]
    idle = step_ms - device["busy_ms"]
    owners = host["owner_ms"]
    outside = idle + owners["engine in backward"] + owners["engine in update"]
    lines = [
        f"## {arm}",
        "",
        f"{step_ms:.1f} ms per step, device busy {device['busy_ms']:.1f}, idle {idle:.1f}; {device['num_kernels']} "
        f"kernels, {host['cpu_ops']} operators (nested ones included). The host waits {host_waits(host):g} times "
        "within forward and backward.",
        f"Outside the model's kernels: **{outside:.1f} ms** = idle {idle:.1f} + engine in backward "
        f"{owners['engine in backward']:.1f} + in update {owners['engine in update']:.1f}; nccl {owners['nccl']:.1f} "
        f"(overlapped or not).",
        f"Eager dispatches per linear, forward and backward: {result['dispatches_per_linear'] or 'not counted'}"
        f"{result.get('dispatches_error', '')}.",
        "",
        *([step_times.table(result["ranks"])] if "ranks" in result else []),
        "| class | ms per step |",
        "|---|---|",
        *(f"| {name} | {ms:.2f} |" for name, ms in device["classes_ms"].items()),
        f"| idle | {idle:.2f} |",
        "",
        "| host waits per step | " + " | ".join(PHASES) + " |",
        "|---|---|---|---|",
    ]
    names = sorted({name for some in host["waits"].values() for name in some})
    for name in names:
        lines.append(f"| {name} | " + " | ".join(f"{host['waits'][phase].get(name, 0):g}" for phase in PHASES) + " |")
    lines += ["", "| kernel | class | ms per step | count |", "|---|---|---|---|"]
    for name, kind, ms, count in device["kernels"]:
        lines.append(f"| `{name[:100].replace('|', '/')}` | {kind} | {ms:.3f} | {count:g} |")
    if device.get("gaps"):
        lines += [
            "",
            "| idle after | before | ms per step | count | of it the host was late |",
            "|---|---|---|---|---|",
        ]
    for before, after, ms, count, *late in device.get("gaps", []):
        first, second = (name[:60].replace("|", "/") for name in (before, after))
        shown = f"{late[0]:.3f}" if late else ""  # results of before 2026-11-27, afternoon, do not have it
        lines.append(f"| `{first}` | `{second}` | {ms:.3f} | {count:g} | {shown} |")
    return "\n".join([*lines, *_waits_lines(device)]) + "\n"


def _waits_lines(device: Mapping[str, Any]) -> list[str]:
    """Of `stream_waits`; results of before 2026-11-28 do not have it."""
    if "exposed_ms" not in device:
        return []
    waits = f"The compute stream waits {device['exposed_ms']:.2f} ms a step while others work"
    lines = ["", f"{waits}, also where the host is late."]
    if device["waits"]:
        lines += ["", "| what runs meanwhile | after | before | ms per step | count |", "|---|---|---|---|---|"]
    for *names, ms, count in device["waits"]:
        shown = " | ".join(f"`{name[:60].replace('|', '/')}`" for name in names)
        lines.append(f"| {shown} | {ms:.3f} | {count:g} |")
    return lines
