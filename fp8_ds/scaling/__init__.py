"""From the largest magnitude of a tensor (amax) to the factor that brings it into FP8: `x_fp8 = cast(x * scale)`."""

from fp8_ds.scaling.current import scale_from_amax, scale_vector
from fp8_ds.scaling.delayed import AmaxHistory

__all__ = ["AmaxHistory", "scale_from_amax", "scale_vector"]
