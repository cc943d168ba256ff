"""What test folders share: inputs, ranks that stay up, peak memory, kernels in Triton's interpreter."""

from support.inputs import MANY_SCALES, many_scales

HANG = 900.0
"""Seconds after which tests call hung what must merely end: a start takes minutes on a slow machine that is busy."""

__all__ = ["HANG", "MANY_SCALES", "many_scales"]
