"""Masters decoded on CUDA against the reference on the CPU, bit for bit, and by which way."""

import pytest
import torch
from support.masters import every_master

from fp8_ds.numerics.masters import BY_NAME, decode
from fp8_ds.ops import adamw
from fp8_ds.ops.adamw import decode_master
from fp8_ds.testing import assert_bitwise

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

SPLIT = [fmt for fmt in BY_NAME.values() if fmt.is_split]


@pytest.mark.parametrize("cut", [0, 1, 16], ids=lambda cut: f"from {cut}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("fmt", SPLIT, ids=lambda fmt: fmt.name)
def test_kernel_equals_cpu_reference_bitwise(fmt, dtype, cut, monkeypatch):
    hi, lo = (x[cut:] for x in every_master(fmt))
    scale_inv = torch.tensor(2.0**-140) if fmt.is_fp8 else None
    expected = decode(hi, lo, fmt, scale_inv).to(dtype)
    monkeypatch.setattr(adamw, "decode", None)  # not by torch's operators
    memory = torch.full((len(hi) + cut + 1,), 7, dtype=dtype, device="cuda")
    hi, lo = (torch.cat([x.new_zeros(cut), x]).cuda()[cut:] for x in (hi, lo))
    decode_master(hi, lo, fmt, None if scale_inv is None else scale_inv.cuda(), memory[cut:-1])
    assert_bitwise(memory[cut:-1].cpu(), expected)
    assert memory[:cut].tolist() == [7] * cut and memory[-1] == 7


def test_masters_elsewhere_go_by_torchs_operators():
    fmt = BY_NAME["e4m11"]
    hi, lo = (x.cuda() for x in every_master(fmt))
    scale_inv, out = torch.tensor(0.5, device="cuda"), torch.empty(len(hi))
    decode_master(hi, lo, fmt, scale_inv, out)
    assert_bitwise(out, decode(hi.cpu(), lo.cpu(), fmt, scale_inv.cpu()))
    strided = torch.empty(len(hi), 2, device="cuda")[:, 0]
    decode_master(hi, lo, fmt, scale_inv, strided)
    assert_bitwise(strided.cpu(), out)
