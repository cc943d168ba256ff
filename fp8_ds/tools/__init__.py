"""What the commands of `fp8-ds` do; `estimate` for use in Python, too."""

from fp8_ds.tools import estimate

__all__ = ["estimate"]
