"""Gathers of one ZeRO-3 layer in FP8 and bf16: time and bytes. Writes dated results.

    python benchmarks/gather.py --gpus 2 4 --out $OUT
    python benchmarks/gather.py --gpus 2 --scale 256       # dry run on CPU (gloo), every weight 256 times smaller

The layer is all weights of a Llama-3-8B decoder layer (218.1 M). Gathered with `fp8_ds.comm.gather_runs`, which stages
1 and 2 use, as one buffer and weight by weight; and as seven parameters of ZeRO-3 by what its coordinator calls,
`all_gather_coalesced` and `wait`, stock's in bf16 and ours in FP8, until each weight lies by itself, released again.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import run_on_ranks
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
NUM_WARM, NUM_TIMED = 3, 15


def worker(device: torch.device, scale: int) -> dict[str, Any]:
    """Times of every gather; what arrives is checked to be what was there."""
    from fp8_ds.comm.gather import gather_runs
    from fp8_ds.comm.layout import ShardRange

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
            runs.append([ShardRange(r * part, (r + 1) * part, r) for r in range(num_ranks)])

        def gather() -> int:
            return sum(gather_runs(group, buffer, run) for buffer, run in zip(buffers, runs, strict=True))

        gather()
        for buffer in buffers:
            expected = torch.arange(1, num_ranks + 1, device=device).to(dtype)
            assert buffer.view(num_ranks, -1)[:, 0].equal(expected) and buffer.view(num_ranks, -1)[:, -1].equal(
                expected
            )
        return gather

    results: dict[str, Any] = {"ranks": num_ranks, "layer": {}}
    sizes = [size // scale for size in LAYER.values()]
    for name, dtype in (("bf16", torch.bfloat16), ("fp8", torch.uint8)):
        for how, parts in (("one buffer", [sum(sizes)]), ("weight by weight", sizes)):
            results["layer"][f"{name}, {how}"] = timed(prepared(parts, dtype))
    for name, gather in zero3_gathers(device, sizes):
        results["layer"][f"{name}, ZeRO-3's own"] = timed(gather)
    return results


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

    from fp8_ds.comm.collectives import ByteCounter
    from fp8_ds.nn.linear.payload import OF_RECIPE
    from fp8_ds.nn.linear.weight_quantizer import WeightQuantizer
    from fp8_ds.numerics.formats import E4M3
    from fp8_ds.zero.param_hooks import InFlight, ZeroParamHooks
    from fp8_ds.zero.sharded import Fp8Shards, ShardedWeight

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
    about = {"scale": scale, "device": device_name(), "torch": torch.__version__, "command": command_line()}
    return {**run_on_ranks(worker, num_ranks, scale), **about}


def report(runs: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: what each way delivers, and how fast."""
    lines = ["| ranks | what | bytes delivered | ms | GB/s received a rank |", "|---|---|---|---|---|"]
    for run in runs:
        for name, r in run["layer"].items():
            rate = r["bytes"] * (run["ranks"] - 1) / run["ranks"] / r["ms"] / 1e6
            lines.append(f"| {run['ranks']} | {name} | {r['bytes']:,} | {r['ms']:.3f} | {rate:.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, nargs="+", default=[2, 4], help="ranks, one measurement each")
    parser.add_argument("--scale", type=int, default=1, help="divide all sizes, for dry runs")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    runs = [measure(num_ranks, args.scale) for num_ranks in args.gpus]
    path = dated_stem(args.out, "gather").with_suffix(".json")
    path.write_text(json.dumps(runs, indent=1) + "\n")
    text = heading(path.stem) + report(runs)
    path.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
