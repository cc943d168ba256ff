"""Which linears are large enough to gain from FP8."""

from __future__ import annotations

MIN_NUMEL = 1 << 22
"""Elements of the smallest weight that gains.

On an H200, with 8,192 tokens, bf16's time over FP8's is 1.01 to 1.26 for weights of 1024 x 4096 and 2048 x 2048, by the
recipe (`tensorwise`: 1.09 and 1.18), and 0.72 to 1.04 for those of 768 x 3072. Measured was one linear, forward and
backward, on the device; source: benchmarks/results/2026-11-23-layer-table.md.
"""


def fp8_pays(out_features: int, in_features: int) -> bool:
    """Whether a linear of this size takes the device less time in FP8 than in bf16, casts and transposes included.

    A rule of thumb: fewer tokens than 8,192 move the tie to larger weights, a fused producer or a shared input to
    smaller ones.

    Args:
        out_features, in_features: of one rank's weight.
    """
    return out_features * in_features >= MIN_NUMEL
