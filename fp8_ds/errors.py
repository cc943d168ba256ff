"""Errors a user can meet. Each message reads "<expected>, got <value>. <what to do>."."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class Fp8DsError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(Fp8DsError, ValueError):
    """The "fp8" block, or its combination with the rest of the configuration or the model, is wrong."""


class ModelError(ConfigError):
    """Code of the user's own model raised an error, which is the cause and has the traceback to read."""


class UnsupportedError(Fp8DsError, ValueError):
    """A DeepSpeed feature is on that FP8 ZeRO does not support; the message names the key and the remedy."""


class SeamError(Fp8DsError, RuntimeError):
    """The installed DeepSpeed or Megatron lacks a symbol that we rely on, or has it with another signature."""


class CheckpointError(Fp8DsError, RuntimeError):
    """A checkpoint could not be written whole, or the one to be loaded is torn, damaged, or of another run."""


@contextmanager
def refusals_without_traceback() -> Iterator[None]:
    """Print only the message of a refusal inside, as the last line of a rank, and end the rank with status 2.

    Under a launcher every rank is refused alike: as many tracebacks would bury the remedy. Other errors keep theirs.

    Raises:
        SystemExit: in place of ConfigError, UnsupportedError, SeamError and CheckpointError.
    """
    try:
        yield
    except (ConfigError, UnsupportedError, SeamError, CheckpointError) as error:
        print(f"[rank {os.environ.get('RANK', 0)}] {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
