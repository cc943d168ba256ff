"""One tensor-parallel block, forward and backward: bf16, torchao, Transformer Engine and ours. Writes dated results.

    python benchmarks/parallel_layers.py --gpus 2 --out $OUT
    python benchmarks/parallel_layers.py --gpus 2 --scale 32 --tokens 256 --arms bf16 ours   # dry run on CPU (gloo)

Activations between blocks are sharded by tokens. An arm's input and output are its shards [1, tokens / ranks, hidden];
timed are forward and backward, gradients of weights included, no optimizer. `ffn` is a SwiGLU MLP, `block` a decoder
layer: RMSNorm, attention without rotary positions, RMSNorm, MLP, both residuals. Shapes: Llama-3-8B's and 70B's.

Arms. bf16: DTensor's sequence parallelism, compiled; bf16-async: with inductor's micro-pipelined gathers. torchao:
tensorwise with FP8 gathers (Float8ColwiseParallel), compiled, and torchao-rowwise (gathers in bf16). te: Transformer
Engine's linears, one for gate and up, weights kept in FP8 (fp8_model_init), current scaling. ours: parallelize, weights
held in FP8 by Fp8AdamW (what ZeRO hands the layers), fused SwiGLU, eager; ours-chunked: gathers in pieces. torchao
casts its bf16 weights in every forward, which is what it does without FSDP.

Overlap, by a profile of one forward and backward of the MLP: of the time in which a transfer of a gather runs, the
share in which a kernel of another kind runs too.

Prediction, written before the first run on two H200s, ms of the MLP at TP=2: 8B, 8192 tokens: ours 4.9, 16384: 9.3;
70B: 15.8 and 30.5 (torchao measured 5.62, 10.5, 17.7, 33.4). Chunked: 60 % of a gather hidden, and slower than one
gather at 8192 tokens of 8B, for its GEMMs are cut in pieces.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from results_io import command_line, dated_stem, device_name, heading, without_folders
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
NUM_WARM, NUM_TIMED = 4, 12


@dataclass(frozen=True)
class Shape:
    """Features of a decoder layer; heads are of 128."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int

    def divided(self, scale: int) -> Shape:
        heads = max(4, self.heads // scale)
        return Shape(self.hidden // scale, self.ffn // scale, heads, max(4, self.kv_heads // scale))

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SHAPES = {"8b": Shape(4096, 14336, 32, 8), "70b": Shape(8192, 28672, 64, 8)}


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Causal, of as many heads as this rank's linears give."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * self.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (proj(x) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(attend(q, k, v, self.head_dim))


def attend(q: Tensor, k: Tensor, v: Tensor, head_dim: int) -> Tensor:
    q, k, v = (y.view(*y.shape[:2], -1, head_dim).transpose(1, 2) for y in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return y.transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """One `Block`, or its MLP alone; whole, before an arm cuts it. Shards in, shards out.

    `first` and `last` are where `parallelize` would shard and gather tokens: here they are not called.
    """

    def __init__(self, shape: Shape, part: str) -> None:
        super().__init__()
        self.first, self.last = nn.Identity(), nn.Identity()
        self.layer = Block(shape) if part == "block" else nn.ModuleDict({"mlp": Mlp(shape)})

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if isinstance(self.layer, Block) else self.layer["mlp"](x)


# --- arms ---


def cut_by_dtensor(model: Model, part: str, kind: str) -> Model:
    """torch's or torchao's parallel styles, compiled.

    Args:
        kind: "bf16", "torchao" or "torchao-rowwise".
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    device_type = next(model.parameters()).device.type
    column, row, prepare = ColwiseParallel, RowwiseParallel, PrepareModuleInput
    if kind != "bf16":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        recipe = "rowwise" if kind == "torchao-rowwise" else "tensorwise"
        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    if kind == "torchao":
        from torchao.float8.float8_tensor_parallel import (
            Float8ColwiseParallel,
            Float8RowwiseParallel,
            PrepareFloat8ModuleInput,
        )

        column, row, prepare = Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    plan: dict[str, Any] = {
        "layer.mlp": prepare(**whole),
        "layer.mlp.gate_proj": column(),
        "layer.mlp.up_proj": column(),
        "layer.mlp.down_proj": row(output_layouts=Shard(1)),
    }
    if part == "block":
        plan |= {"layer.self_attn": prepare(**whole), "layer.self_attn.o_proj": row(output_layouts=Shard(1))}
        plan |= {f"layer.self_attn.{name}_proj": column() for name in "qkv"}
        # Local outputs: DTensors between the norms and the residuals would meet plain tensors.
        plan |= {
            f"layer.{name}": SequenceParallel(use_local_output=True)
            for name in ("input_layernorm", "post_attention_layernorm")
        }
    parallelize_module(model, mesh, plan)
    model.compile()
    return model


def bf16(model: Model, part: str) -> Model:
    return cut_by_dtensor(model, part, "bf16")


def bf16_async(model: Model, part: str) -> Model:
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    assert dist.group.WORLD is not None
    enable_symm_mem_for_group(dist.group.WORLD.group_name)
    torch._inductor.config._micro_pipeline_tp = True
    return cut_by_dtensor(model, part, "bf16")


def torchao(model: Model, part: str) -> Model:
    return cut_by_dtensor(model, part, "torchao")


def torchao_rowwise(model: Model, part: str) -> Model:
    return cut_by_dtensor(model, part, "torchao-rowwise")


class TeBlock(nn.Module):
    """`Block` or `Mlp` of Transformer Engine's linears, a fused one for q, k, v and for gate, up. [tokens, 1, C]."""

    def __init__(self, shape: Shape, part: str, device: torch.device) -> None:
        super().__init__()
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import Float8CurrentScaling

        self.size, self.head_dim, self.with_attention = dist.get_world_size(), shape.head_dim, part == "block"
        self.recipe, self.autocast = Float8CurrentScaling(), te.fp8_autocast
        common: dict[str, Any] = {
            "bias": False,
            "sequence_parallel": True,
            "tp_group": dist.group.WORLD,
            "tp_size": self.size,
            "params_dtype": torch.bfloat16,
            "device": device,
        }
        with te.fp8_model_init(recipe=self.recipe):
            self.fc1 = te.Linear(shape.hidden, 2 * shape.ffn, parallel_mode="column", **common)
            self.fc2 = te.Linear(shape.ffn, shape.hidden, parallel_mode="row", **common)
            if self.with_attention:
                num_heads = shape.heads + 2 * shape.kv_heads
                self.qkv = te.Linear(shape.hidden, num_heads * self.head_dim, parallel_mode="column", **common)
                self.out = te.Linear(shape.heads * self.head_dim, shape.hidden, parallel_mode="row", **common)
        if self.with_attention:
            self.norms = nn.ModuleList(nn.RMSNorm(shape.hidden) for _ in range(2)).to(device, torch.bfloat16)
        self.widths = [shape.heads * self.head_dim // self.size, *2 * [shape.kv_heads * self.head_dim // self.size]]

    def forward(self, x: Tensor) -> Tensor:
        with self.autocast(enabled=True, fp8_recipe=self.recipe):
            if self.with_attention:
                q, k, v = self.qkv(self.norms[0](x)).split(self.widths, dim=-1)
                q, k, v = (y.transpose(0, 1) for y in (q, k, v))
                x = x + self.out(attend(q, k, v, self.head_dim).transpose(0, 1).contiguous())
                return x + self.mlp(self.norms[1](x))
            return self.mlp(x)

    def mlp(self, x: Tensor) -> Tensor:
        gate, up = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * up)


def ours(model: Model, part: str, recipe: str = "tensorwise", **tensor_parallel: Any) -> Model:
    """parallelize, FP8 linears, fused SwiGLU and norms; weights in FP8 as Fp8AdamW or ZeRO holds them."""
    from fp8_ds.config import ActivationsConfig, LinearConfig, TensorParallelConfig
    from fp8_ds.nn.convert import apply_plan, make_plan
    from fp8_ds.nn.linear import Fp8Linear
    from fp8_ds.nn.producers import fuse_producers
    from fp8_ds.optim.adamw import Fp8AdamW
    from fp8_ds.tp import TensorParallelPlan, configure, parallelize

    has_attention = part == "block"
    plan = TensorParallelPlan(
        heads=tuple(f"layer.self_attn.{name}_proj" for name in "qkv") if has_attention else (),
        column=("layer.mlp.gate_proj", "layer.mlp.up_proj"),
        row=("layer.mlp.down_proj",),
        row_heads=("layer.self_attn.o_proj",) if has_attention else (),
        blocks=("layer.self_attn", "layer.mlp") if has_attention else ("layer.mlp",),
        first="first",
        last="last",
        in_shards=("layer.input_layernorm", "layer.post_attention_layernorm") if has_attention else (),
    )
    device = next(model.parameters()).device
    config = LinearConfig(recipe=recipe, backend="torch" if device.type == "cuda" else "reference")
    tp_config = TensorParallelConfig(**tensor_parallel)
    assert dist.group.WORLD is not None
    parallelize(model, plan, dist.group.WORLD, config=tp_config)
    configure(model, tp_config, recipe)
    apply_plan(model, make_plan(model, config), config, device)
    fuse_producers(model, ActivationsConfig(fused=True))
    weights = [m.weight for m in model.modules() if isinstance(m, Fp8Linear)]
    if recipe == "tensorwise":  # split masters have one scale a weight
        model.optimizer = Fp8AdamW([{"params": weights, "master": "e4m11"}])
    return model


ARMS: dict[str, Callable[[Model, str], nn.Module]] = {
    "bf16": bf16,
    "torchao": torchao,
    "torchao-rowwise": torchao_rowwise,
    "ours": ours,
    "ours-chunked": lambda model, part: ours(model, part, chunks=2 * dist.get_world_size()),
    "ours-fp8-reduce": lambda model, part: ours(model, part, reduce_scatter="fp8"),
    "ours-rowwise": lambda model, part: ours(model, part, "rowwise"),
    "bf16-async": bf16_async,
}
"""And "te", which builds a model of its own."""
NEEDS = {"torchao": "torchao", "torchao-rowwise": "torchao", "te": "transformer_engine"}


def build(arm: str, shape: Shape, part: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    if arm == "te":
        return TeBlock(shape, part, device)
    with torch.device(device):
        model = Model(shape, part)
    return ARMS[arm](model.to(torch.bfloat16), part)


# --- measurement ---


def median_ms(step: Callable[[], None], device: torch.device) -> float:
    """Of one call; the slowest rank's, the median over calls that all ranks begin together."""
    times = []
    for _ in range(NUM_WARM + NUM_TIMED):
        dist.barrier()
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin.record()
            step()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            step()
            times.append(1000 * (time.perf_counter() - start))
    slowest = torch.tensor(times[NUM_WARM:], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint, in order, covering the same points."""
    result: list[Interval] = []
    for begin, end in sorted(intervals):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result


def hidden_share(transfers: Iterable[Interval], computing: Iterable[Interval]) -> float:
    """Of the time in which a transfer runs, the share in which something is computed."""
    own, others = merged(transfers), merged(computing)
    total = sum(end - begin for begin, end in own)
    both = sum(max(0.0, min(e, end) - max(b, begin)) for begin, end in own for b, e in others)
    return both / total if total else 0.0


def overlap(step: Callable[[], None]) -> dict[str, float]:
    """{"gather_ms": in which transfers of gathers run, "hidden": share of it under other kernels}, of one call."""
    from torch.profiler import ProfilerActivity, profile

    dist.barrier()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    transfers, computing = [], []
    for event in profiler.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        name, interval = event.name.lower(), (event.time_range.start, event.time_range.end)
        if "nccl" not in name:
            computing.append(interval)
        elif "allgather" in name or "sendrecv" in name:
            transfers.append(interval)
    return {
        "gather_ms": sum(end - begin for begin, end in merged(transfers)) / 1e3,
        "hidden": hidden_share(transfers, computing),
    }


def step_of(model: nn.Module, arm: str, shape: Shape, tokens: int, device: torch.device) -> Callable[[], None]:
    own = tokens // dist.get_world_size()
    size = (own, 1, shape.hidden) if arm == "te" else (1, own, shape.hidden)
    x = torch.randn(size, device=device, dtype=torch.bfloat16).requires_grad_()
    grad = torch.randn(size, device=device, dtype=torch.bfloat16)

    def step() -> None:
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


def measure(cell: Cell, scale: int, device: torch.device) -> dict[str, Any]:
    """{"ms", "peak_gib"} and for one of our MLPs what `overlap` says; or {"error"}."""
    shape = SHAPES[cell.shape].divided(scale)
    torch._dynamo.reset()
    torch._inductor.config._micro_pipeline_tp = False
    try:
        model = build(cell.arm, shape, cell.part, device)
        step = step_of(model, cell.arm, shape, cell.tokens, device)
        step()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        row: dict[str, Any] = {"ms": median_ms(step, device)}
        if device.type == "cuda":
            row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            if cell.part == "ffn":
                row |= overlap(step)
        return row
    except Exception:
        return {"error": without_folders(traceback.format_exc())[-1500:]}


def worker(rank: int, num_ranks: int, port: int, args: argparse.Namespace, out: str) -> None:
    sys.path.insert(0, str(HERE.parent))
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if on_cuda else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    end = time.monotonic() + args.budget
    rows: list[dict[str, Any]] = []
    for cell in cells(args):
        left = torch.tensor([end - time.monotonic()], device=device)
        dist.broadcast(left, 0)
        row = {"error": "left out: no time"} if left.item() < 0 else measure(cell, args.scale, device)
        if on_cuda:
            torch.cuda.empty_cache()
        rows.append({"ranks": num_ranks, **asdict(cell), **row})
        if rank == 0:
            Path(out).write_text(json.dumps(rows))
            print(json.dumps(rows[-1])[:400], flush=True)
    dist.destroy_process_group()


def report(rows: Sequence[dict[str, Any]]) -> str:
    """A table for each number of ranks: ms by cell and arm, the best peer over ours; then the overlap."""
    lines: list[str] = []
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    mine = [arm for arm in arms if arm.startswith("ours")]
    for ranks in dict.fromkeys(row["ranks"] for row in rows):
        lines += [
            f"{ranks} ranks, ms forward and backward:",
            "",
            f"| | {' | '.join(arms)} | best peer / ours |",
            "|---|" + "---|" * (len(arms) + 1),
        ]
        own = [row for row in rows if row["ranks"] == ranks]
        for key in dict.fromkeys((row["part"], row["shape"], row["tokens"]) for row in own):
            ms = {row["arm"]: row.get("ms") for row in own if (row["part"], row["shape"], row["tokens"]) == key}
            peers = [value for arm, value in ms.items() if value and arm not in mine]
            best = [value for arm, value in ms.items() if value and arm in mine]
            ratio = f"{min(peers) / min(best):.2f}" if peers and best else "-"
            cells_ = " | ".join(f"{ms[arm]:.2f}" if ms.get(arm) else "failed" for arm in arms)
            lines.append(f"| {key[0]}, {key[1]}, {key[2]} tokens | {cells_} | {ratio} |")
        lines.append("")
    profiled = [row for row in rows if "hidden" in row]
    if profiled:
        lines += ["| ranks | MLP | tokens | arm | ms of gathers | hidden |", "|---|---|---|---|---|---|"]
        lines += [
            f"| {r['ranks']} | {r['shape']} | {r['tokens']} | {r['arm']} | {r['gather_ms']:.3f} | {r['hidden']:.0%} |"
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
    parser.add_argument("--budget", type=float, default=540, help="seconds for each number of ranks")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    stem = dated_stem(args.out, "tensor-parallel")
    rows: list[dict[str, Any]] = []
    for num_ranks in args.gpus:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "out.json")
            try:
                mp.spawn(worker, (num_ranks, port, args, str(out)), nprocs=num_ranks)
            except Exception as error:  # what was measured before a rank died is kept, and the death is said
                print(f"FAILED: {without_folders(str(error))[-1500:]}", flush=True)
            rows += json.loads(out.read_text()) if out.exists() else []
    about = {"device": device_name(), "torch": torch.__version__, "command": command_line()}
    stem.with_suffix(".json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    text = heading(stem.name) + report(rows)
    stem.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
