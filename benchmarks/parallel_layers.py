"""One tensor-parallel block, forward and backward: bf16, torchao, Transformer Engine and ours. Writes dated results.

    python benchmarks/parallel_layers.py --gpus 2 --out $OUT
    python benchmarks/parallel_layers.py --gpus 2 --scale 32 --tokens 256 --arms bf16 ours   # dry run on CPU (gloo)

Activations between blocks are sharded by tokens. An arm's input and output are its shards [1, tokens / ranks, hidden];
timed are forward and backward, gradients of weights included, no optimizer. `--layers N`: of N of them in a row, per
layer, so that the GPU has work queued while the host goes on, as in a model; 1: each call begins with an empty queue.
`ffn` is a SwiGLU MLP, `block` a decoder layer: RMSNorm, attention without rotary positions, RMSNorm, MLP, both
residuals. Shapes: Llama-3-8B's and 70B's.

Arms. bf16: DTensor's sequence parallelism, compiled. torchao: tensorwise with FP8 gathers (Float8ColwiseParallel),
compiled; it casts its bf16 weights in every forward, which is what it does without FSDP. te: Transformer Engine's
linears, one for gate and up, weights kept in FP8 (fp8_model_init), current scaling. ours: parallelize, weights held in
FP8 by Fp8AdamW (what ZeRO hands the layers), fused SwiGLU, eager; ours-compiled: the same under torch.compile, one
graph with its collectives; ours-cudagraphs and torchao-cudagraphs: compiled, replayed as CUDA graphs, so that the host
launches two things a step.

Overlap, by a profile of one forward and backward: of the time in which a transfer of a gather runs, the share in which
a kernel of another kind runs too. Busy: in which any kernel runs; a call that takes longer waits for the host.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel_layers_arms import ARMS, NEEDS, PEERS, SHAPES, Shape, build
from processes import run_on_ranks
from results_io import command_line, dated_stem, device_name, heading, without_folders
from step_profile import Interval, merged, union_ms
from timing import slowest_rank_ms
from torch import nn

HERE = Path(__file__).resolve().parent
NUM_WARM, NUM_TIMED = 4, 12


def hidden_share(transfers: Iterable[Interval], computing: Iterable[Interval]) -> float:
    """Of the time in which a transfer runs, the share in which something is computed."""
    own, others = merged(transfers), merged(computing)
    total = sum(end - begin for begin, end in own)
    both = sum(max(0.0, min(e, end) - max(b, begin)) for begin, end in own for b, e in others)
    return both / total if total else 0.0


def overlap(step: Callable[[], None]) -> dict[str, float]:
    """Of one call: {"gather_ms": in which transfers of gathers run, "hidden": share of it under other kernels,
    "busy_ms": in which anything runs}. What a call takes beyond that, the GPU waits for the host.
    """
    from torch.profiler import ProfilerActivity, profile

    dist.barrier()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    transfers, computing, all_kernels = [], [], []
    for event in profiler.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        name, interval = event.name.lower(), (event.time_range.start, event.time_range.end)
        all_kernels.append(interval)
        if "nccl" not in name:
            computing.append(interval)
        elif "allgather" in name or "sendrecv" in name:
            transfers.append(interval)
    hidden = hidden_share(transfers, computing)
    return {"gather_ms": union_ms(transfers), "hidden": hidden, "busy_ms": union_ms(all_kernels)}


def step_of(model: nn.Module, arm: str, shape: Shape, tokens: int, device: torch.device) -> Callable[[], None]:
    own = tokens // dist.get_world_size()
    size = (own, 1, shape.hidden) if arm == "te" else (1, own, shape.hidden)
    x = torch.randn(size, device=device, dtype=torch.bfloat16).requires_grad_()
    grad = torch.randn(size, device=device, dtype=torch.bfloat16)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        x.grad = None
        for p in model.parameters():
            p.grad = None
        model(x).backward(grad)

    return step


@dataclass(frozen=True)
class Cell:
    shape: str
    part: str
    tokens: int
    arm: str


def cells(args: argparse.Namespace) -> list[Cell]:
    """All arms of a cell one after the other, so that they are compared at the same time of the machine."""
    return [
        Cell(shape, part, tokens, arm)
        for part in args.parts
        for shape in args.shapes
        for tokens in args.tokens
        for arm in args.arms
        if arm not in NEEDS or importlib.util.find_spec(NEEDS[arm])
    ]


def measure(cell: Cell, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """{"ms"} of one layer, on a GPU "peak_gib" and what `overlap` says; or {"error"}."""
    shape = SHAPES[cell.shape].divided(args.scale)
    torch._dynamo.reset()
    try:
        model = nn.Sequential(*(build(cell.arm, shape, cell.part, device) for _ in range(args.layers)))
        step = step_of(model, cell.arm, shape, cell.tokens, device)
        step()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        ms = slowest_rank_ms(step, device, num_warm=NUM_WARM, num_timed=NUM_TIMED)
        row: dict[str, Any] = {"ms": ms / args.layers}
        if device.type == "cuda":
            row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            row |= overlap(step)
            row |= {key: row[key] / args.layers for key in ("gather_ms", "busy_ms")}
        return row
    except Exception:  # of another library's arm, or its compiler: the other arms are measured all the same
        return {"error": without_folders(traceback.format_exc())[-1500:]}


def worker(device: torch.device, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of all cells; rank 0 prints each."""
    rows: list[dict[str, Any]] = []
    for cell in cells(args):
        row = measure(cell, args, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        rows.append({"ranks": dist.get_world_size(), "layers": args.layers, **asdict(cell), **row})
        if dist.get_rank() == 0:
            print(json.dumps(rows[-1])[:400], flush=True)
    return rows


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table for each number of ranks: ms by cell and arm, the best peer over each of ours, or a dash where one of
    PEERS has no time; then the overlap; then failures.

    Args:
        rows: "ranks", the fields of a `Cell`, and what `measure` found.
    """
    lines: list[str] = []
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    mine = [arm for arm in arms if arm.startswith("ours")]
    for ranks in dict.fromkeys(row["ranks"] for row in rows):
        lines += [
            f"{ranks} ranks, ms forward and backward:",
            "",
            f"| | {' | '.join([*arms, *(f'best peer / {arm}' for arm in mine)])} |",
            "|---|" + "---|" * (len(arms) + len(mine)),
        ]
        own = [row for row in rows if row["ranks"] == ranks]
        for key in dict.fromkeys((row["part"], row["shape"], row["tokens"]) for row in own):
            ms = {row["arm"]: row.get("ms") for row in own if (row["part"], row["shape"], row["tokens"]) == key}
            peers = [value for arm, value in ms.items() if value and arm not in mine]
            is_fair = all(ms.get(peer) for peer in PEERS)
            cells = [f"{ms[arm]:.2f}" if ms.get(arm) else "failed" if arm in ms else "-" for arm in arms]
            cells += [f"{min(peers) / ms[arm]:.2f}" if is_fair and ms.get(arm) else "-" for arm in mine]
            lines.append(f"| {key[0]}, {key[1]}, {key[2]} tokens | {' | '.join(cells)} |")
        lines.append("")
    profiled = [row for row in rows if "hidden" in row]
    if profiled:
        lines += ["| ranks | part | tokens | arm | ms | GPU busy, ms | ms of gathers | hidden |", "|---|" + "---|" * 7]
        lines += [
            f"| {r['ranks']} | {r['part']}, {r['shape']} | {r['tokens']} | {r['arm']} | {r['ms']:.2f} | "
            f"{r.get('busy_ms', float('nan')):.2f} | {r['gather_ms']:.3f} | {r['hidden']:.0%} |"
            for r in profiled
        ]
    for row in (row for row in rows if "error" in row):
        cell = f"{row['ranks']} ranks, {row['arm']}, {row['part']}, {row['shape']}, {row['tokens']} tokens"
        lines += ["", f"FAILED {cell}", "```", row["error"], "```"]
    return "\n".join(lines) + "\n"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, nargs="+", default=[2, 4], help="ranks, one measurement each")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--parts", nargs="+", choices=["ffn", "block"], default=["ffn", "block"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--arms", nargs="+", choices=[*ARMS, "te"], default=[*ARMS, "te"])
    parser.add_argument("--scale", type=int, default=1, help="divide all features, for dry runs")
    parser.add_argument("--layers", type=int, default=1, help="in a row; times are those of one")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    stem = dated_stem(args.out, "tensor-parallel")
    rows = [row for num_ranks in args.gpus for row in run_on_ranks(worker, num_ranks, args)]
    about = {"device": device_name(), "torch": torch.__version__, "command": command_line()}
    stem.with_suffix(".json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    text = heading(stem.name) + report(rows)
    stem.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
