"""Tables of rotary embeddings in compiled graphs: made once, with the bits of eager."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from fp8_ds.engine import rotary
from fp8_ds.engine.rotary import keep_tables

LENGTH, HEAD_DIM = 32, 16


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=64,
        hidden_size=4 * HEAD_DIM,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(shape).to(torch.bfloat16)


def graphs_and_gradients(model: nn.Module) -> tuple[list[torch.fx.GraphModule], dict[str, Tensor]]:
    """What inductor would be given, recomputation decided; and what one step computes."""
    graphs: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)
    ids = torch.arange(2 * LENGTH).reshape(2, LENGTH) % 64
    torch.compile(model, backend=backend, fullgraph=True)(input_ids=ids, labels=ids).loss.backward()
    return graphs, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def num_sines(graph: torch.fx.GraphModule) -> int:
    return sum(node.target == torch.ops.aten.sin.default for node in graph.graph.nodes)


def test_backward_reads_tables_instead_of_making_them_again() -> None:
    stock, ours = llama(), llama()
    assert len(keep_tables(ours)) == 1 and ours.get_submodule("model.rotary_emb")._forward_hooks
    (_, stock_backward), stock_gradients = graphs_and_gradients(stock)
    (forward, backward), gradients = graphs_and_gradients(ours)
    assert num_sines(stock_backward) > 0, "the partitioner keeps tables by itself now: keep_tables has no purpose"
    assert (num_sines(forward), num_sines(backward)) == (1, 0)
    kept = [node for node in forward.graph.nodes if node.target == torch.ops.fp8_ds.table.default]
    assert [tuple(node.meta["val"].shape) for node in kept] == [(1, LENGTH, HEAD_DIM)] * 2, "cosines and sines"
    for name, gradient in stock_gradients.items():
        assert torch.equal(gradients[name], gradient), name


def test_eager_is_untouched_and_a_second_call_changes_nothing() -> None:
    model = llama()
    (handle,) = keep_tables(model)
    assert keep_tables(model) == []
    rotary = model.get_submodule("model.rotary_emb")
    assert len(rotary._forward_hooks) == 1
    with torch.profiler.profile() as profiler:
        model(input_ids=torch.zeros(1, LENGTH, dtype=torch.long))
    assert not [event.name for event in profiler.events() if "fp8_ds" in event.name]
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert keep_tables(copied) == [] and copied.get_submodule("model.rotary_emb")._forward_hooks
    handle.remove()
    assert not rotary._forward_hooks


def test_frequencies_of_each_kind_of_layer_are_found() -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    shape = Gemma3TextConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
    )
    model = Gemma3ForCausalLM(shape)
    assert len(keep_tables(model)) == 1 and model.model.rotary_emb._forward_hooks


def test_what_is_exported_has_no_op_of_ours() -> None:
    module = Frequencies(lambda x: (x.cos(), x.sin()))
    keep_tables(module)
    exported = torch.export.export(module, (torch.ones(3, 4),))
    assert "fp8_ds" not in str(exported.graph)


class Tables(NamedTuple):
    cos: Tensor
    sin: Tensor


class Frequencies(nn.Module):
    """A module with the buffer, whose output is what a test wants it to be."""

    def __init__(self, output: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.arange(4.0))
        self.output = output

    def forward(self, x: Tensor) -> Any:
        return self.output(x * self.inv_freq)


@pytest.mark.parametrize(
    "output",
    [lambda x: x.cos(), lambda x: (x.cos(), 2.0), lambda x: [x.cos(), x.sin()], lambda x: Tables(x.cos(), x.sin())],
    ids=["one", "with a number", "a list", "with names"],
)
def test_other_outputs_are_handed_on(output: Callable[[Tensor], Any]) -> None:
    x = torch.ones(3, 4)
    module = Frequencies(output)
    expected = module(x)
    keep_tables(module)
    torch._dynamo.reset()
    got = torch.compile(module, backend="aot_eager", fullgraph=True)(x)
    assert type(got) is type(expected)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_tables_with_a_gradient_keep_it() -> None:
    module = Frequencies(lambda x: (x.cos(), x.sin()))
    keep_tables(module)
    x = torch.ones(3, 4, requires_grad=True)
    torch._dynamo.reset()
    cos, _ = torch.compile(module, backend="aot_eager", fullgraph=True)(x)
    cos.sum().backward()
    assert x.grad is not None and bool(x.grad.abs().sum() > 0)


def test_tables_are_kept_where_every_graph_is_said_to_be_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch 2.11, where `torch.compiler.is_exporting()` is True in a graph of torch.compile."""
    kept: list[torch.Tensor] = []
    monkeypatch.setattr(rotary, "_op", lambda x: kept.append(x) or x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    rotary._keep_outputs(torch.nn.Identity(), (), (torch.ones(2), torch.zeros(2)))
    assert len(kept) == 2
