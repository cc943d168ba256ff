"""An FP8 weight is a Parameter to whoever reads it, writes it, copies it or saves it; underneath is NaN."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.linears import as_fp8_parameter
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8_ds.errors import UnsupportedError
from fp8_ds.log import warn_once
from fp8_ds.nn.linear.parameter import has_payload
from fp8_ds.nn.linear.weight_data import WeightData
from fp8_ds.numerics.formats import E4M3
from fp8_ds.numerics.scale import scale_from_amax
from fp8_ds.ops.quantize import quantize

SHAPE = (6, 10)


@pytest.fixture
def weight() -> Any:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(SHAPE, dtype=torch.bfloat16))


def test_metadata_is_that_of_the_nominal_parameter(weight: Any) -> None:
    as_fp8_parameter(weight)
    assert isinstance(weight, nn.Parameter) and weight.is_leaf and weight.requires_grad
    assert (weight.shape, weight.numel(), weight.dtype, weight.dim()) == (SHAPE, 60, torch.bfloat16, 2)
    assert weight.size(0) == 6 and weight.device.type == "cpu" and weight.element_size() == 2
    assert weight.type() == "torch.BFloat16Tensor" and weight.untyped_storage().nbytes() == 2
    assert torch.zeros_like(weight).isnan().sum() == 0 and len(weight) == 6
    assert weight.grad is None and weight.untyped_storage().data_ptr() == weight.data_ptr()


READERS = {
    "linear": lambda p: F.linear(torch.ones(3, 10, dtype=p.dtype), p),
    "matmul": lambda p: torch.ones(3, 6, dtype=p.dtype) @ p,
    "reflected": lambda p: 2 * p,
    "add": lambda p: p + 1,
    "sum": lambda p: p.sum(),
    "float": lambda p: p.float(),
    "to": lambda p: p.to(torch.float32),
    "type_as_cast": lambda p: p.type(torch.float32),
    "transpose": lambda p: p.t(),
    "T": lambda p: p.T,
    "view": lambda p: p.view(-1),
    "flatten": lambda p: p.flatten(),
    "reshape": lambda p: p.reshape(10, 6),
    "index": lambda p: p[2:4, ::2],
    "norm": lambda p: torch.linalg.vector_norm(p.float()),
    "detach": lambda p: p.detach(),
    "clone": lambda p: p.clone(),
    "data": lambda p: p.data,
    "cat": lambda p: torch.cat([p, p]),
    "expand_as_another": lambda p: p.expand_as(torch.empty(2, *SHAPE)),
    "out_of_foreach": lambda p: torch._foreach_mul([p.detach()], 2.0)[0],
    "item": lambda p: torch.tensor(p[0, 0].item()),
    "tolist": lambda p: torch.tensor(p.tolist()),
    "iter": lambda p: torch.stack(list(p)),
    "numpy": lambda p: torch.from_numpy(p.detach().float().numpy()),
    "copy_from": lambda p: torch.zeros(SHAPE).copy_(p.detach()),
    "isfinite": lambda p: torch.isfinite(p),
    "compare": lambda p: p > 0,
    "state_dict": lambda p: _holding(p).state_dict()["w"],
}


def _holding(p: Any) -> nn.Module:
    module = nn.Module()
    module.w = p
    return module


@pytest.mark.parametrize("reader", READERS)
def test_reader_sees_the_true_value(weight: Any, reader: str) -> None:
    true = nn.Parameter(as_fp8_parameter(weight))
    got, expected = READERS[reader](weight), READERS[reader](true)
    assert got.dtype == expected.dtype and torch.equal(got.detach(), expected.detach())
    assert not (got.is_floating_point() and got.isnan().any())
    assert type(got) is (WeightData if reader == "data" else Tensor)


def test_gradient_of_a_reader_reaches_the_parameter(weight: Any) -> None:
    true = nn.Parameter(as_fp8_parameter(weight))
    x = torch.randn(4, 10, dtype=torch.bfloat16)
    for p in (weight, true):
        (F.linear(x, p).float().square().sum() + p.float().pow(3).sum()).backward()
    assert weight.grad.dtype == torch.bfloat16 and torch.equal(weight.grad, true.grad)


def test_hook_on_the_accumulated_gradient_fires_once(weight: Any) -> None:
    as_fp8_parameter(weight)
    seen = []
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    assert type(node).__name__ == "AccumulateGrad"
    # How DeepSpeed asks which weights take part in a backward: the answer must not cost their de-quantisation.
    assert torch.autograd.graph._get_grad_fn_or_grad_acc(weight) is node
    node.register_hook(lambda *_: seen.append("node"))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p is weight))
    (weight.sum() + weight.mean()).backward()
    assert seen == ["node", True] or seen == [True, "node"]


def test_bypassing_the_hook_reads_nan(weight: Any) -> None:
    as_fp8_parameter(weight)
    with torch._C.DisableTorchFunctionSubclass():
        assert weight.detach().isnan().all()
        assert F.linear(torch.ones(1, 10, dtype=torch.bfloat16), weight).isnan().all()


WRITERS = {
    "copy_": lambda p, value: p.copy_(value),
    "copy_broadcast": lambda p, value: p.copy_(value[:1]),
    "add_": lambda p, value: p.add_(value),
    "mul_": lambda p, value: p.mul_(2.0),
    "iadd": lambda p, value: p.__iadd__(value),
    "lerp_": lambda p, value: p.lerp_(value, 0.5),
    "zero_": lambda p, value: p.zero_(),
    "fill_": lambda p, value: p.fill_(3.0),
    "init": lambda p, value: nn.init.constant_(p, 0.25),
    "normal_": lambda p, value: (torch.manual_seed(3), nn.init.normal_(p)),
    "copy_of_float": lambda p, value: p.copy_(value.float()),
    "foreach": lambda p, value: torch._foreach_add_([p], [value]),
    "foreach_copy": lambda p, value: torch._foreach_copy_([p], [value]),
    "out": lambda p, value: torch.mul(value, 3.0, out=p),
    "masked": lambda p, value: p.masked_fill_(value > 0, 0.5),
    "with_itself": lambda p, value: p.add_(p),
    "setitem": lambda p, value: p.__setitem__(slice(0, 2), 1.0),
    "data": lambda p, value: setattr(p, "data", value),
    "data of data": lambda p, value: setattr(p, "data", value.data),
    "data in float32": lambda p, value: setattr(p, "data", value.float()),
    "set": lambda p, value: p.set_(value),
    "set to a storage": lambda p, value: p.set_(value.data.untyped_storage(), 0, SHAPE, (SHAPE[1], 1)),
}
DATA_WRITERS = {  # as WGAN's clamp, averages of weights that are swapped in and out, and initialisers write
    "copy": lambda p, value: p.data.copy_(value),
    "clamp": lambda p, value: p.data.clamp_(-0.1, 0.1),
    "foreach of data": lambda p, value: torch._foreach_mul_([p.data], 0.5),
    "out of data": lambda p, value: torch.add(value, 1, out=p.data),
    "init of data": lambda p, value: nn.init.constant_(p.data, 0.25),
    "item": lambda p, value: p.data.__setitem__(2, 7.0),
    "view": lambda p, value: p.data.view(-1)[3:17].zero_(),
    "transposed": lambda p, value: p.data.t().add_(value.t()),
    "detached": lambda p, value: p.data.detach().mul_(2),
    "out, of the weight": torch.no_grad()(lambda p, value: torch.mul(p, 0.5, out=p.data)),
    "out, a view": torch.no_grad()(lambda p, value: torch.add(p, value, out=p.data.view(1, *SHAPE)[0])),
    "two views": lambda p, value: [part.fill_(n) for n, part in enumerate(p.data.chunk(2))],
}


@pytest.mark.parametrize("of_fp8", [False, True])
@pytest.mark.parametrize("writer", [*WRITERS, *DATA_WRITERS])
def test_what_is_written_or_assigned_becomes_the_new_fp8_bytes(weight: Any, writer: str, of_fp8: bool) -> None:
    """Also the values of another FP8 weight, as when a policy's weights become those of its reference model."""
    expected = nn.Parameter(as_fp8_parameter(weight).clone())
    value = nn.Parameter(torch.randn(SHAPE, dtype=torch.bfloat16), requires_grad=False)
    true = as_fp8_parameter(value) if of_fp8 else value.detach().clone()
    with torch.no_grad() if writer in WRITERS else nullcontext():
        result = (WRITERS | DATA_WRITERS)[writer](weight, value)
        assert not isinstance(result, Tensor) or result is weight or writer in DATA_WRITERS
        (WRITERS | DATA_WRITERS)[writer](expected, true.clone())
    scale, scale_inv = scale_from_amax(expected.detach().float().abs().max(), E4M3.max)
    assert torch.equal(weight._fp8.scale_inv, scale_inv)
    assert torch.equal(weight._fp8.data.view(torch.uint8), quantize(expected.detach(), scale, E4M3).view(torch.uint8))
    assert weight.untyped_storage().nbytes() == 2 and torch.equal(value.detach(), true)  # still the placeholder


