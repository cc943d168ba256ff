"""FP8 weights in graphs of torch.compile: readers see the true values there, and write as they do in eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.linears import as_fp8_parameter, fp8_of
from torch import Tensor, nn

SHAPE = (6, 10)


def make() -> Any:
    """An FP8 weight as ZeRO-1/2 has it."""
    torch.manual_seed(0)
    weight: Any = nn.Parameter(torch.randn(SHAPE, dtype=torch.bfloat16))
    as_fp8_parameter(weight)
    return weight


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def num_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def read(p: Any, x: Tensor) -> tuple[Tensor, ...]:
    return (
        F.linear(x, p),
        x @ p.t(),
        x @ p.T,
        torch.einsum("ti,oi->to", x, p),
        2 * p,
        p.float().pow(2),
        p.to(torch.float32),
        p.type(torch.float32),
        p.flatten(),
        p[2:4, ::2],
        torch.cat([p, p]),
        torch.add(input=p, other=p),
        torch.linalg.vector_norm(p.float()),
        p.detach(),
        p.clone(),
        p.data,
        p > 0,
        torch.zeros_like(p) + p.shape[0] + p.size(1),
    )


def test_readers_in_one_graph_see_what_they_see_in_eager() -> None:
    weight, x = make(), torch.randn(3, 10).bfloat16()
    expected = read(weight, x)
    got = torch.compile(read, backend="aot_eager", fullgraph=True)(weight, x)
    for a, b in zip(got, expected, strict=True):
        assert type(a) is Tensor and a.dtype == b.dtype and torch.equal(a.detach(), b.detach())
        assert not (a.is_floating_point() and a.isnan().any())


def test_gradient_of_a_reader_in_a_graph_reaches_the_parameter() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        return F.linear(x, p).float().square().sum() + p.float().pow(3).sum()

    weight, true, x = make(), nn.Parameter(make().detach()), torch.randn(4, 10).bfloat16()
    torch.compile(loss, backend="aot_eager", fullgraph=True)(weight, x).backward()
    loss(true, x).backward()
    assert weight.grad.dtype == torch.bfloat16 and torch.equal(weight.grad, true.grad)


def test_reader_in_a_graph_follows_bytes_and_scale_without_a_new_graph() -> None:
    weight, x = make(), torch.randn(3, 10).bfloat16()
    compiled = torch.compile(F.linear, backend="aot_eager", fullgraph=True)
    outputs = []
    for factor in (1.0, 0.1, 3.0):
        with torch.no_grad():
            weight.mul_(factor)
        outputs.append(compiled(x, weight).detach())
        assert torch.equal(outputs[-1], F.linear(x, weight.detach()))
    assert num_graphs() == 1 and not torch.equal(outputs[0], outputs[1])


def test_backward_of_a_graph_reads_bytes_gathered_after_its_forward_and_keeps_none() -> None:
    """As ZeRO-3 does it between forward and backward."""
    from torch.multiprocessing.reductions import StorageWeakRef

    linear = fp8_of(nn.Linear(SHAPE[1], SHAPE[0], bias=False).bfloat16())
    linear.weight = weight = make()
    x = torch.randn(4, 10).bfloat16().requires_grad_()
    linear(x).float().square().sum().backward()
    expected, x.grad = x.grad, None
    loss = torch.compile(linear, backend="aot_eager", fullgraph=True)(x).float().square().sum()
    shard = weight._fp8.data.clone()
    gathered = StorageWeakRef(weight._fp8.data.untyped_storage())
    weight._fp8.data = None
    assert gathered.expired()
    weight._fp8.data = shard
    loss.backward()
    assert torch.equal(x.grad, expected)


def add_in_place(p: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        p.add_(1.0)
    return F.linear(x, p)


def copy_into(p: Any, x: Tensor) -> Tensor:
    y = x.sin()
    with torch.no_grad():
        p.copy_(x[:6])
    return F.linear(y, p)


def set_item(p: Any, x: Tensor) -> Tensor:
    y = x.sin()
    with torch.no_grad():
        p[0] = 1.0
    return F.linear(y, p)


def out_argument(p: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        torch.add(p, 1.0, out=p)
    return F.linear(x, p)


_WRITERS = [add_in_place, copy_into, out_argument]
_ITEMS_PASS_SUBCLASSES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
"""torch.compile there writes an item of a tensor without asking its subclass."""


@pytest.mark.parametrize("write", _WRITERS if _ITEMS_PASS_SUBCLASSES else [*_WRITERS, set_item])
def test_writer_breaks_the_graph_and_becomes_the_new_fp8_bytes(write: Callable[[Any, Tensor], Tensor]) -> None:
    weight, reference, x = make(), make(), torch.randn(8, 10).bfloat16()
    before = weight.detach()
    expected = write(reference, x)
    got = torch.compile(write, backend="aot_eager")(weight, x)
    assert torch.equal(got, expected) and torch.equal(weight.detach(), reference.detach())
    assert not torch.equal(weight.detach(), before) and torch._dynamo.utils.counters["graph_break"]


@pytest.mark.skipif(not _ITEMS_PASS_SUBCLASSES, reason="breaks the graph, as other writers do")
def test_an_item_that_is_written_in_a_graph_is_no_silence() -> None:
    with pytest.raises(Exception, match="more than one element of the written-to tensor"):
        torch.compile(set_item, backend="aot_eager")(make(), torch.randn(8, 10).bfloat16())
