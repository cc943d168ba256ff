"""A pickle that executes what it names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Hostile:
    """Makes the folder `mark` when a pickle of it is loaded."""

    def __init__(self, mark: Path | str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.makedirs, (str(self.mark), 0o777, True)