OTHER_SHAPES = {
    "nothing": lambda p: setattr(p, "data", torch.empty(0, dtype=p.dtype)),
    "transposed": lambda p: setattr(p, "data", p.data.t()),
    "of another": lambda p: setattr(p, "data", nn.Parameter(torch.zeros(3, 10))),
    "set": lambda p: p.set_(torch.zeros(2, 2, dtype=p.dtype)),
    "in place": lambda p: p.t_(),
    "resized": lambda p: p.resize_(3, 3),
}


@pytest.mark.parametrize("how", OTHER_SHAPES)
def test_another_shape_is_refused_by_name_and_changes_nothing(weight: Any, how: str) -> None:
    true = as_fp8_parameter(weight)
    with torch.no_grad(), pytest.raises(ValueError, match=r"^w: expected .*\(6, 10\)"):
        OTHER_SHAPES[how](weight)
    assert weight.shape == SHAPE and torch.equal(weight.detach(), true)


@pytest.mark.parametrize("how", ["weight", "data", "module"])
def test_sharing_a_weight_with_processes_is_refused_by_name(weight: Any, how: str) -> None:
    """They would get a copy."""
    true = as_fp8_parameter(weight)
    shared = {"weight": weight, "data": weight.data, "module": _holding(weight)}[how]
    with pytest.raises(UnsupportedError, match=r"^w: "):
        shared.share_memory() if how == "module" else shared.share_memory_()
    assert torch.equal(weight.detach(), true)


