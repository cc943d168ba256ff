"""What tests and benchmarks share: metrics and inputs."""

from fp8_ds.testing.inputs import MANY_SCALES, many_scales
from fp8_ds.testing.metrics import assert_bitwise, sqnr_db

__all__ = ["MANY_SCALES", "assert_bitwise", "many_scales", "sqnr_db"]
