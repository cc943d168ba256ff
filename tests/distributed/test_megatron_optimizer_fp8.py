"""FP8 weights as high parts of their masters under the distributed optimizer.

Transformer Engine's Float8Tensor needs a GPU: here is a stand-in with what Megatron and we use of it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import megatron_training as mt
import pytest
import test_megatron_optimizer as base
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = pytest.mark.distributed


class StandIn(torch.Tensor):
    """Nominally bf16; holds uint8 `_data` and float32 `_scale_inv` [1]. Whatever computes with it gets its value."""

    _data: Tensor
    _scale_inv: Tensor
    _initial: Tensor | None

    @staticmethod
    def __new__(cls, data: Tensor, scale_inv: Tensor, initial: Tensor | None) -> StandIn:
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.bfloat16, device=data.device)
        made._data, made._scale_inv, made._initial = data, scale_inv, initial
        return made

    @classmethod
    def quantize(cls, value: Tensor) -> StandIn:
        scale_inv = (value.abs().max().float() / 448).reshape(1)  # not a power of two, as TE's current scaling
        data = (value.float() / scale_inv).to(torch.float8_e4m3fn).view(torch.uint8)
        return cls(data, scale_inv, value.detach().clone())

    def dequantize(self) -> Tensor:
        return (self._data.view(torch.float8_e4m3fn).float() * self._scale_inv).bfloat16()

    def get_high_precision_init_val(self) -> Tensor | None:
        return self._initial

    def clear_high_precision_init_val(self) -> None:
        self._initial = None

    def _reset_caches(self) -> None:
        self.num_resets = getattr(self, "num_resets", 0) + 1

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0]._data, args[0]._scale_inv, args[0]._initial)
        if func is torch.ops.aten.copy_.default:
            made = cls.quantize(args[1].dequantize() if isinstance(args[1], cls) else args[1])
            args[0]._data.copy_(made._data)
            args[0]._scale_inv.copy_(made._scale_inv)
            return args[0]
        args, kwargs = tree_map(lambda x: x.dequantize() if isinstance(x, cls) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


def build(layout: mt.Layout) -> nn.Module:
    """mt.build's model; the weights of its layers are FP8."""
    module: nn.Module = stock_build(layout).bfloat16()
    for name, layer in module.named_modules():
        if "linear" in name and getattr(layer, "weight", None) is not None and layer.weight.dim() == 2:
            attributes = {k: v for k, v in vars(layer.weight).items() if not k.startswith("_")}
            layer.weight = nn.Parameter(StandIn.quantize(layer.weight.detach()))
            for key, value in attributes.items():
                setattr(layer.weight, key, value)
    return module


stock_build = mt.build


def move(tensor: StandIn, data: Tensor) -> None:
    """Transformer Engine's `replace_raw_data`."""
    data.copy_(tensor._data)
    tensor._data = data


def one_by_one(group: Any, **kwargs: Any) -> Any:
    """In the place of torch's _coalescing_manager: gloo coalesces tensors of two dtypes into wrong values."""
    return nullcontext()


@contextmanager
def run(layout: mt.Layout, master: str | None) -> Iterator[mt.Training]:
    """As `base.run`, with a Transformer Engine that knows of FP8 tensors and nothing else."""
    from megatron.core import fp8_utils
    from megatron.core.distributed import param_and_grad_buffer

    names = {
        "HAVE_TE_FP8_TENSOR_CLASS": True,
        "FP8_TENSOR_CLASS": StandIn,
        "_modify_underlying_storage_impl": move,
        "dequantize_fp8_tensor": lambda tensor: tensor.dequantize(),
    }
    stock = {name: getattr(fp8_utils, name) for name in names}
    coalescing = param_and_grad_buffer._coalescing_manager
    try:
        param_and_grad_buffer._coalescing_manager = one_by_one
        for name, value in names.items():
            setattr(fp8_utils, name, value)
        mt.build = build
        with base.run(layout, master, fp8_recipe="tensorwise") as training:
            yield training
    finally:
        param_and_grad_buffer._coalescing_manager = coalescing
        mt.build = stock_build
        for name, value in stock.items():
            setattr(fp8_utils, name, value)


def fp8_weights(training: mt.Training) -> dict[str, Any]:
    return {name: p for name, p in training.module.named_parameters() if isinstance(p, StandIn)}


def assert_bytes_follow_masters(training: mt.Training, master: str) -> None:
    """On every rank each weight is its master rounded to nearest, by one power of two, and nothing saturates."""
    from fp8_ds.optim.masters import BY_NAME, encode

    dense = base.masters(training)
    weights = fp8_weights(training)
    assert len(weights) == 4 * mt.NUM_LAYERS
    for name, p in weights.items():
        value = dense[f"{name} param"]
        assert torch.equal(encode(value, BY_NAME[master], p._scale_inv)[0], p._data.flatten()), name
        assert float(torch.frexp(p._scale_inv)[0]) == 0.5, name
        assert float(value.abs().max()) <= 448 * float(p._scale_inv) * (1 + 2**-10), name


