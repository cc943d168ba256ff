"""Gathers of one ZeRO-3 layer in FP8 and bf16: time, bytes, and what they mean on many nodes. Writes dated results.

    python benchmarks/gather.py --gpus 2 4 --out $OUT
    python benchmarks/gather.py --gpus 2 --scale 256       # dry run on CPU (gloo), every weight 256 times smaller

The layer is all weights of a Llama-3-8B decoder layer (218.1 M). Gathered with `fp8_ds.comm.gather_runs`, which stages
1 and 2 use, as one buffer and weight by weight; and as seven parameters of ZeRO-3 by what its coordinator calls,
`all_gather_coalesced` and `wait`, stock's in bf16 and ours in FP8, until each weight lies by itself, released again.
Buffers of other sizes are for the model below.

Model of one host, fitted to these measurements, residuals printed: ms = latency + share / bandwidth, where share =
bytes * (ranks - 1) / ranks is what a rank receives. Model of nodes: NCCL's ring over all ranks, ms = latency +
(nodes - 1) * hop + share / min(bandwidth, network), for every byte enters each node once, through its whole network.
The network runs at line rate and nothing else uses it: in favour of bf16, which needs it more. A hop is assumed
(`HOP_MS`), not measured.

What it means for Llama-3-8B: 32 layers, each gathered in forward and again in backward while another layer computes (a
third of a layer's time forward, two thirds backward); gradients are reduced in the backward at the cost of a gather of
as many bytes. What does not fit under the computation is exposed and lengthens the step.

Predictions, written before the first run: 350 GB/s a rank over NVLink (without NVLS), latency 0.03 ms; the layer on 4
GPUs 0.96 ms in bf16 and 0.50 in FP8, on 2 GPUs 0.65 and 0.34. Within a host a gather hides under 5.7 ms of forward
either way, and so it does where every GPU has 400 Gb/s. Where a node shares 400 Gb/s: 8 to 9 ms a layer in bf16, 4 to 5
in FP8. bf16's own computation hides that; FP8's is too short: bf16 gathers and gradients expose 240 ms of a step on 2
nodes and 350 on 64, FP8 gathers 30 and 100, FP8 reduce-scatters too none.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_on_ranks
from results_io import command_line, dated_stem, device_name, heading
from timing import slowest_rank_ms

HERE = Path(__file__).resolve().parent
LAYER = {
    "q_proj": 4096 * 4096,
    "k_proj": 1024 * 4096,
    "v_proj": 1024 * 4096,
    "o_proj": 4096 * 4096,
    "gate_proj": 14336 * 4096,
    "up_proj": 14336 * 4096,
    "down_proj": 4096 * 14336,
}
"""Weights of a Llama-3-8B decoder layer."""
NUM_LAYERS = 32
SWEEP = tuple(1 << power for power in range(16, 30, 2))
"""Bytes, 64 KiB to 256 MiB."""
NUM_WARM, NUM_TIMED = 3, 15
HOP_MS = 0.01
"""Of NCCL's ring from node to node: assumed."""
GPUS_PER_NODE = 8
NETWORKS = {"400 Gb/s a node": 50.0, "400 Gb/s a GPU": 50.0 * GPUS_PER_NODE}
"""GB/s into a node."""
STEP_MS = {"bf16": 8192 / 8.0, "fp8": 8192 / 15.0}
"""Computation of a step of 8192 tokens: stock's 8.0k tokens/s, as measured, and our target of 15k (DESIGN.md)."""
FP8_REDUCE = 1.01
KINDS = {
    "bf16": (STEP_MS["bf16"], 2.0, 2.0),
    "FP8 GEMMs only": (STEP_MS["fp8"], 2.0, 2.0),
    "FP8 gathers": (STEP_MS["fp8"], 1.0, 2.0),
    "FP8 reduce-scatters too": (STEP_MS["fp8"], 1.0, FP8_REDUCE),
}
"""Name to (computation of a step in ms, bytes a weight gathered, bytes a weight reduced)."""


# --- the model ---


