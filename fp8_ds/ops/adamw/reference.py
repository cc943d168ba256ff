"""One Adam step on FP8 moments and split masters in plain torch; the kernel gives the same bits.

Every product, sum, quotient and root is rounded to float32 once, to nearest: nothing is fused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8_ds.numerics.masters import decode, encode
from fp8_ds.numerics.moments import (
    GROUP,
    NOISE_BITS,
    SMALLEST_V,
    dequantize_m,
    dequantize_root,
    from_groups,
    quantize_m,
    quantize_root,
    to_groups,
)
from fp8_ds.numerics.rounding import moment_noise, noise
from fp8_ds.ops.adamw.hyper import Hyper
from fp8_ds.ops.adamw.shards import AdamShard, StepInputs


def adamw_step(shards: Sequence[AdamShard], grads: Sequence[Tensor | None], inputs: StepInputs) -> None:
    """Update every shard that has a gradient in place: hi, lo, m, v, their scales, and `inputs.amax`.

    Args:
        shards: on one device.
        grads: bf16 or float32, 1-D [shard.numel], one per shard, or None.
    """
    if int(inputs.skip) != 0:
        return
    for shard, grad in zip(shards, grads, strict=True):
        if shard.numel and grad is not None:
            _step_shard(shard, grad, inputs)


def _step_shard(shard: AdamShard, grad: Tensor, inputs: StepInputs) -> None:
    row = inputs.hyper[shard.group]
    w = read_master(shard, inputs.scale_inv)
    update, m, root = unclamped_update(shard, grad, w, inputs)
    update = torch.minimum(torch.maximum(update, -row[Hyper.BOUND]), row[Hyper.BOUND])
    if inputs.decoupled:
        w = w * row[Hyper.DECAY]
    w = w - row[Hyper.LR] * update
    write_moments(shard, m, root, inputs)
    write_master(shard, w, inputs)


def unclamped_update(shard: AdamShard, grad: Tensor, w: Tensor, inputs: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return (m_hat / (sqrt(v_hat) + eps), m, sqrt(v)) of this step, float32 [numel]; `w` are the masters."""
    row = inputs.hyper[shard.group]
    g = grad.float() * inputs.grad_scale
    if not inputs.decoupled:
        g = g + w * row[Hyper.DECAY]
    m_code, root_code = _codes(shard)
    m_factor = _per_element(row[Hyper.BETA1] * shard.m_scale_inv, shard)
    v_factor = _per_element(row[Hyper.BETA2] * (shard.v_scale_inv * shard.v_scale_inv), shard)
    m = m_code * m_factor + row[Hyper.ONE_MINUS_BETA1] * g
    v = (root_code * root_code) * v_factor + row[Hyper.ONE_MINUS_BETA2] * (g * g)
    root = v.clamp(min=SMALLEST_V).double().sqrt().float()  # torch's float32 root is not correctly rounded on CPU
    return m * (1.0 / (root * row[Hyper.ROOT_FACTOR] + row[Hyper.EPS])), m, root


def read_master(shard: AdamShard, scale_inv: Tensor) -> Tensor:
    """Return the master weights of the shard, float32 [numel]; the master itself where it is float32."""
    if shard.lo is None:
        return shard.hi
    lo = from_groups(shard.lo.view(-1, GROUP), shard.numel, shard.start)
    return decode(shard.hi, lo, shard.fmt, scale_inv[shard.scale_index] if shard.fmt.is_fp8 else None)


def write_master(shard: AdamShard, value: Tensor, inputs: StepInputs) -> None:
    if shard.lo is None:
        shard.hi.copy_(value)
        return
    fmt = shard.fmt
    bits = None
    if fmt.stochastic:
        step = int(inputs.step[shard.group])
        bits = noise(inputs.seed, step, shard.param_id, shard.start, shard.numel, fmt.drop_bits, value.device)
    scale_inv = inputs.next_scale_inv[shard.scale_index] if fmt.is_fp8 else None
    hi, lo = encode(value, fmt, scale_inv, bits)
    shard.hi.copy_(hi)
    from_groups(shard.lo.view(-1, GROUP), shard.numel, shard.start).copy_(lo)
    if fmt.is_fp8:
        amax = inputs.amax[shard.scale_index]
        amax.copy_(torch.maximum(amax, decode(hi, lo, fmt, scale_inv).abs().max()))


def _codes(shard: AdamShard) -> tuple[Tensor, Tensor]:
    """Return (m, sqrt(v)) without their scales: float32 [numel]."""
    ones = torch.ones_like(shard.m_scale_inv)
    m, root = dequantize_m(shard.m.view(-1, GROUP), ones), dequantize_root(shard.v.view(-1, GROUP), ones)
    return from_groups(m, shard.numel, shard.start), from_groups(root, shard.numel, shard.start)


def _per_element(of_group: Tensor, shard: AdamShard) -> Tensor:
    return from_groups(of_group[:, None].expand(-1, GROUP), shard.numel, shard.start)


def write_moments(shard: AdamShard, m: Tensor, root: Tensor, inputs: StepInputs) -> None:
    step = int(inputs.step[shard.group])
    bits = moment_noise(inputs.seed, step, shard.param_id, shard.start, shard.numel, NOISE_BITS, root.device)
    bits = to_groups(bits, shard.start)
    for value, quantize, codes, scale_inv in (
        (m, quantize_m, shard.m, shard.m_scale_inv),
        (root, quantize_root, shard.v, shard.v_scale_inv),
    ):
        new_codes, new_scale_inv = quantize(to_groups(value, shard.start), bits)
        codes.view(-1, GROUP).copy_(new_codes)
        scale_inv.copy_(new_scale_inv)
