"""Text as tokens in two files, and windows of these in an order that only the seed decides."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fp8_ds import json_text
from fp8_ds.errors import ConfigError
from fp8_ds.parity.folder import write_whole

SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")
HELD_OUT_ONE_IN = 50
"""Documents; of fewer documents than this, the last part of the stream."""


class Windows:
    """Non-overlapping windows of a token stream on one device, in an order that only the seed decides.

    Args:
        path: of a one-dimensional array of unsigned integers.
        seq_len: predicted tokens per window.
    """

    def __init__(self, path: Path, seq_len: int, device: torch.device) -> None:
        tokens = torch.from_numpy(np.load(path).astype(np.int32)).to(device)
        self.num_windows = (tokens.numel() - 1) // seq_len
        self.tokens = tokens
        self.offsets = torch.arange(seq_len + 1, device=device)
        self.seq_len = seq_len

    def order(self, count: int, seed: int) -> torch.Tensor:
        """The first `count` windows of an endless sequence of epochs, each a permutation."""
        epochs = -(-count // self.num_windows)
        generators = [torch.Generator().manual_seed(7919 * seed + epoch) for epoch in range(epochs)]
        return torch.cat([torch.randperm(self.num_windows, generator=g) for g in generators])[:count]

    def batch(self, windows: torch.Tensor) -> torch.Tensor:
        """int64 [len(windows), seq_len + 1]."""
        starts = windows.to(self.tokens.device) * self.seq_len
        return self.tokens[starts[:, None] + self.offsets].long()


@dataclass(frozen=True)
class Tokens:
    """What was read and how it was split.

    Attributes:
        num_train, num_held_out: tokens.
        num_documents: in both.
        digest: of all tokens, in order.
        sources: name and bytes of what was named, and the tokenizer's name, to tell other text in a later call.
    """

    num_train: int
    num_held_out: int
    num_documents: int
    digest: str
    sources: list[Any]


def prepare(
    folder: Path,
    data: Sequence[Path],
    held_out: Sequence[Path],
    tokenizer: str | None,
    vocab_size: int,
    seq_len: int,
    per_evaluation: int = 1,
) -> Tokens:
    """`train.npy`, `held_out.npy` and `text.json` are in the folder; made once.

    Args:
        folder: made where it is missing.
        data: text files, JSON lines with a "text" in each, folders of these, or .npy files of tokens.
        held_out: the same, for evaluation; if empty, one document in 50 is taken from `data`, or its last 2 %.
        tokenizer: folder of a tokenizer of transformers; None: tokens are bytes.
        vocab_size: of the model.
        seq_len: predicted tokens per window.
        per_evaluation: held-out windows that an evaluation needs at least, a micro-batch on each rank.

    Raises:
        ConfigError: there is less text than a window, or than an evaluation needs, a file is no text, a token is
            outside the vocabulary, or the folder has tokens of other text.
        OSError: a file cannot be read.
    """
    about = folder / "text.json"
    sources = [*map(_source, data), *map(_source, held_out), None if tokenizer is None else Path(tokenizer).name]
    if about.exists():
        known = Tokens(**json.loads(about.read_text()))
        # On another machine the text itself may be missing: its tokens are what runs read.
        if all(path.exists() for path in (*data, *held_out)) and known.sources != sources:
            raise ConfigError(
                f"--data: expected {known.sources}, whose tokens are in {folder}, got {sources}. Use another --out."
            )
        _check_windows((known.num_train, known.num_held_out), seq_len, per_evaluation)
        return known
    encode, end = _encoder(tokenizer)
    documents = list(_documents(data, "--data", encode, end))
    others = list(_documents(held_out, "--held-out", encode, end))
    train, rest = (documents, others) if others else _split(documents)
    streams = [_joined(train, vocab_size, "--data"), _joined(rest, vocab_size, "--held-out" if others else "--data")]
    _check_windows([len(stream) for stream in streams], seq_len, per_evaluation)
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.blake2b(digest_size=8)
    for name, stream in zip(("train", "held_out"), streams, strict=True):
        np.save(folder / f"{name}.npy", stream)
        digest.update(stream.data)
    found = Tokens(len(streams[0]), len(streams[1]), len(train) + len(rest), digest.hexdigest(), sources)
    write_whole(about, json.dumps(asdict(found)))
    return found


def _documents(
    paths: Iterable[Path], option: str, encode: Callable[[str], Sequence[int]], end: Sequence[int]
) -> Iterator[np.ndarray]:
    """Tokens of each document, `end` after it; .npy files as they are. `option` has named the paths."""
    for path in paths:
        for file in _files(path):
            if file.suffix == ".npy":
                array = _array(file, option)
                if array.ndim != 1 or array.dtype.kind not in "iu":
                    raise ConfigError(
                        f"{option}: expected one row of integers in {file}, got {array.dtype} {list(array.shape)}. "
                        "Save the tokens of the whole text as one row."
                    )
                yield array
                continue
            for text in _texts(file, option):
                yield np.array([*encode(text), *end], dtype=np.int64)


def _array(file: Path, option: str) -> np.ndarray:
    try:
        with file.open("rb") as stream:  # np.load would also read archives of arrays and ask for trust in pickles
            return np.lib.format.read_array(stream, allow_pickle=False)
    except ValueError as error:  # of EOF, too
        raise ConfigError(
            f"{option}: expected an array in NumPy's format in {file}, got {error}. Write it with np.save."
        ) from error


def _source(path: Path) -> list[Any]:
    """[name, bytes], None for those of a path that is missing."""
    return [path.name, sum(file.stat().st_size for file in _files(path)) if path.exists() else None]


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*") if file.suffix in (*SUFFIXES, ".npy") and file.is_file())


def _texts(file: Path, option: str) -> Iterator[str]:
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix != ".jsonl":
            yield text
            return
        for line in filter(str.strip, text.splitlines()):
            yield str(json_text.parse(line)["text"])
    except (ValueError, KeyError, TypeError) as error:  # of UTF-8, of JSON
        raise ConfigError(
            f'{option}: expected UTF-8 text, or JSON lines with a "text" each, in {file}, got {error!r}. Convert it.'
        ) from error


def _encoder(tokenizer: str | None) -> tuple[Callable[[str], Sequence[int]], list[int]]:
    """What makes tokens of text, and the tokens that end a document."""
    if tokenizer is None:
        return (lambda text: text.encode()), list(b"\n")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            "--tokenizer: expected transformers to be installed, got none. Install the hf extra."
        ) from error
    try:
        loaded: Any = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    except (OSError, ValueError) as error:
        # Of what is no folder transformers says that there is no connection to its hub, which is not asked for.
        why = str(error) if Path(tokenizer).is_dir() else "no such folder, and nothing is downloaded"
        raise ConfigError(
            f"--tokenizer: expected a folder of a tokenizer, got {tokenizer} ({why}). Name it."
        ) from error
    end = [] if loaded.eos_token_id is None else [loaded.eos_token_id]
    return (lambda text: loaded.encode(text, add_special_tokens=False)), end


def _split(documents: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    if len(documents) >= HELD_OUT_ONE_IN:
        held_out = documents[::-HELD_OUT_ONE_IN]
        chosen = {id(document) for document in held_out}
        return [document for document in documents if id(document) not in chosen], held_out
    stream = np.concatenate(documents) if documents else np.empty(0, np.int64)
    cut = len(stream) - len(stream) // HELD_OUT_ONE_IN
    return [stream[:cut]], [stream[cut:]]


def _check_windows(num_tokens: Sequence[int], seq_len: int, per_evaluation: int) -> None:
    for option, num, windows in zip(("--data", "--held-out"), num_tokens, (1, per_evaluation), strict=True):
        if num <= windows * seq_len:
            what = f"{windows} windows of --seq {seq_len}, a micro-batch on each rank"
            what = f"one window of --seq {seq_len}" if windows == 1 else what
            raise ConfigError(
                f"{option}: expected at least {windows * seq_len + 1} tokens, {what}, got {num}. Name more text, or a "
                "shorter --seq."
            )


def _joined(documents: Sequence[np.ndarray], vocab_size: int, option: str) -> np.ndarray:
    stream = np.concatenate(documents) if documents else np.empty(0, np.int64)
    if not len(stream):
        raise ConfigError(f"{option}: expected text, got none. Name files ({', '.join(SUFFIXES)}, .npy) or folders.")
    if stream.min() < 0 or stream.max() >= vocab_size:
        raise ConfigError(
            f"{option}: expected tokens from 0 to {vocab_size - 1}, the model's vocabulary, got {stream.min()} to "
            f"{stream.max()}. Use the model's own --tokenizer."
        )
    return stream.astype(np.uint16 if vocab_size <= 2**16 else np.uint32)
