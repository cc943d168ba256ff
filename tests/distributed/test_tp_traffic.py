"""What tensor-parallel layers send: collectives and bytes in eager, and under torch.compile one graph with the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import tensor_parallel as tpar
import torch
import training
from support.collectives import count_collectives
from support.ranks import on_ranks
from tensor_parallel import IN, OUT, T
from torch import nn

from fp8_ds.config import ActivationsConfig, TensorParallelConfig
from fp8_ds.nn.fused.mlp import FusedSwiglu, SwigluNames
from fp8_ds.nn.fused.module import Producer
from fp8_ds.nn.fused.search import find_swiglu, fuse_producers
from fp8_ds.testing import assert_bitwise
from fp8_ds.tp import LLAMA, TensorParallel, configure, parallelize

pytestmark = pytest.mark.distributed
pytest.importorskip("transformers")

SCALE_BYTES = {
    "tensorwise": lambda cols, world: 4 * world,
    "rowwise": lambda cols, world: 4 * T,
    "blockwise": lambda cols, world: 4 * T * cols // 128,
}


def traffic(module: Any, x: torch.Tensor) -> list[tuple[Any, Any]]:
    """(calls, bytes) of forward and of backward, after the first batch has been checked."""
    x = x.clone().requires_grad_()
    module(x).sum().backward()
    with count_collectives() as forward:
        output = module(x)
    with count_collectives() as backward:
        output.sum().backward()
    return [(count.calls, count.num_bytes) for count in (forward, backward)]


def of_linears(name: str, gather: str) -> None:
    """A gather is one collective of the codes and the scales, in bf16 of two bytes an element; sums are in bf16."""
    tp = tpar.context(gather=gather)
    layer = tpar.linear(OUT, IN, torch.bfloat16, bias=False)
    x, _ = tpar.operands()
    for kind, own_x, cols in (("column", tpar.own_rows(tp, x), IN), ("row", tpar.own_cols(tp, x), OUT)):
        found = traffic(tpar.RUN[kind][0](layer, tp, name, **tpar.grads_of(name)), own_x)
        gathered, reduced = found if kind == "column" else found[::-1]
        num_bytes = T * cols + SCALE_BYTES[name](cols, tp.size) if gather == "fp8" else 2 * T * cols
        assert gathered == ({"all_gather": 1}, {"all_gather": num_bytes})
        assert reduced == ({"reduce_scatter": 1}, {"reduce_scatter": 2 * T * cols // tp.size})


@pytest.mark.parametrize(
    ("world_size", "name", "gather"),
    [(2, "tensorwise", "fp8"), (2, "blockwise", "fp8"), (4, "rowwise", "fp8"), (2, "tensorwise", "bf16")],
)
def test_a_gather_moves_a_byte_an_element_and_the_scales(ranks: Any, world_size: int, name: str, gather: str) -> None:
    ranks(world_size).run(of_linears, name, gather)


@on_ranks(2)
def test_an_mlp_as_one_function_sends_what_its_linears_send() -> None:
    found = []
    for hooked in (False, True):
        model = tpar.llama(torch.bfloat16)
        tp = parallelize(model, LLAMA, tpar.groups(2).tp_group)
        configure(model, TensorParallelConfig(), "tensorwise")
        tpar.to_fp8(model)
        fuse_producers(model, ActivationsConfig(fused=True))
        block = model.model.model.layers[0].mlp
        if hooked:
            block.gate_proj.register_forward_hook(lambda *_: None)
        x = torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        found.append((traffic(block, x), tp.num_bytes_gathered))
    assert found[0] == found[1]
    assert found[0][0][0][0] == found[0][0][1][0] == {"all_gather": 1, "reduce_scatter": 1}


# --- under torch.compile ---


def in_products(model: Any) -> Any:
    """With attention as products and a softmax: of SDPA transformers traces another call than it makes in eager, whose
    gradients have other last bits with torch 2.11."""
    model.model.config._attn_implementation = "eager"
    return model


def sharded_model(nonlinear: str | None) -> tuple[nn.Module, TensorParallel]:
    """A Llama of one layer over two ranks, in FP8, its MLP fused if `nonlinear` says what it keeps."""
    model = in_products(tpar.llama(torch.bfloat16, num_layers=1))
    tp = parallelize(model, LLAMA, tpar.groups(2).tp_group)
    configure(model, TensorParallelConfig(), "tensorwise")
    tpar.to_fp8(model)
    if nonlinear is not None:  # not the norms, which run stock code in a graph
        for layer in model.model.model.layers:
            parts = find_swiglu(layer.mlp)
            assert isinstance(parts, SwigluNames)
            FusedSwiglu.fuse(layer.mlp, parts, Producer((layer.mlp.down_proj,), nonlinear))
    return model, tp


def counting(counts: dict[str, Counter[str]]) -> Any:
    """A backend that runs the graphs of forward and backward as they are, and counts their collectives."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    def of(kind: str) -> Any:
        def compiler(graph: Any, example_inputs: Any) -> Any:
            names = (str(node.target) for node in graph.graph.nodes)
            counts[kind].update(name.split(".")[1] for name in names if name.startswith("_c10d_functional"))
            del counts[kind]["wait_tensor"]
            return make_boxed_func(graph.forward)

        return compiler

    counts.update(forward=Counter(), backward=Counter())
    return aot_autograd(
        fw_compiler=of("forward"), bw_compiler=of("backward"), partition_fn=min_cut_rematerialization_partition
    )


@pytest.mark.parametrize("nonlinear", [None, pytest.param("fp8", marks=pytest.mark.slow)])
@on_ranks(2)
def test_a_model_is_one_graph_with_the_bits_and_the_collectives_of_eager(nonlinear: str | None) -> None:
    model, tp = sharded_model(nonlinear)
    counts: dict[str, Counter[str]] = {}
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counting(counts), fullgraph=True)
    results = []
    for run in (model, compiled):
        found: dict[str, torch.Tensor] = {}
        for step in range(2):
            model.zero_grad()
            loss = run(training.micro_batches(step, 1)[0])
            loss.backward()
            found[f"loss {step}"] = loss.detach()
            found |= {f"{name} {step}": p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append(found)
    assert tp.inputs.traced is None  # nothing of the graph is kept
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        assert_bitwise(results[1][name], value)
    # Two blocks, and the borders: tokens are gathered behind the last layer, gradients before the first.
    each_way = {"all_gather_into_tensor_coalesced": 2 + 1, "reduce_scatter_tensor": 2}
    assert counts == {"forward": each_way, "backward": each_way}
