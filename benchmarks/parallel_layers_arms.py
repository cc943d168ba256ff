"""The arms of parallel_layers.py: one tensor-parallel block as torch, torchao, Transformer Engine and we make it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


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
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)  # calls that are seen to read a fused norm
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


def cut_by_dtensor(model: Model, part: str, kind: str, **options: Any) -> Model:
    """torch's or torchao's parallel styles, compiled.

    Args:
        kind: "bf16" or "torchao", tensorwise.
        options: of inductor.
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
    if kind == "torchao":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_tensor_parallel import (
            Float8ColwiseParallel,
            Float8RowwiseParallel,
            PrepareFloat8ModuleInput,
        )

        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("tensorwise"))
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
    model.compile(options=options)
    return model


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


def ours(model: Model, part: str, recipe: str = "tensorwise") -> Model:
    """parallelize, FP8 linears, fused SwiGLU and norms; weights in FP8 as Fp8AdamW or ZeRO holds them."""
    from fp8_ds.config import ActivationsConfig, LinearConfig
    from fp8_ds.nn.fused.search import fuse_producers
    from fp8_ds.nn.linear.fp8_linear import Fp8Linear
    from fp8_ds.nn.plan.convert import apply_plan
    from fp8_ds.nn.plan.plan import make_plan
    from fp8_ds.optim.adamw import Fp8AdamW
    from fp8_ds.tp import TensorParallelPlan, parallelize

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
    assert dist.group.WORLD is not None
    parallelize(model, plan, dist.group.WORLD)
    apply_plan(model, make_plan(model, config), config, device)
    fuse_producers(model, ActivationsConfig(fused=True))
    weights = [m.weight for m in model.modules() if isinstance(m, Fp8Linear)]
    if recipe == "tensorwise":  # split masters have one scale a weight
        model.optimizer = Fp8AdamW([{"params": weights, "master": "e4m11"}])
    return model


def ours_compiled(model: Model, part: str, **options: Any) -> Model:
    """The same as one graph, its collectives included; `options` of inductor."""
    ours(model, part)
    model.compile(options=options)
    return model


_CUDAGRAPHS = {"triton.cudagraphs": True}
ARMS: dict[str, Callable[[Model, str], nn.Module]] = {
    "bf16": lambda model, part: cut_by_dtensor(model, part, "bf16"),
    "torchao": lambda model, part: cut_by_dtensor(model, part, "torchao"),
    "ours": ours,
    "ours-rowwise": lambda model, part: ours(model, part, "rowwise"),
    "ours-compiled": ours_compiled,
    "ours-cudagraphs": lambda model, part: ours_compiled(model, part, **_CUDAGRAPHS),
    "torchao-cudagraphs": lambda model, part: cut_by_dtensor(model, part, "torchao", **_CUDAGRAPHS),
}
"""And "te", which builds a model of its own."""
PEERS = ("bf16", "torchao", "te")
"""Without all of which no ratio to the best peer is said."""
NEEDS = {"torchao": "torchao", "torchao-cudagraphs": "torchao", "te": "transformer_engine"}


def build(arm: str, shape: Shape, part: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    if arm == "te":
        return TeBlock(shape, part, device)
    with torch.device(device):
        model = Model(shape, part)
    return ARMS[arm](model.to(torch.bfloat16), part)