def share(num_bytes: float, num_ranks: int) -> float:
    """Bytes that a rank receives when `num_bytes` are gathered."""
    return num_bytes * (num_ranks - 1) / num_ranks


@dataclass(frozen=True)
class Link:
    """ms = latency_ms + bytes received / gb_per_s."""

    latency_ms: float
    gb_per_s: float

    def ms(self, num_bytes: float, num_ranks: int) -> float:
        return self.latency_ms + share(num_bytes, num_ranks) / self.gb_per_s / 1e6


def fit(rows: Sequence[tuple[float, int, float]]) -> Link:
    """The link whose relative errors are least in squares.

    Args:
        rows: (bytes, ranks, ms), of two sizes at least.
    """
    # minimise sum ((a + b x - t) / t)^2, that is least squares of 1 = a / t + b x / t
    sums = [0.0] * 5
    for num_bytes, num_ranks, ms in rows:
        u, v = 1 / ms, share(num_bytes, num_ranks) / ms
        for index, value in enumerate((u * u, u * v, v * v, u, v)):
            sums[index] += value
    uu, uv, vv, su, sv = sums
    determinant = uu * vv - uv * uv
    latency, slope = (su * vv - sv * uv) / determinant, (sv * uu - su * uv) / determinant
    return Link(max(latency, 0.0), 1e-6 / max(slope, 1e-12))  # noise must not make either negative


def node_gather_ms(num_bytes: float, num_nodes: int, gpus_per_node: int, link: Link, network_gb_per_s: float) -> float:
    """Milliseconds of a gather over all ranks of `num_nodes` nodes, as the docstring of this file says.

    Args:
        link: within a node.
        network_gb_per_s: into each node.
    """
    received = share(num_bytes, num_nodes * gpus_per_node)
    slowest = link.gb_per_s if num_nodes == 1 else min(link.gb_per_s, network_gb_per_s)
    return link.latency_ms + (num_nodes - 1) * HOP_MS + received / slowest / 1e6


def exposed_ms(gather_ms: float, reduce_ms: float, layer_ms: float) -> float:
    """What a layer adds to a step: communication that its computation does not cover."""
    forward = max(0.0, gather_ms - layer_ms / 3)
    backward = max(0.0, gather_ms + reduce_ms - 2 * layer_ms / 3)
    return forward + backward


def node_rows(link: Link, network_gb_per_s: float) -> list[dict[str, Any]]:
    """For 2 to 64 nodes: gathers of a layer, and what each of `KINDS` has exposed and trains at."""
    weights = sum(LAYER.values())
    rows = []
    for num_nodes in (2, 4, 8, 16, 32, 64):
        ms = {
            size: node_gather_ms(size * weights, num_nodes, GPUS_PER_NODE, link, network_gb_per_s)
            for size in (1.0, FP8_REDUCE, 2.0)
        }
        exposed = {
            name: NUM_LAYERS * exposed_ms(ms[gather], ms[reduce], step / NUM_LAYERS)
            for name, (step, gather, reduce) in KINDS.items()
        }
        speed = {name: 8192e3 / (KINDS[name][0] + exposed[name]) for name in KINDS}
        row = {"nodes": num_nodes, "bf16_gather_ms": ms[2.0], "fp8_gather_ms": ms[1.0]}
        rows.append({**row, "exposed_ms": exposed, "tokens_per_s": speed})
    return rows


# --- the measurement ---


