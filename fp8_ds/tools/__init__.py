"""Work of the `fp8-ds` commands; `estimate` is for use in Python, too."""

from fp8_ds.tools import estimate

__all__ = ["estimate"]
