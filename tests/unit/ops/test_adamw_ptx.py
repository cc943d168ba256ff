"""PTX of the Adam kernel that is integer arithmetic, read line by line on the CPU: it has the plain formulas' bits."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fp8_ds.numerics.moments import GROUP, quantize_m, quantize_root

Words = npt.NDArray[np.uint32]
NUM_GROUPS = 64


def prmt(a: Words, b: Words, selector: Words) -> Words:
    """Four bytes of b:a, each by a nibble of the selector; no sign is replicated."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros_like(both)
    for byte in range(4):
        chosen = (int(selector[0]) >> (4 * byte)) & 0xF
        assert chosen < 8
        result |= ((both >> np.uint64(8 * chosen)) & np.uint64(0xFF)) << np.uint64(8 * byte)
    return result.astype(np.uint32)


def lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    """The function of three bits whose value for a, b and c is bit 4 a + 2 b + c of the table."""
    result = np.zeros_like(a)
    for case in range(8):
        if (int(table[0]) >> case) & 1:
            result |= (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
    return result


OPERATORS: dict[str, Callable[..., Words]] = {
    "add.u32": lambda a, b: a + b,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": lop3,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "prmt.b32": prmt,
    "shr.u32": lambda a, b: a >> b,
}


def run(text: str, inputs: dict[int, Words]) -> dict[int, Words]:
    """Registers $n after a block. An output is written once, and never before an input that shares its register might
    be read: inputs stay what they were."""
    registers: dict[str, Words] = {f"${number}": words for number, words in inputs.items()}
    size = len(next(iter(inputs.values())))
    lines = [line.strip().rstrip(";") for line in text.strip().strip("{}").splitlines()]
    for line in filter(None, lines):
        if line.startswith(".reg"):
            continue
        name, _, rest = line.partition(" ")
        to, *sources = (operand.strip() for operand in rest.split(","))
        values = [
            registers[source] if source in registers else np.full(size, int(source, 0), np.uint32) for source in sources
        ]
        assert not (re.fullmatch(r"\$\d+", to) and to in registers), f"{to} is written over"
        registers[to] = OPERATORS[name](*values)
    return {int(name[1:]): words for name, words in registers.items() if name.startswith("$")}


@pytest.mark.parametrize("sigma", [0.0, 1.0, 4.0, 12.0])
def test_codes_of_moments_are_those_of_the_plain_formulas(sigma: float) -> None:
    """From groups of alike numbers to such that span all of float32, zeros of both signs among them."""
    pytest.importorskip("triton")
    from fp8_ds.ops.adamw.arithmetic import ENCODE_MOMENTS

    generator = torch.Generator().manual_seed(round(sigma))
    shape = (NUM_GROUPS, GROUP)
    spread = torch.exp(sigma * torch.randn(shape, generator=generator)) * 1e-4
    m = torch.randn(shape, generator=generator) * spread
    m[0, :4], m[1], m[2, ::2] = torch.tensor([0.0, -0.0, 3e-38, -3e-38]), 0.0, -0.0
    root = torch.randn(shape, generator=generator).abs() * spread
    random = torch.randint(0, 1 << 16, shape, generator=generator, dtype=torch.int32)
    random[3], random[4] = 0, 0xFFFF
    noise = (random & 0xFFF0) >> 4
    m_codes, m_scale_inv = quantize_m(m, noise)
    root_codes, root_scale_inv = quantize_root(root, noise)

    def scaled(x: torch.Tensor, scale_inv: torch.Tensor) -> list[Words]:
        from fp8_ds.numerics.moments import _group_scale

        down = (x * _group_scale(scale_inv)[:, None]) * 2.0**-120
        return list(down.view(torch.int32).numpy().view(np.uint32).reshape(-1, 4).T)

    halves = random.numpy().view(np.uint32).reshape(-1, 2)
    pairs = (halves[:, 0] | (halves[:, 1] << np.uint32(16))).reshape(-1, 2)
    inputs = dict(enumerate([*scaled(m, m_scale_inv), *scaled(root, root_scale_inv)], start=2))
    inputs |= {10: pairs[:, 0], 11: pairs[:, 0], 12: pairs[:, 1], 13: pairs[:, 1]}
    found = run(ENCODE_MOMENTS, inputs)
    for number, codes in ((0, m_codes), (1, root_codes)):
        expected = codes.numpy().reshape(-1, 4).view(np.uint32).ravel()
        np.testing.assert_array_equal(found[number], expected)