def worker(device: torch.device, scale: int, out: str) -> None:
    """Times every gather, and checks that what arrives is what was there."""
    from fp8_ds.comm import gather_runs
    from fp8_ds.zero.layout import Run

    group = dist.group.WORLD
    assert group is not None
    rank, num_ranks = dist.get_rank(), dist.get_world_size()

    def timed(gather: Callable[[], int]) -> dict[str, float]:
        ms = slowest_rank_ms(gather, device, num_warm=NUM_WARM, num_timed=NUM_TIMED)
        return {"bytes": gather(), "ms": ms}

    def prepared(sizes: Sequence[int], dtype: torch.dtype) -> Callable[[], int]:
        """Gathers buffers of so many elements one after the other; returns the bytes delivered."""
        buffers = [torch.zeros(size, dtype=dtype, device=device) for size in sizes]
        runs = []
        for buffer in buffers:
            part = buffer.numel() // num_ranks
            buffer[rank * part : (rank + 1) * part] = rank + 1
            runs.append([Run(r, r * part, (r + 1) * part) for r in range(num_ranks)])

        def gather() -> int:
            return sum(gather_runs(group, buffer, run) for buffer, run in zip(buffers, runs, strict=True))

        gather()
        for buffer in buffers:
            expected = torch.arange(1, num_ranks + 1, device=device).to(dtype)
            assert buffer.view(num_ranks, -1)[:, 0].equal(expected) and buffer.view(num_ranks, -1)[:, -1].equal(
                expected
            )
        return gather

    results: dict[str, Any] = {"ranks": num_ranks, "layer": {}, "sweep": []}
    sizes = [size // scale for size in LAYER.values()]
    for name, dtype in (("bf16", torch.bfloat16), ("fp8", torch.uint8)):
        for how, parts in (("one buffer", [sum(sizes)]), ("weight by weight", sizes)):
            results["layer"][f"{name}, {how}"] = timed(prepared(parts, dtype))
    for name, gather in zero3_gathers(device, sizes):
        results["layer"][f"{name}, ZeRO-3's own"] = timed(gather)
    for num_bytes in SWEEP:
        results["sweep"].append(timed(prepared([num_bytes // scale // num_ranks * num_ranks], torch.uint8)))
    if rank == 0:
        Path(out).write_text(json.dumps(results))


def zero3_gathers(device: torch.device, sizes: Sequence[int]) -> Iterator[tuple[str, Callable[[], int]]]:
    """("bf16", stock's gather) and then ("fp8", ours) of the same ZeRO-3 parameters; each releases them again.

    Args:
        sizes: of the weights, each a multiple of 16 for each rank.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(device.index or 0), WORLD_SIZE=str(num_ranks))
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    from fp8_ds.comm import ByteCounter
    from fp8_ds.formats import E4M3
    from fp8_ds.scaling.granularity import OF_RECIPE
    from fp8_ds.zero.fetch import InFlight
    from fp8_ds.zero.sharded import Fp8Shards, ShardedWeight, ZeroParamHooks
    from fp8_ds.zero.weights import WeightQuantizer

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # of gloo ranks; compiling it takes a minute
    deepspeed.init_distributed(verbose=False)
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    config["zero_optimization"] |= {"stage3_param_persistence_threshold": 0}
    with deepspeed.zero.Init(config_dict_or_path=config):
        module = torch.nn.ModuleList(torch.nn.Linear(16, size // 16, bias=False) for size in sizes)
    params: list[Any] = list(module.parameters())
    for p in params:
        p.ds_tensor.data.fill_(rank + 1)

    def gather() -> int:
        params[0].all_gather_coalesced(params).wait()
        num_bytes = sum(num_bytes_of(p) for p in params)
        for p in params:
            p.partition()
        return num_bytes

    def num_bytes_of(p: Any) -> int:
        here = p.data if getattr(p, "_fp8", None) is None else p._fp8.data
        return int(here.numel() * here.element_size())

    def check(values: Callable[[Any], torch.Tensor]) -> None:
        params[0].all_gather_coalesced(params).wait()
        expected = torch.arange(1.0, num_ranks + 1, device=device)
        for p in params:
            pieces = values(p).float().view(num_ranks, -1)
            assert pieces[:, 0].equal(expected) and pieces[:, -1].equal(expected)
        params[0].partition(params)

    check(lambda p: p.data)
    yield "bf16", gather

    counter = ByteCounter()
    shapes = [p.ds_shape for p in params]
    quantizer = WeightQuantizer(dist.group.WORLD, shapes, OF_RECIPE["tensorwise"], device, None, counter)
    module.ds_inflight_param_registry = {}  # the coordinator's, of which there is none here
    shards = Fp8Shards(quantizer, counter, InFlight(module))
    # One behind the other, as a step has them.
    sent = torch.cat([p.ds_tensor.data for p in params]).to(E4M3.torch_dtype)
    for number, (p, shard) in enumerate(zip(params, sent.split([p.ds_tensor.numel() for p in params]), strict=True)):
        weight = ShardedWeight(str(number), p, number, quantizer)
        weight.shard = shard
        shards.add(weight)
        ZeroParamHooks(p, shards)
    check(lambda p: p._fp8.data)
    yield "fp8", gather


def measure(num_ranks: int, scale: int) -> dict[str, Any]:
    """What `worker` measured on so many ranks of this host."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        run_on_ranks(worker, num_ranks, scale, str(out))
        result: dict[str, Any] = json.loads(out.read_text())
    return {**result, "scale": scale, "device": device_name(), "torch": torch.__version__, "command": command_line()}


# --- the result ---


def samples(runs: Sequence[Mapping[str, Any]]) -> list[tuple[float, int, float]]:
    """(bytes, ranks, ms) of all gathers of one buffer."""
    rows = [(r["bytes"], run["ranks"], r["ms"]) for run in runs for r in run["sweep"]]
    return rows + [
        (r["bytes"], run["ranks"], r["ms"])
        for run in runs
        for name, r in run["layer"].items()
        if name.endswith("one buffer")
    ]


def report(runs: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: measurements, the fit with its residuals, and the table of nodes."""
    rows = samples(runs)
    link = fit(rows)
    lines = ["| ranks | layer | bytes delivered | ms | GB/s received a rank |", "|---|---|---|---|---|"]
    for run in runs:
        for name, r in run["layer"].items():
            rate = share(r["bytes"], run["ranks"]) / r["ms"] / 1e6
            lines.append(f"| {run['ranks']} | {name} | {r['bytes']:,} | {r['ms']:.3f} | {rate:.1f} |")
    lines += [
        "",
        f"Fit: latency {1000 * link.latency_ms:.1f} us, {link.gb_per_s:.1f} GB/s received a rank. Residuals:",
        "",
        "| bytes | ranks | ms | model ms | error |",
        "|---|---|---|---|---|",
    ]
    for num_bytes, num_ranks, ms in sorted(rows):
        model = link.ms(num_bytes, num_ranks)
        lines.append(f"| {num_bytes:,} | {num_ranks} | {ms:.3f} | {model:.3f} | {100 * (model / ms - 1):+.1f} % |")
    for name, network in NETWORKS.items():
        lines += [
            "",
            f"Nodes of {GPUS_PER_NODE} GPUs, {name}. Exposed ms a step, and tokens/s a GPU; with nothing exposed "
            f"{8192e3 / STEP_MS['bf16']:,.0f} in bf16 and {8192e3 / STEP_MS['fp8']:,.0f} in FP8:",
            "",
            f"| nodes | gather of a layer, bf16 / FP8 ms | {' | '.join(KINDS)} |",
            "|---|---" + len(KINDS) * "|---" + "|",
        ]
        for row in node_rows(link, network):
            cells = [f"{row['exposed_ms'][kind]:.0f}; {row['tokens_per_s'][kind]:,.0f}" for kind in KINDS]
            gathers = f"{row['bf16_gather_ms']:.2f} / {row['fp8_gather_ms']:.2f}"
            lines.append(f"| {row['nodes']} | {gathers} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, nargs="*", default=[2, 4], help="ranks, one measurement each; may be none")
    parser.add_argument("--scale", type=int, default=1, help="divide all sizes, for dry runs")
    parser.add_argument("--add", type=Path, nargs="*", default=[], help="result files from elsewhere to take in")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    path = dated_stem(args.out, "gather").with_suffix(".json")
    files = [file for file in (path, *args.add) if file.exists()]
    runs = {run["ranks"]: run for file in files for run in json.loads(file.read_text())}
    for num_ranks in args.gpus:
        runs[num_ranks] = measure(num_ranks, args.scale)
    if not runs:
        raise SystemExit("gpus: expected numbers of ranks, or files to --add, got neither.")
    path.write_text(json.dumps(list(runs.values()), indent=1) + "\n")
    text = heading(path.stem) + report(list(runs.values()))
    path.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
