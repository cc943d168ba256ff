"""What tests and benchmarks share: metrics and inputs."""

from fp8_ds.testing.inputs import MANY_SCALES, many_scales
from fp8_ds.testing.metrics import assert_bitwise, sqnr_db

HANG = 900.0
"""Seconds after which tests call hung what must merely end: a start takes minutes on a slow machine that is busy."""

__all__ = ["HANG", "MANY_SCALES", "assert_bitwise", "many_scales", "sqnr_db"]
