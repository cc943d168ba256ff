"""JSON of files and arguments that users name."""

from __future__ import annotations

import json
import math
from typing import Any


def parse(text: str, **hooks: Any) -> Any:
    """Parse JSON, with a ValueError for every text that `json.loads` cannot read.

    Args:
        hooks: keyword arguments of `json.loads`.

    Raises:
        json.JSONDecodeError: the text is no JSON, or nested too deeply (Python's own error is a RecursionError).
        ValueError: an integer has more digits than Python reads.
    """
    try:
        return json.loads(text, **hooks)
    except RecursionError as error:
        raise json.JSONDecodeError("Brackets nested too deeply", text, 0) from error


def finite_or_none(value: float | None) -> float | None:
    """Return `value`, or None if it is NaN or infinite, for which JSON has no word."""
    return value if value is not None and math.isfinite(value) else None