def train(layout: mt.Layout, master: str) -> dict[str, Any]:
    with run(layout, master) as training:
        assert_bytes_follow_masters(training, master)
        initial = {name: p.dequantize() for name, p in fp8_weights(training).items()}
        data, losses = mt.batches(base.NUM_STEPS), []
        for _ in range(base.NUM_STEPS):
            losses += base.steps(training, 1, data)
            assert_bytes_follow_masters(training, master)
        weights = fp8_weights(training)
        dtypes = {
            b.param_data.dtype
            for b in training.optimizer.chained_optimizers[0].buffers
            if b.params[0] in set(weights.values())
        }
        return {
            "losses": losses,
            "dtypes": dtypes,
            "bytes": {name: p._data.clone() for name, p in weights.items()},
            "scale_inv": {name: p._scale_inv.clone() for name, p in weights.items()},
            "moved": all(not torch.equal(p.dequantize(), initial[name]) for name, p in weights.items()),
            "resets": min(p.num_resets for p in weights.values()),
        }


@pytest.mark.parametrize("master", ["e4m19", pytest.param("e4m11", marks=pytest.mark.slow)])
def test_bytes_are_high_parts_and_the_loss_follows_stock(ranks: Any, master: str) -> None:
    stock = ranks(2).run(base.losses_of, base.bf16(True), (None,))[0][None][0]
    results = ranks(2).run(train, base.bf16(True), master)
    for result in results:
        base.assert_same(result["bytes"], results[0]["bytes"])
        base.assert_same(result["scale_inv"], results[0]["scale_inv"])
        assert result["dtypes"] == {torch.uint8}, "a byte per weight is gathered"
        assert result["moved"] and result["resets"] >= base.NUM_STEPS
        assert 0 < base.largest_difference(result["losses"], stock) <= base.allowed(ranks, 2), (result["losses"], stock)


def resident(master: str) -> float:
    """Bytes per parameter beside gradients, of which the FP8 weights are nine tenths."""
    from fp8_ds.testing.memory import PeakMemory

    class RealMemory(PeakMemory):
        def counts(self, tensor: Tensor) -> bool:
            return not isinstance(tensor, StandIn) and super().counts(tensor)  # its own storage is nominal

    gc.collect()
    with RealMemory() as memory, run(base.bf16(True, ddp={"grad_reduce_in_fp32": False}), master) as training:
        training.step(mt.batches(1))
        gc.collect()
        params = list(training.module.parameters())
        numel = sum(p.numel() for p in params)
        assert sum(p.numel() for p in fp8_weights(training).values()) > 0.8 * numel
        return (memory.live - sum(p.main_grad.nbytes for p in params)) / numel


@pytest.mark.parametrize(
    ("master", "bytes_per_weight"), [pytest.param("e4m19", 5.07, marks=pytest.mark.slow), ("e4m11", 4.07)]
)
def test_no_bf16_weight_exists(ranks: Any, master: str, bytes_per_weight: float) -> None:
    assert ranks(1).run(resident, master)[0] < bytes_per_weight + 0.45


def saved_then_loaded(form: str, path: str, master: str) -> None:
    """One rank's view: what is loaded is what was saved, scales included, and training goes on alike."""
    with run(base.bf16(True), master) as training:
        data = mt.batches(6)
        base.steps(training, 3, data)
        before = everything(training)
        base.save(training, Path(path), form)
        losses = base.steps(training, 3, data)
        after = everything(training)
    with run(base.bf16(True), master) as training:
        data = mt.batches(6)
        for _ in range(3 * mt.NUM_MICRO):
            next(data)
        base.load(training, Path(path), form)
        base.assert_same(everything(training), before)
        assert base.steps(training, 3, data) == losses
        base.assert_same(everything(training), after)


def everything(training: mt.Training) -> dict[str, Tensor]:
    found = {key: value for key, value in base.local_bytes(training).items() if not key.startswith("weight")}
    for name, p in training.module.named_parameters():
        found[name] = p._data.clone() if isinstance(p, StandIn) else p.detach().clone()
        if isinstance(p, StandIn):
            found[f"{name} scale_inv"] = p._scale_inv.clone()
    return found


@pytest.mark.parametrize(
    ("form", "master"),
    [("dp_reshardable", "e4m19"), pytest.param("legacy", "e4m11", marks=pytest.mark.slow)],
)
def test_resume_is_bit_exact(ranks: Any, tmp_path: Path, form: str, master: str) -> None:
    path = str(tmp_path / "ckpt")
    Path(path).mkdir()
    ranks(2).run(saved_then_loaded, form, path, master)


def reloaded(master: str) -> None:
    """Weights are overwritten, as by a checkpoint without states; Transformer Engine chooses a scale of its own."""
    with run(base.bf16(True), master) as training:
        base.steps(training, 2)
        with torch.no_grad():
            for p in training.module.parameters():
                p.copy_(torch.full(p.shape, 0.3, dtype=torch.bfloat16))
        training.optimizer.reload_model_params()
        assert_bytes_follow_masters(training, master)
        assert all((value - 0.3).abs().max() < 0.01 for key, value in base.masters(training).items() if "param" in key)


def test_weights_loaded_without_states_are_their_own_masters(ranks: Any) -> None:
    ranks(2).run(reloaded, "e4m19")