def test_a_parameter_made_of_data_is_a_leaf_over_the_weight_and_its_copies_are_plain(weight: Any) -> None:
    true = as_fp8_parameter(weight).clone()
    made = nn.Parameter(weight.data)
    assert isinstance(made, nn.Parameter) and made.is_leaf and made.requires_grad
    assert not nn.Parameter(weight.data, requires_grad=False).requires_grad
    assert torch.equal(weight.detach(), true)
    (3 * made.float()).sum().backward()
    assert torch.equal(made.grad, torch.full(SHAPE, 3.0, dtype=made.dtype)) and weight.grad is None
    for one in (copy.deepcopy(_holding(made)).w, _saved(made, weights_only=True)):
        assert type(one) is nn.Parameter and one.is_leaf and one.requires_grad and torch.equal(one.detach(), true)
        with torch.no_grad():
            one.zero_()
    assert torch.equal(weight.detach(), true)
    torch.optim.SGD([made], lr=0.25).step()  # as in stock, whose data is the weight's memory
    assert 0.5 < float((true - weight.detach()).float().mean()) < 1.0


def _saved(thing: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, **options)


def test_copies_and_pickles_are_plain_and_write_nowhere(weight: Any) -> None:
    true, module = as_fp8_parameter(weight).clone(), _holding(weight)
    module.tied = weight
    copied = copy.deepcopy(module)
    assert copied.w is copied.tied and copied.w.requires_grad
    pickled = _saved(nn.ParameterDict({"w": weight}), weights_only=False)["w"]
    read = [weight.data.clone(), weight.data + 0, copy.deepcopy(weight.data), _saved(weight.data, weights_only=True)]
    for one in (copied.w, pickled, *read, _saved(module.state_dict(), weights_only=True)["w"]):
        assert type(one) is (nn.Parameter if one is copied.w or one is pickled else Tensor)
        assert torch.equal(one.detach(), true)
        with torch.no_grad():
            one.zero_()
    assert torch.equal(weight.detach(), true)


