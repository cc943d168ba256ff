"""Counts on CUDA are the CPU's, and nobody waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fp8_ds.numerics.formats import E4M3, E5M2, Float8Format
from fp8_ds.ops.observe import new_counts, observe_codes, observe_hp

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.fixture
def no_waiting() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def scales(kind: str, num_rows: int, num_cols: int) -> Tensor:
    blocks = -(-num_cols // 128)
    shape = {"one": (), "rows": (num_rows, 1), "blocks": (num_rows, blocks), "squares": (-(-num_rows // 128), blocks)}
    return torch.exp2(torch.randint(-6, 7, shape[kind]).float())


def count(x: Tensor, codes: Tensor, scale_inv: Tensor, limits: list[Tensor | None], fp8_max: float) -> Tensor:
    counts = new_counts(device=x.device)
    for limit in limits:
        observe_hp(x, counts, limit, fp8_max)
        observe_codes(codes, scale_inv, counts, can_saturate=True)
        observe_codes(codes, scale_inv, counts, can_saturate=True)
    return counts


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("kind", ["one", "rows", "blocks", "squares"])
@pytest.mark.parametrize("shape", [(4096, 2048), (1000, 1408), (77, 333), (300, 129)], ids=str)
def test_counts_are_the_cpus(shape: tuple[int, int], kind: str, fmt: Float8Format, no_waiting: None) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).bfloat16() * 100
    x[3], x[5, 7] = 0.0, 1e30
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    codes[(codes & 0x7F) > (0x7E if fmt is E4M3 else 0x7B)] = 1
    scale_inv, bound = scales(kind, *shape), torch.tensor(0.3)
    on_cuda = x.cuda(), codes.view(fmt.dtype).cuda(), scale_inv.cuda(), [None, bound.cuda()], fmt.max
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    found = count(*on_cuda)
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found.cpu(), count(x, codes.view(fmt.dtype), scale_inv, [None, bound], fmt.max))
    assert found[2] == 4 * codes.numel() and found[3] > 0
    assert found[5] == 2 * int((x == 0).sum()) >= 2 * shape[1]


def test_what_is_not_finite_and_what_is_not_contiguous_is_counted_too() -> None:
    x = torch.randn(300, 400).bfloat16()
    x[200, 300] = float("nan")
    codes = x.to(E4M3.torch_dtype)
    for part in (lambda y: y, lambda y: y.t(), lambda y: y[:, ::2]):
        found, expected = (
            count(part(x.to(device)), part(codes.to(device)), torch.ones((), device=device), [None], 0.0).cpu()
            for device in ("cuda", "cpu")
        )
        assert torch.equal(found.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))
        assert found[0].isnan() and found[6].isnan()
