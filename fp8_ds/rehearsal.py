"""rehearse: one forward and backward on the meta device, and how many bytes it would hold at every moment.

No kernel runs and nothing is allocated, so the model may be larger than this machine. What is counted is what a GPU's
allocator would: every storage that an operator makes, from then until nothing refers to it. Not seen are temporaries
inside a kernel, and what an allocator wastes.

Scaled dot product attention without dropout is counted as the fused kernels have it (the CPU's, FlashAttention, cuDNN):
kept are q, k, v, the output and one float32 a row. With dropout the CPU has none such, and scores are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fp8_ds.nn.layers import fp8_layers
from fp8_ds.scaling.granularity import OF_RECIPE
from fp8_ds.testing.memory import PeakMemory


@dataclass(frozen=True)
class Moment:
    """What is live at most while gradients of `num_gradients` elements exist.

    Attributes:
        num_gradients: elements of weights whose gradients are complete.
        num_bytes: activations and temporaries at most in that time; no weights, and none of those gradients.
    """

    num_gradients: int
    num_bytes: int


@dataclass(frozen=True)
class Rehearsal:
    """Of one micro-batch on one GPU.

    Attributes:
        kept: bytes that the backward finds: what the forward kept, and the loss.
        moments: from the forward (0 gradients) to the end of the backward.
        largest_gradient: elements of the largest one.
    """

    kept: int
    moments: tuple[Moment, ...]
    largest_gradient: int

    def peak(self, gradient_bytes: Callable[[int], float]) -> int:
        """Most bytes at any moment, without weights and states.

        Args:
            gradient_bytes: bytes that complete gradients of so many elements take by then.
        """
        return max(moment.num_bytes + round(gradient_bytes(moment.num_gradients)) for moment in self.moments)


class _FakeMemory(PeakMemory):
    """PeakMemory of the fake tensors of a mode, apart for each number of gradient elements."""

    def __init__(self, weights: list[Tensor], mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode
        self._weights = {id(storage): storage for storage in (weight.untyped_storage() for weight in weights)}
        self.num_gradients = 0
        self.peaks: dict[int, int] = {0: 0}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled code is called, as under a FakeTensorMode."""
        return True

    def counts(self, tensor: Tensor) -> bool:
        if not isinstance(tensor, FakeTensor) or tensor.fake_mode is not self._mode:
            return False
        return id(tensor.untyped_storage()) not in self._weights

    def _book(self, num_bytes: int, dtype: torch.dtype) -> None:
        super()._book(num_bytes, dtype)
        self.peaks[self.num_gradients] = max(self.peaks.get(self.num_gradients, 0), self.live)


def rehearse(
    model: nn.Module, run: Callable[[nn.Module], Tensor], compile_model: Callable[[nn.Module], None] | None = None
) -> Rehearsal:
    """What a forward and a backward hold. `model` is used up: its tensors are fake ones afterwards.

    Args:
        model: on the meta device, in the dtypes of training, its linears converted (`fp8_ds.nn.convert.apply_plan`) and
            its norms fused as in training; in training mode.
        run: computes the loss of the model, a scalar; makes the inputs itself, on the CPU: they are fake there.
        compile_model: compiles what a run compiles, by the backend of counting_backend.py. Then a first forward and
            backward makes the graphs, and the second is counted.

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
        not_counted = [*model.parameters(), *model.buffers(), *_with_payloads(model)]
        if compile_model is not None:
            compile_model(model)
            run(model).backward()
            for p in model.parameters():
                p.grad = None
        return _measure(model, run, _FakeMemory(not_counted, mode))


def _measure(model: nn.Module, run: Callable[[nn.Module], Tensor], memory: _FakeMemory) -> Rehearsal:
    sizes: list[int] = []

    def finished(p: Tensor) -> None:
        p.grad = None
        sizes.append(p.numel())
        memory.num_gradients += p.numel()

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(finished)
    with memory:
        loss = run(model)
        kept = memory.live
        loss.backward()
    moments = tuple(Moment(number, peak) for number, peak in sorted(memory.peaks.items()))
    return Rehearsal(kept, moments, max(sizes, default=0))


def _make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Parameters and buffers behave as if on the CPU, and have no memory."""
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
    """FP8 weights have payloads, as ZeRO would give them; yields these tensors. Those in bf16 for now need none."""
    for layer in fp8_layers(model).values():
        if layer.fp8_recipe.is_fp8:
            weight: Any = layer.weight
            data = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
            granularity = OF_RECIPE[layer.fp8_recipe.name]
            scale_inv = torch.empty(granularity.grid(weight.shape), dtype=torch.float32)
            weight._fp8 = SimpleNamespace(data=data, scale_inv=scale_inv)
            yield from (data, scale_inv)