@pytest.mark.parametrize("has_master", [False, True])
def test_a_write_into_a_frozen_weight_warns_that_nothing_keeps_it_in_more_bits(
    weight: Any, has_master: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As when adapters are merged, whose weights are then taken out again."""
    warn_once.cache_clear()
    as_fp8_parameter(weight)
    weight._fp8.has_master = has_master
    with torch.no_grad():
        weight.data = weight.detach() + 1
        weight.data.add_(1)
        weight.add_(1)
    assert [record.levelname for record in caplog.records if record.name == "fp8_ds"] == ["WARNING"] * (not has_master)


def test_a_weight_gathered_for_compute_is_read_and_only_one_in_bf16_is_written(weight: Any) -> None:
    as_fp8_parameter(weight, writable=False)
    for written in (weight, weight.data):
        with torch.no_grad(), pytest.raises(UnsupportedError, match="FP8 weight w cannot be written"):
            written.add_(1.0)
    weight.data = torch.empty(0, dtype=torch.bfloat16)  # what deepspeed's free_param does
    assert not has_payload(weight) and weight.numel() == 0
    gathered = torch.randn(SHAPE, dtype=torch.bfloat16)
    with torch._C.DisableTorchFunctionSubclass():
        weight.data = gathered  # by a stock reader
    assert torch.equal(weight.detach(), gathered) and weight.data.data_ptr() == gathered.data_ptr()
    with torch.no_grad():
        weight.add_(1.0)
    assert torch.equal(weight.detach(), gathered)


def test_data_that_was_read_before_follows_the_weight_and_autograd_does_not_mind_reads(weight: Any) -> None:
    true = as_fp8_parameter(weight).clone()
    data = weight.data
    row, x = data[1], torch.ones(SHAPE, dtype=torch.bfloat16, requires_grad=True)
    loss = (x * data).sum() + (x * data).sum()  # the second read changes nothing that the first has kept
    loss.backward()
    assert torch.equal(x.grad, 2 * true)
    with torch.no_grad():
        weight.fill_(2.0)
    assert (row.float() == 2.0).all() and (data.float() == 2.0).all()


class _Product(torch.autograd.Function):
    """As fused kernels are written, which are handed a weight and keep it for their backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


def _same(t: Tensor) -> Tensor:
    return t


def _hooks(pack: Any, unpack: Any) -> Any:
    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _in_checkpoint(x: Tensor, w: Any) -> Any:
    return checkpoint(lambda x: _Product.apply(x, w), x, use_reentrant=False)


def _hands_on(x: Tensor, w: Any) -> Any:
    class HandOn(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: Tensor) -> Tensor:
            return w.view_as(w)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return -grad

    return x @ HandOn.apply(w).t()


SAVING: dict[str, Any] = {
    "no hooks": nullcontext,
    "counting": lambda: _hooks(lambda t: (t.numel() * t.element_size(), t)[1], _same),
    "with what else": lambda: _hooks(lambda t: (t.device, t), lambda pair: pair[1]),
    "detaching": lambda: _hooks(lambda t: t.detach(), _same),
    "data": lambda: _hooks(lambda t: t.data, _same),
    "on the CPU": torch.autograd.graph.save_on_cpu,
}


def _gradients(weight: Any, context: Any, reads: Any) -> list[Tensor]:
    x = torch.linspace(-1, 1, 30, dtype=torch.bfloat16).view(3, 10).requires_grad_()
    with context():
        loss = reads(x, weight).float().pow(2).sum()
    weight.grad = None
    loss.backward()
    return [x.grad, weight.grad]


@pytest.mark.parametrize("hooks", SAVING)
def test_a_function_that_saves_the_weight_has_its_values_whatever_hooks_are_around(weight: Any, hooks: str) -> None:
    """autograd makes a plain tensor, without class and payload, of what an unpack hook hands back."""
    stock = nn.Parameter(as_fp8_parameter(weight).clone())
    for reads in (_Product.apply, _in_checkpoint, _hands_on):
        expected = _gradients(stock, SAVING[hooks], reads)
        assert all(map(torch.equal, _gradients(weight, SAVING[hooks], reads), expected))


def test_a_saved_weight_is_read_as_it_is_gathered_for_the_backward_and_named_where_it_is_not(weight: Any) -> None:
    true = as_fp8_parameter(weight, writable=False).clone()
    x = torch.ones(3, 10, dtype=torch.bfloat16, requires_grad=True)
    with SAVING["counting"]():
        losses = [_Product.apply(x, weight).sum() for _ in range(2)]
    weight._fp8.data = None
    with torch._C.DisableTorchFunctionSubclass():
        weight.data = 2 * true  # in bf16, by a stock reader
    losses[0].backward()
    assert torch.equal(x.grad, torch.ones(3, 6, dtype=torch.bfloat16) @ (2 * true))
    weight.data = torch.empty(0, dtype=torch.bfloat16)  # released
    with pytest.raises(UnsupportedError, match=r"^w: expected a weight that is gathered"):
        losses[1].backward()


DIFFERENTIATED: dict[str, Any] = {
    "grad": lambda loss, w, other: torch.autograd.grad(loss, [other, w]),
    "grad of two outputs": lambda loss, w, other: torch.autograd.grad(
        [loss, w], [w, other], [torch.ones(()), torch.ones_like(other)]
    ),
    "materialized": lambda loss, w, other: torch.autograd.grad(
        other.sum(), [other, w], create_graph=True, materialize_grads=True
    ),
    "second derivative": lambda loss, w, other: torch.autograd.grad(
        torch.autograd.grad(loss, w, create_graph=True)[0].float().pow(2).sum(), [w, other]
    ),
    "backward for inputs": lambda loss, w, other: [loss.backward(inputs=[other, w]), other.grad, w.grad][1:],
    "backward of the weight": lambda loss, w, other: [w.backward(torch.ones_like(other), inputs=[w]), w.grad][1:],
    "backward of the weight too": lambda loss, w, other: [
        torch.autograd.backward([loss, w], [None, torch.ones_like(other)], inputs=w),
        w.grad,
    ][1:],
}


@pytest.mark.parametrize("how", DIFFERENTIATED)
@pytest.mark.parametrize("reads", [_in_checkpoint, _Product.apply], ids=["checkpoint", "function"])
def test_gradients_by_the_weight_are_of_its_values(weight: Any, how: str, reads: Any) -> None:
    """torch asks the class of outputs and inputs how to differentiate; what runs then reads the weight."""

    def differentiated(w: Any, other: nn.Parameter) -> list[Tensor]:
        h = torch.linspace(-1, 1, 30, dtype=torch.bfloat16).view(3, 10) * other.sum(0)
        found = DIFFERENTIATED[how]((reads(h, w).float() - 1).pow(2).mean(), w, other)
        return [grad.detach() for grad in found]

    stock = nn.Parameter(as_fp8_parameter(weight).clone())
    expected, found = (differentiated(w, nn.Parameter(torch.ones_like(stock))) for w in (stock, weight))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "use", [lambda x, p: x * p, lambda x, p: x @ p.T, lambda x, p: x @ p.t()], ids=["mul", "T", "t"]
)
def test_backward_of_a_reader_survives_a_fetch_in_fp8_in_between(weight: Any, use: Any) -> None:
    as_fp8_parameter(weight)
    gathered, payload_data = torch.randn(SHAPE, dtype=torch.bfloat16), weight._fp8.data.clone()
    true = nn.Parameter(gathered.clone())
    weight._fp8.data = None
    with torch._C.DisableTorchFunctionSubclass():
        weight.data = gathered  # ZeRO-3: gathered by an external reader in the forward
    x = torch.randn(SHAPE, dtype=torch.bfloat16, requires_grad=True)
    reference = x.detach().clone().requires_grad_()
    loss = use(x, weight).float().square().sum()
    with torch._C.DisableTorchFunctionSubclass():
        weight.data = weight._fp8.nominal(weight.shape)  # released, and fetched for the backward
    weight._fp8.data = payload_data
    loss.backward()
    use(reference, true).float().square().sum().backward()
    assert torch.equal(x.grad, reference.grad) and torch.equal(weight.grad, true.grad)
