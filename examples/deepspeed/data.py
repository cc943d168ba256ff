"""Text that every machine has: the source files of the Python standard library, as bytes."""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT_ONE_IN = 10
# Third-party packages differ from machine to machine; the library's own tests hold large generated tables.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# Build variables of this Python, on Debian in two files that are alike.
SKIPPED_PREFIX = "_sysconfigdata"


def read_stdlib(split: str) -> Tensor:
    """The bytes of one split, uint8 [num_bytes], files in sorted order.

    A whole package is either trained on or held out (one in ten, by the CRC of its name), so no held-out file has
    a sibling in the training split.

    Args:
        split: "train" or "held_out".
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if SKIPPED_FOLDERS.isdisjoint(parts) and not parts[-1].startswith(SKIPPED_PREFIX):
            held_out = zlib.crc32(Path(parts[0]).stem.encode()) % HELD_OUT_ONE_IN == 0
            if held_out == (split == "held_out"):
                files.append(path)
    files.sort(key=lambda path: path.relative_to(root).as_posix())
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def sample_batch(text: Tensor, batch_size: int, seq_len: int, seed: int, index: int) -> Tensor:
    """Random windows, int64 [batch_size, seq_len + 1], that depend on (seed, index) only.

    Number the micro-batches of all ranks with `index`: then resuming, or another number of ranks, sees the same data.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_000_007 + index)
    starts = torch.randint(len(text) - seq_len, (batch_size, 1), generator=generator)
    return text[starts + torch.arange(seq_len + 1)].long()
