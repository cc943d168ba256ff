"""Adam on float32 masters and moments in one launch, from gradients as they lie: the kernel clips and skips.

The arithmetic is that of torch's Adam and AdamW (torch/optim/adam.py, `_single_tensor_adam`), in float32, an operation
at a time: on a CPU the same bits, by the kernel a result that differs from torch's fused one by an ulp.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fp8_ds.ops._register import HAS_TRITON

BLOCK, SPAN, NUM_WARPS = 1024, 4, 4
"""Elements that a program has in flight, 8 a thread; how many such blocks it updates; its warps."""

FP32_BYTES = 4
_GRAD_DTYPES = (torch.bfloat16, torch.float32)

if HAS_TRITON:
    import triton
    import triton.language as tl

    from fp8_ds.ops.adamw.triton import Addresses

    @triton.jit
    def _update(
        master, m, v, grad, at, mask, scale, decay, weight_decay, one_minus_beta1, beta2, one_minus_beta2, step_size,
        root_correction, eps, DECOUPLED: tl.constexpr,
    ):  # fmt: skip
        x = tl.load(master + at, mask)
        mean = tl.load(m + at, mask)
        square = tl.load(v + at, mask)
        g = tl.load(grad + at, mask).to(tl.float32) * scale
        if DECOUPLED:
            x = x * decay
        else:
            g = g + weight_decay * x
        # As torch.lerp: with beta1 = 0 it is the gradient itself.
        mean = tl.where(
            one_minus_beta1 < 0.5, mean + one_minus_beta1 * (g - mean), g - (g - mean) * (1 - one_minus_beta1)
        )
        square = square * beta2 + one_minus_beta2 * g * g
        root = tl.div_rn(tl.sqrt_rn(square), tl.zeros(square.shape, tl.float32) + root_correction) + eps
        tl.store(m + at, mean, mask)
        tl.store(v + at, square, mask)
        tl.store(master + at, x - tl.div_rn(step_size * mean, root), mask)

    @triton.jit
    def dense_adam_kernel(
        table, grads, program_pieces, grad_scale, skip, decay, weight_decay, one_minus_beta1, beta2, one_minus_beta2,
        step_size, root_correction, eps,
        GRAD: tl.constexpr, DECOUPLED: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    ):  # fmt: skip
        """Update SPAN blocks of the piece `program_pieces[i]` in program `i`; nothing where `skip` is not 0.

        Args:
            table: int64 [num_pieces, 5]: addresses of master, m and v, number of elements, first program.
            grads: int64 [num_pieces]: addresses of gradients of dtype GRAD.
            program_pieces: int32 [num_programs].
            grad_scale, skip: float32 and int32, 0-dim.
        """
        if tl.load(skip) == 0:
            piece = tl.load(program_pieces + tl.program_id(0))
            row = table + piece * 5
            start = (tl.program_id(0) - tl.load(row + 4)) * (BLOCK * SPAN)
            left = tl.minimum(tl.load(row + 3) - start, BLOCK * SPAN).to(tl.int32)
            addresses = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(grads + piece)
            master = addresses[0].to(tl.pointer_type(tl.float32)) + start
            m = addresses[1].to(tl.pointer_type(tl.float32)) + start
            v = addresses[2].to(tl.pointer_type(tl.float32)) + start
            grad = addresses[3].to(tl.pointer_type(GRAD)) + start
            is_aligned = (addresses[0] | addresses[1] | addresses[2] | addresses[3]) % 16 == 0
            whole = tl.where(is_aligned, left // BLOCK * BLOCK, 0)
            at = tl.arange(0, BLOCK)
            scale = tl.load(grad_scale)
            done = 0
            while done < whole:  # not `range`: in Triton 3.6 its bounds cannot be interpreted with NumPy 2.4
                _update(
                    tl.multiple_of(master + done, 16), tl.multiple_of(m + done, 16), tl.multiple_of(v + done, 16),
                    tl.multiple_of(grad + done, 16), at, None, scale, decay, weight_decay, one_minus_beta1, beta2,
                    one_minus_beta2, step_size, root_correction, eps, DECOUPLED,
                )  # fmt: skip
                done += BLOCK
            while done < left:
                _update(
                    master + done, m + done, v + done, grad + done, at, at < left - done, scale, decay, weight_decay,
                    one_minus_beta1, beta2, one_minus_beta2, step_size, root_correction, eps, DECOUPLED,
                )  # fmt: skip
                done += BLOCK


class DenseStates(NamedTuple):
    """Flat `master`, `m` and `v`: float32 [n], contiguous, of one device."""

    master: Tensor
    m: Tensor
    v: Tensor


class AdamNumbers(NamedTuple):
    """Hyperparameters of a parameter group in a step.

    Args:
        corrections: `1 - beta1**t` and `1 - beta2**t` of step t, counted from 1; (1, 1) without bias correction.
        decoupled: whether weight decay acts on the weight (AdamW) or on the gradient (Adam).
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    corrections: tuple[float, float]
    decoupled: bool


