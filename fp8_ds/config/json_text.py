"""JSON of files and arguments that users name."""

from __future__ import annotations

import json
import math
from typing import Any


def parse(text: str, **hooks: Any) -> Any:
    """`json.loads`, with a ValueError for every text that it cannot read.

    Args:
        hooks: as `json.loads` takes them.

    Raises:
        json.JSONDecodeError: it is no JSON, or nested too deeply, for which Python has a RecursionError.
        ValueError: an integer has more digits than Python reads.
    """
    try:
        return json.loads(text, **hooks)
    except RecursionError as error:
        raise json.JSONDecodeError("Brackets nested too deeply", text, 0) from error


def finite_or_none(value: float | None) -> float | None:
    """None where the value is NaN or infinite, for which JSON has no word."""
    return value if value is not None and math.isfinite(value) else None
