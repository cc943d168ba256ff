"""Shards in the middle of a training run, their gradients, and step numbers: for tests and timings of the Adam step."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from fp8_ds.numerics.masters import BY_NAME, MasterFormat
from fp8_ds.numerics.moments import GROUP, from_groups, num_groups, quantize_m, quantize_root, to_groups
from fp8_ds.ops.adamw import AdamShard, Hyper, StepInputs

NUM_SCALES = 4
"""Entries of the scale vectors that `make_inputs` gives."""

STATE = ("hi", "lo", "m", "v", "m_scale_inv", "v_scale_inv")
"""Tensors of a shard that a step writes."""

_BETA1, _BETA2 = 0.9, 0.95


def make_shard(fmt: MasterFormat, numel: int, start: int, seed: int = 0, scale_index: int = 0) -> AdamShard:
    """A shard on CPU whose groups differ in range by powers of e**2; the third group, where there is one, is zeros.

    Masters take every exponent and sign of their format, subnormals and zeros of both signs too.
    """
    generator = torch.Generator().manual_seed(seed)
    groups = num_groups(numel, start)
    shard = AdamShard(f"weight{seed}", numel, start, 7 + seed, 0, scale_index, fmt, torch.empty(0))
    if fmt.is_fp8:
        code = torch.randint(0, 0x7E, (numel,), generator=generator)
        shard.hi = (code | (torch.randint(0, 2, (numel,), generator=generator) << 7)).to(torch.uint8)
    else:
        shard.hi = (torch.randn(numel, generator=generator) * 0.02).to(fmt.hi_dtype)
    if fmt.is_split:
        half = 1 << (fmt.lo_bits - 1)
        lo = torch.randint(-half, half, (numel,), generator=generator)
        lo = torch.where(shard.hi.view(torch.uint8) & 0x7F == 0, lo.abs() % half, lo) if fmt.is_fp8 else lo
        shard.lo = to_groups(lo.to(fmt.lo_dtype), start).flatten()
    spread = torch.exp(2 * torch.randn(groups, 1, generator=generator))
    m = torch.randn(groups, GROUP, generator=generator) * spread * 1e-4
    root = m.abs() * (0.5 + 2 * torch.rand(groups, GROUP, generator=generator))
    m[2:3], root[2:3] = 0, 0
    shard.m, shard.m_scale_inv = _stored(quantize_m(_inside(m, numel, start)))
    shard.v, shard.v_scale_inv = _stored(quantize_root(_inside(root, numel, start)))
    return shard


def make_grad(shard: AdamShard, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """A gradient on CPU: a range per group, zeros in the third group; zeros, subnormals and one outlier elsewhere."""
    generator = torch.Generator().manual_seed(1000 + seed)
    spread = torch.exp(2 * torch.randn(shard.num_groups, 1, generator=generator))
    groups = torch.randn(shard.num_groups, GROUP, generator=generator) * spread * 1e-4
    flat = from_groups(groups, shard.numel, shard.start).clone()
    flat[5::97] = 0
    flat[6::101] = 1e-39
    flat[7::103] = -3e-23
    flat[8:9] = 30.0
    groups = to_groups(flat, shard.start)
    groups[2:3] = 0
    return from_groups(groups, shard.numel, shard.start).to(dtype)


def hyper_row(
    step: int, betas: tuple[float, float], eps: float, bound: float, lr: float = 1.0, decay: float = 1.0
) -> Tensor:
    """Numbers of step `step` of one group, float32 [1, Hyper.WIDTH]."""
    beta1, beta2 = betas
    row = torch.zeros(1, Hyper.WIDTH)
    row[0, Hyper.LR], row[0, Hyper.DECAY] = lr, decay
    row[0, Hyper.BETA1], row[0, Hyper.ONE_MINUS_BETA1] = beta1, 1 - beta1
    row[0, Hyper.BETA2], row[0, Hyper.ONE_MINUS_BETA2] = beta2, 1 - beta2
    row[0, Hyper.EPS], row[0, Hyper.BOUND] = eps * (1 - beta1**step), bound
    row[0, Hyper.ROOT_FACTOR] = (1 - beta1**step) * (1 - beta2**step) ** -0.5
    return row


def make_inputs(step: int = 3, *, decoupled: bool = True, seed: int = 11, device: str = "cpu") -> StepInputs:
    """Numbers of step `step`; scales stay, double, halve or grow by four."""
    row = hyper_row(step, (_BETA1, _BETA2), 1e-8, 1.165, 1e-3, 1 - 1e-4 if decoupled else 0.1)
    scale_inv = 2.0 ** torch.tensor([-14.0, -12, -13, -11])
    change = 2.0 ** torch.tensor([0.0, 1, -1, 2])
    return StepInputs(
        hyper=row.to(device),
        step=torch.tensor([step], device=device),
        grad_scale=torch.tensor(0.7, device=device),
        skip=torch.zeros((), dtype=torch.int32, device=device),
        scale_inv=scale_inv.to(device),
        next_scale_inv=(scale_inv * change).to(device),
        amax=torch.zeros(NUM_SCALES, device=device),
        seed=seed,
        decoupled=decoupled,
    )


def make_fallen_scale(factor: float, device: str = "cpu") -> tuple[AdamShard, Tensor, StepInputs]:
    """Masters near zero whose scale falls by `factor` in this step, as that of a weight that starts with zeros."""
    shard = make_shard(BY_NAME["e4m11"], 4096, 0)
    assert shard.lo is not None
    shard.hi &= 0x80
    shard.lo.remainder_(3)
    shard.lo.abs_()
    inputs = make_inputs(device=device)
    inputs.next_scale_inv = inputs.scale_inv * factor
    return clone_shard(shard, device), make_grad(shard, torch.bfloat16).to(device), inputs


def clone_shard(shard: AdamShard, device: str | torch.device = "cpu") -> AdamShard:
    """The same with tensors of its own."""
    clone = copy.copy(shard)
    for name in STATE:
        value = getattr(shard, name)
        setattr(clone, name, None if value is None else value.detach().clone().to(device))
    return clone


def differences(a: AdamShard, b: AdamShard) -> list[str]:
    """Names of state tensors whose bytes differ, with how many elements do."""
    found = []
    for name in STATE:
        x, y = getattr(a, name), getattr(b, name)
        if x is not None:
            x, y = x.cpu().contiguous(), y.cpu().contiguous()
            count = int((x.view(torch.uint8) != y.view(torch.uint8)).view(x.numel(), -1).any(1).sum()) if len(x) else 0
            if x.dtype != y.dtype or count:
                found.append(f"{a.name}.{name}: {count} of {x.numel()}")
    return found


def _inside(groups: Tensor, numel: int, start: int) -> Tensor:
    return to_groups(from_groups(groups, numel, start), start)


def _stored(quantized: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return quantized[0].flatten().clone(), quantized[1].clone()


def state_bytes(shards: Sequence[AdamShard]) -> dict[str, int]:
    """Bytes of the low parts, the moments, and their scales, as they are in memory."""
    return {
        "master": sum(s.lo.nbytes for s in shards if s.lo is not None),
        "moments": sum(s.m.nbytes + s.v.nbytes for s in shards),
        "moment_scales": sum(s.m_scale_inv.nbytes + s.v_scale_inv.nbytes for s in shards),
    }
