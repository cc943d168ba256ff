"""Bytes of Python's own library as training text: real, everywhere, and not downloaded."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

NUM_HELD_OUT = 256


class Windows(torch.utils.data.Dataset):
    """Windows of bytes; every tenth file is held out."""

    def __init__(self, seq_len: int, held_out: bool = False, num_files: int = 60) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:num_files]
        chosen = files[::10] if held_out else [file for number, file in enumerate(files) if number % 10]
        data = bytearray().join(file.read_bytes() for file in chosen)
        if held_out:
            del data[NUM_HELD_OUT * seq_len :]
        self.tokens = torch.frombuffer(data, dtype=torch.uint8)
        self.seq_len = seq_len

    def __len__(self) -> int:
        return len(self.tokens) // self.seq_len

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.tokens[index * self.seq_len : (index + 1) * self.seq_len].long()
        return {"input_ids": window, "labels": window}
