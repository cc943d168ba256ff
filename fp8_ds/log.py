"""The logger "fp8_ds": what a run tells its user, shown by default.

`logging.getLogger("fp8_ds").setLevel(logging.WARNING)` leaves problems only. Where the root logger has handlers, lines
go to these alone.
"""

from __future__ import annotations

import logging
import sys
from functools import cache

logger = logging.getLogger("fp8_ds")


class _ToStdout(logging.StreamHandler):  # type: ignore[type-arg]  # no generic class before Python 3.11
    """Handler that writes lines where DeepSpeed's go, and leaves them to the root logger's handlers if it has any."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers:
            self.stream = sys.stdout  # that of now: it may have been replaced
            super().emit(record)  # a stream that is closed ends no training


def _set_up() -> None:
    """Show lines from INFO on, unless the user has set another level or a handler of his own."""
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.handlers:
        handler = _ToStdout()
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [%(name)s] %(message)s"))
        logger.addHandler(handler)


_set_up()


@cache
def warn_once(line: str) -> None:
    """Log a warning the first time that this process has it."""
    logger.warning(line)
