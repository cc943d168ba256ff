"""count_activations: one forward and backward on fake tensors, and how many bytes it would hold at every moment.

No kernel runs and nothing is allocated, so the model may be larger than this machine. What is counted is what a GPU's
allocator would: every storage that an operator makes, from then until nothing refers to it. Not seen are temporaries
inside a kernel, and what an allocator wastes.

Scaled dot product attention without dropout is counted as the fused kernels have it (the CPU's, FlashAttention, cuDNN):
kept are q, k, v, the output and one float32 a row. With dropout the CPU has none such, and scores are counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from fp8_ds.nn.linear.payload import OF_RECIPE
from fp8_ds.nn.plan.convert import fp8_layers


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes of one micro-batch on one GPU.

    Attributes:
        kept: bytes that the backward finds: what the forward kept, and the loss.
        peaks: by the elements whose gradients are complete, from 0 in the forward to all at the end of the backward:
            bytes of activations and temporaries at most in that time; no weights, and none of those gradients.
    """

    kept: int
    peaks: Mapping[int, int]

    def peak(self, gradient_bytes: Callable[[int], int]) -> int:
        """Return the most bytes at any moment, without weights and states.

        Args:
            gradient_bytes: bytes that complete gradients of so many elements take by then.
        """
        return max(num_bytes + gradient_bytes(number) for number, num_bytes in self.peaks.items())


class _LiveBytes(TorchDispatchMode):
    """Count of live bytes: while active, every fake storage that an operator returns or receives counts until it is
    freed, but for those of `not_counted`."""

    def __init__(self, mode: FakeTensorMode, not_counted: list[Tensor]) -> None:
        super().__init__()
        self._mode = mode
        self._known = WeakIdKeyDictionary({tensor.untyped_storage(): None for tensor in not_counted})
        self.live = 0
        self.num_gradients = 0
        self.peaks: dict[int, int] = {0: 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, FakeTensor) and leaf.fake_mode is self._mode:
                with torch._C.DisableTorchFunctionSubclass():
                    storage = leaf.untyped_storage()
                if storage not in self._known:
                    self._known[storage] = None
                    self._add(storage.nbytes())
                    weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, num_bytes: int) -> None:
        self.live += num_bytes
        self.peaks[self.num_gradients] = max(self.peaks.get(self.num_gradients, 0), self.live)


def count_activations(model: nn.Module, run: Callable[[nn.Module], Tensor]) -> ActivationBytes:
    """Count what a forward and a backward hold. `model` is used up: its tensors are fake ones afterwards.

    Args:
        model: on the meta device, in the dtypes of training, its linears converted (`nn.plan.convert.apply_plan`)
            and its norms fused as in training; in training mode.
        run: computes the loss of the model, a scalar; makes the inputs itself, on the CPU: they are fake there.

    Raises:
        ValueError: a parameter has memory.
    """
    real = [name for name, p in model.named_parameters() if p.device.type != "meta"]
    if real:
        raise ValueError(
            f"model: expected all parameters on the meta device, got {real[0]} elsewhere. "
            'Build the model under torch.device("meta").'
        )
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        _make_fake(model, mode)
        memory = _LiveBytes(mode, [*model.parameters(), *model.buffers(), *_with_payloads(model)])

        def finished(p: Tensor) -> None:
            p.grad = None
            memory.num_gradients += p.numel()

        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(finished)
        with memory:
            loss = run(model)
            kept = memory.live
            loss.backward()
    return ActivationBytes(kept, memory.peaks)


def _make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Make parameters and buffers behave as if on the CPU, without memory."""
    made: dict[int, nn.Parameter] = {}
    convert = mode.fake_tensor_converter.from_meta_and_device
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                if id(p) not in made:
                    made[id(p)] = nn.Parameter(convert(mode, p.data, torch.device("cpu")), p.requires_grad)
                module._parameters[name] = made[id(p)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                module._buffers[name] = convert(mode, buffer, torch.device("cpu"))


def _with_payloads(model: nn.Module) -> Iterator[Tensor]:
    """Give FP8 weights payloads, as ZeRO would, and yield these tensors. Layers in bf16 for now need none."""
    for layer in fp8_layers(model).values():
        if layer.fp8_recipe.is_fp8:
            weight: Any = layer.weight
            data = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
            granularity = OF_RECIPE[layer.fp8_recipe.name]
            scale_inv = torch.empty(granularity.grid(weight.shape), dtype=torch.float32)
            weight._fp8 = SimpleNamespace(data=data, scale_inv=scale_inv)
            yield from (data, scale_inv)