class DenseStep(NamedTuple):
    """One step over flat tensors, which it updates in place.

    Args:
        starts: first element in the flat tensors of each gradient, ascending. What lies between them is padding, which
            is zero and stays so.
        grads: bf16 or float32, any shape, contiguous.
        grad_scale: float32, 0-dim, factor of the gradients.
        skip: int32, 0-dim; nothing happens unless it is 0.
    """

    states: DenseStates
    starts: Sequence[int]
    grads: Sequence[Tensor]
    numbers: AdamNumbers
    grad_scale: Tensor
    skip: Tensor


class DenseAdam:
    """Adam steps on the same flat tensors again and again; keeps addresses on the device."""

    def __init__(self) -> None:
        self._launches: dict[torch.dtype, _Launch] = {}

    @torch.no_grad()
    def __call__(self, step: DenseStep) -> None:
        """Take a step. The host waits for the device with the reference only."""
        if not HAS_TRITON or not all(grad.is_cuda and grad.dtype in _GRAD_DTYPES for grad in step.grads):
            reference_step(step)
        elif step.grads:
            with torch.cuda.device_of(step.grads[0]):  # Triton launches on the current device
                kernel_step(step, self._launches)


def reference_step(step: DenseStep) -> None:
    """`DenseAdam.__call__` by torch's operators."""
    if int(step.skip):
        return
    lr, (beta1, beta2), eps, weight_decay, corrections, decoupled = step.numbers
    master, m, v = step.states
    g = torch.zeros_like(master)
    for start, grad in zip(step.starts, step.grads, strict=True):
        g[start : start + grad.numel()] = grad.view(-1)
    g *= step.grad_scale
    if decoupled:
        master.mul_(1 - lr * weight_decay)
    elif weight_decay:
        g.add_(master, alpha=weight_decay)
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    root = v.sqrt().div_(corrections[1] ** 0.5).add_(eps)
    master.addcdiv_(m, root, value=-lr / corrections[0])


class _Launch:
    """Tables of gradients at these places: rows of (addresses of master, m and v, number of elements)."""

    def __init__(self, rows: list[tuple[int, ...]], device: torch.device) -> None:
        self.rows = rows
        num_programs = [-(-numel // (BLOCK * SPAN)) for *_, numel in rows]
        first = itertools.accumulate(num_programs, initial=0)
        table = [[*row, program] for row, program in zip(rows, first, strict=False)]
        pieces = torch.arange(len(rows), dtype=torch.int32)
        self.table = torch.tensor(table, dtype=torch.int64).to(device)
        self.program_pieces = torch.repeat_interleave(pieces, torch.tensor(num_programs)).to(device)
        self.addresses = Addresses(len(rows), device)


def kernel_step(step: DenseStep, launches: dict[torch.dtype, _Launch]) -> None:
    """`DenseAdam.__call__` by the kernel; on CPU under the interpreter.

    Args:
        launches: tables that the last call with these dtypes left, by dtype.
    """
    lr, (beta1, beta2), eps, weight_decay, corrections, decoupled = step.numbers
    addresses = [x.data_ptr() for x in step.states]
    for dtype in dict.fromkeys(grad.dtype for grad in step.grads):
        gradients = zip(step.starts, step.grads, strict=True)
        chosen = [(start, grad) for start, grad in gradients if grad.dtype == dtype and grad.numel()]
        rows = [(*(at + FP32_BYTES * start for at in addresses), grad.numel()) for start, grad in chosen]
        if not rows:
            continue
        launch = launches.get(dtype)
        if launch is None or launch.rows != rows:
            launch = launches[dtype] = _Launch(rows, step.states.master.device)
        dense_adam_kernel[(len(launch.program_pieces),)](
            launch.table,
            launch.addresses.update([grad.data_ptr() for _, grad in chosen]),
            launch.program_pieces,
            step.grad_scale,
            step.skip,
            1 - lr * weight_decay,
            weight_decay,
            1 - beta1,
            beta2,
            1 - beta2,
            lr / corrections[0],
            corrections[1] ** 0.5,
            eps,
            GRAD=tl.bfloat16 if dtype == torch.bfloat16 else tl.float32,
            DECOUPLED=decoupled,
            BLOCK=BLOCK,
            SPAN=SPAN,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
