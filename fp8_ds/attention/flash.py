"""Flash attention by FlashAttention-3, bf16 or FP8, and the same in plain torch: two torch ops, one autograd function.

FP8: q, k and v go into E4M3 and are kept like that, with the output and the log-sum-exp. The backward is bf16's, on the
de-quantised values. So its probabilities, `exp(scores - lse)`, are those of the forward and sum to one; only the
forward's rounding of probabilities to E4M3 is not in the gradient. FlashAttention-3 itself has no backward in FP8.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from fp8_ds.attention import heads, reference
from fp8_ds.attention.heads.reference import rotate
from fp8_ds.attention.packages import call_by_name, find_fa3
from fp8_ds.attention.shapes import Geometry, Packing
from fp8_ds.ops._register import once_differentiable, register

Kernel = Literal["fa3", "reference"]

_CUDNN_MAX_DIM = 128

_GEOMETRY = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, "
    "SymInt left, SymInt right, str kernel"
)


def _flat(geometry: Geometry) -> tuple[Any, ...]:
    """Return a geometry as arguments of an op."""
    packing = geometry.packing
    packed = (None, None, 0, 0) if packing is None else packing.flat()
    return (*packed, geometry.softmax_scale, geometry.left, geometry.right)


def _geometry(
    cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, scale: float, left: int, right: int
) -> Geometry:
    packed = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return Geometry(scale, left, right, None if cu_seqlens_q is None else Packing(*packed))


def _fa3_arguments(geometry: Geometry) -> dict[str, Any]:
    packing = geometry.packing
    packed = {} if packing is None else vars(packing)
    return {
        **packed,
        "softmax_scale": geometry.softmax_scale,
        "causal": geometry.is_causal,
        "window_size_left": geometry.left,
        "window_size_right": geometry.right,
    }


def _forward(q: Tensor, k: Tensor, v: Tensor, descales: Tensor | None, *flat: Any) -> tuple[Tensor, Tensor]:
    geometry, kernel = _geometry(*flat[:-1]), flat[-1]
    if kernel == "reference":
        return reference.forward(q, k, v, descales, geometry)
    scales = {} if descales is None else dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    with torch.cuda.device_of(q):
        out, lse, *_ = call_by_name(find_fa3().forward, q=q, k=k, v=v, **scales, **_fa3_arguments(geometry))
    return out, lse


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, descales: Tensor | None, *flat: Any) -> tuple[Tensor, Tensor]:
    out = torch.empty(q.shape, dtype=q.dtype if descales is None else torch.bfloat16, device=q.device)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return out, torch.empty(reference.lse_shape(q, _geometry(*flat[:-1])), dtype=lse_dtype, device=q.device)


def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *flat: Any
) -> tuple[Tensor, Tensor, Tensor]:
    geometry, kernel = _geometry(*flat[:-1]), flat[-1]
    if kernel == "reference":
        return reference.backward(grad_out, q, k, v, out, lse, geometry)
    grad_out, q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad_out, q, k, v))
    fa3 = find_fa3()
    with torch.cuda.device_of(q):
        if fa3.backward is None:
            backward = cudnn_backward if cudnn_takes(q, k, geometry) else flash2_backward
            return backward(grad_out, q, k, v, out, lse, geometry)
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        call_by_name(
            fa3.backward,
            dout=grad_out,
            q=q,
            k=k,
            v=v,
            out=out,
            softmax_lse=lse,
            dq=dq,
            dk=dk,
            dv=dv,
            **_fa3_arguments(geometry),
        )
    return dq, dk, dv


def cudnn_takes(q: Tensor, k: Tensor, geometry: Geometry) -> bool:
    """Whether `cudnn_backward`, the faster of the two on Hopper, takes these."""
    is_square = q.shape[1] == k.shape[1] > 1
    return geometry.packing is None and not geometry.is_windowed and is_square and q.shape[-1] <= _CUDNN_MAX_DIM


def cudnn_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, geometry: Geometry
) -> tuple[Tensor, Tensor, Tensor]:
    """Run cuDNN's backward, through torch. It takes the output and log-sum-exp of any forward: torch's own context
    parallelism gives it those of a whole ring (torch.distributed.tensor.experimental, 2.13)."""
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # for dropout, which is off
    heads_first = (x.transpose(1, 2) for x in (grad_out, q, k, v, out))
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *heads_first,
        lse[..., None],
        seed,
        seed,
        None,
        None,
        None,
        q.shape[1],
        k.shape[1],
        0.0,
        geometry.is_causal,
        scale=geometry.softmax_scale,
    )
    dq, dk, dv = (grad.transpose(1, 2).contiguous() for grad in grads)
    return dq, dk, dv


def flash2_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, geometry: Geometry
) -> tuple[Tensor, Tensor, Tensor]:
    """Run torch's FlashAttention-2 backward, which takes any forward's output and log-sum-exp."""
    packing = geometry.packing
    # A query that sees nothing has -infinity from FlashAttention-3; FlashAttention-2 takes +infinity for it.
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad_out,
        q,
        k,
        v,
        out,
        lse,
        None if packing is None else packing.cu_seqlens_q,
        None if packing is None else packing.cu_seqlens_k,
        q.shape[1] if packing is None else packing.max_seqlen_q,
        k.shape[1] if packing is None else packing.max_seqlen_k,
        0.0,
        geometry.is_causal,
        torch.zeros(2, dtype=torch.uint64, device=q.device),  # the state of dropout's generator: there is no dropout
        torch.empty(0, dtype=torch.float32, device=q.device),
        scale=geometry.softmax_scale,
        window_size_left=geometry.left,
        window_size_right=geometry.right,
    )
    return grads


def _fake_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *flat: Any
) -> tuple[Tensor, ...]:
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))


_forward_op = register(
    f"attention_forward(Tensor q, Tensor k, Tensor v, Tensor? descales, {_GEOMETRY}) -> (Tensor, Tensor)",
    _forward,
    _fake_forward,
)
_backward_op = register(
    "attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_GEOMETRY}) -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)


class _FlashFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, kernel: Kernel, fp8: bool, hadamard: bool
    ) -> Tensor:
        ctx.geometry, ctx.kernel, ctx.hadamard, ctx.dtype = geometry, kernel, hadamard, q.dtype
        descales = None
        if fp8:
            q, k, v, descales = heads.quantize(q, k, v, geometry.packing, hadamard=hadamard)
        out, lse = _forward_op(q, k, v, descales, *_flat(geometry), kernel)
        ctx.save_for_backward(q, k, v, out, lse, descales)
        return out if out.dtype == ctx.dtype else out.to(ctx.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, descales = ctx.saved_tensors
        flat = _flat(ctx.geometry)
        if descales is not None:
            places = ((flat[0], flat[2]), (flat[1], flat[3]), (flat[1], flat[3]))
            each = zip((q, k, v), descales, places, strict=True)
            q, k, v = (heads.dequantize(x, scale_inv, *place) for x, scale_inv, place in each)
        dq, dk, dv = _backward_op(grad_out.to(out.dtype), q, k, v, out, lse, *flat, ctx.kernel)
        dq, dk, dv = (grad if grad.dtype == ctx.dtype else grad.to(ctx.dtype) for grad in (dq, dk, dv))
        if ctx.hadamard:
            dq, dk = rotate(dq, is_query=True, transposed=True), rotate(dk, is_query=False, transposed=True)
        return dq, dk, dv, None, None, None, None


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, kernel: Kernel, *, fp8: bool, hadamard: bool
) -> Tensor:
    """Compute attention; `fp8`: q, k and v go into E4M3; `hadamard`: q and k are rotated before that."""
    return _FlashFunction.apply(q, k, v, geometry, kernel, fp8, hadamard)
