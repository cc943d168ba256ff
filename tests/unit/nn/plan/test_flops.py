"""The rule of sizes, against the measurements that it is made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fp8_ds.nn.plan.flops import MIN_MACS, SizeRule

TABLE = Path(__file__).parents[4] / "benchmarks/results/2026-11-29-linear-sizes.json"
COLUMN = {"compiled": "gpu_us", "eager": "eager_us"}
LEAST = {"compiled": 1.0, "eager": 0.93}
"""Least ratio of bf16's time to FP8's. In eager mode the tie itself is in FP8, and times of a host vary by 20 %."""


def ratios(mode: str, gains: bool) -> dict[tuple[Any, ...], float]:
    """bf16's time over FP8's of the cells that the rule puts into FP8, or of the others; one for each recipe."""
    rule = SizeRule.of(None, is_compiled=mode == "compiled")
    found = {}
    for cell in json.loads(TABLE.read_text())["cells"]:
        size, times = (cell["tokens"], cell["in"], cell["out"]), cell[COLUMN[mode]]
        if rule.gains(*size) == gains:
            found.update({(*size, recipe): times["bf16"] / times[recipe] for recipe in ("delayed", "tensorwise")})
    return found


@pytest.mark.parametrize("mode", MIN_MACS)
def test_no_linear_that_the_rule_puts_into_fp8_is_slower_there(mode: str) -> None:
    in_fp8 = ratios(mode, True)
    slower = {size: ratio for size, ratio in in_fp8.items() if ratio < 1}
    assert len(in_fp8) > 60 and min(in_fp8.values()) >= LEAST[mode]
    assert all(tokens * rows * columns < 1.01 * MIN_MACS[mode] for tokens, rows, columns, _ in slower)


@pytest.mark.parametrize("mode", MIN_MACS)
def test_no_linear_that_the_rule_leaves_in_bf16_would_gain_a_fifth(mode: str) -> None:
    left = ratios(mode, False)
    assert len(left) > 60 and max(left.values()) < 1.2


def test_a_number_is_the_multiply_adds_alone_and_0_is_everything() -> None:
    assert SizeRule.of(0, is_compiled=False).gains(1, 1, 1)
    rule = SizeRule.of(6000, is_compiled=True)
    assert rule.gains(10, 1, 600) and rule.gains(600, 10, 1) and not rule.gains(10, 1, 599)


@pytest.mark.parametrize("min_size", [None, 1_000_000])
@pytest.mark.parametrize("tokens", [1, 132, 8192, 1 << 20])
def test_the_width_that_is_named_is_the_least_square_that_gains(min_size: int | None, tokens: int) -> None:
    rule = SizeRule.of(min_size, is_compiled=False)
    width = rule.least_square(tokens)
    assert rule.gains(tokens, width, width) and not rule.gains(tokens, width - 1, width - 1)


def layers(num: int, tokens: int, **features: tuple[int, int]) -> dict[str, tuple[int, int, int]]:
    return {f"layers.{i}.{name}": (tokens, *sizes) for i in range(num) for name, sizes in features.items()}


LLAMA_8B = {"q": (4096, 4096), "k": (4096, 1024), "gate": (4096, 14336), "down": (14336, 4096)}
OF_2048 = {"q": (2048, 2048), "k": (2048, 512), "gate": (2048, 5632), "down": (5632, 2048)}


def test_large_linears_of_a_compiled_model_hide_the_host_time_of_small_ones() -> None:
    compiled, eager = (SizeRule.of(None, is_compiled=is_compiled) for is_compiled in (True, False))
    assert compiled.too_small(layers(2, 8192, **LLAMA_8B)) == set()
    assert eager.too_small(layers(2, 8192, **LLAMA_8B)) == {"layers.0.k", "layers.1.k"}
    assert compiled.too_small(layers(2, 8192, **OF_2048)) == layers(2, 8192, **OF_2048).keys()


def test_the_smallest_linears_of_a_compiled_model_are_left_out_first_and_in_all_layers_alike() -> None:
    rule, sizes = SizeRule.of(None, is_compiled=True), layers(3, 20000, **OF_2048)
    assert rule.too_small(sizes) == {f"layers.{i}.k" for i in range(3)}
    sizes = {name: (10000, *features) for name, (_, *features) in sizes.items()}
    assert rule.too_small(sizes) == {f"layers.{i}.{name}" for i in range(3) for name in "qk"}
    assert rule.too_small({}) == set() and SizeRule.of(6000, is_compiled=True).too_small(sizes) == set()
