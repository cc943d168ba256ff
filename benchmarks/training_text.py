"""Real text that a machine has, as tokens: sources and documents of the Python installation, held out by package; and
windows of it in the order of a seed.

Nothing is downloaded. The tokens are a byte-pair encoding trained on the spot (package `tokenizers`), or bytes. The
same installation gives the same tokens; `digest` says whether two machines had the same.
"""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

SUFFIXES = frozenset((".py", ".pyi", ".rst", ".md", ".txt", ".h", ".hpp", ".cuh", ".cu", ".inl", ".c", ".cpp"))
MIN_BYTES, MAX_BYTES = 256, 400_000
MAX_BYTES_PER_LINE = 200
"""More on average is a table or minified, not text."""
HELD_OUT_SHARE, LARGEST_HELD_OUT = 0.03, 0.01
"""Share of the text that is held out; a package larger than the second share is never."""
BPE_TRAINING_BYTES = 48_000_000
CHUNK = 2048
"""Documents encoded at a time."""


@dataclass(frozen=True)
class Text:
    """What was found, duplicates removed, and how it was split.

    Args:
        vocabulary: "bpe" or "bytes".
        num_train, num_held_out: tokens.
        held_out: names of the packages held out.
        digest: of all tokens, in order.
    """

    vocabulary: str
    num_bytes: int
    num_files: int
    num_packages: int
    num_train: int
    num_held_out: int
    held_out: tuple[str, ...]
    digest: str

    def describe(self) -> str:
        per_token = self.num_bytes / (self.num_train + self.num_held_out)
        return (
            f"{self.num_bytes / 1e6:.0f} MB in {self.num_files:,} files of {self.num_packages} packages; "
            f"{self.vocabulary}, {per_token:.2f} bytes/token; {self.num_train / 1e6:.1f} M training tokens, "
            f"{self.num_held_out / 1e6:.2f} M held out ({len(self.held_out)} packages); digest {self.digest}"
        )


def text_roots() -> list[Path]:
    """Folders of the installation: standard library, packages, headers, documents. Not what PYTHONPATH adds."""
    paths = sysconfig.get_paths()
    roots = [Path(paths[key]) for key in ("stdlib", "purelib", "platlib")] + [Path(torch.__file__).parents[1]]
    roots += [Path(sys.base_prefix, "include"), Path(sys.base_prefix, "share", "doc")]
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME:
        roots.append(Path(CUDA_HOME, "include"))
    found = dict.fromkeys(root.resolve() for root in roots if root.is_dir())
    return [root for root in found if not any(other in root.parents for other in found)]


def find_documents(roots: Iterable[Path]) -> list[tuple[str, str, bytes]]:
    """(package, name, content) in a fixed order, each content once.

    The package is the first folder below a root (of the standard library also: the file's own name), below
    "site-packages" or "dist-packages" the next one.
    """
    paths: list[tuple[str, str, Path]] = []
    for number, root in enumerate(roots):
        for path in root.rglob("*"):
            if path.suffix in SUFFIXES:
                parts = [part for part in path.relative_to(root).parts if not part.endswith("-packages")]
                paths.append((Path(parts[0]).stem.split("-")[0].lower(), f"{number}/{'/'.join(parts)}", path))
    paths.sort(key=lambda row: row[:2])
    with ThreadPoolExecutor(16) as pool:
        contents = list(pool.map(lambda row: _read(row[2]), paths))
    seen: set[bytes] = set()
    documents = []
    for (package, name, _), content in zip(paths, contents, strict=True):
        if content is None:
            continue
        key = hashlib.blake2b(content, digest_size=16).digest()
        if key not in seen:
            seen.add(key)
            documents.append((package, name, content))
    return documents


def _read(path: Path) -> bytes | None:
    try:
        if not MIN_BYTES <= path.stat().st_size <= MAX_BYTES:
            return None
        content = path.read_bytes()
        content.decode()
    except (OSError, UnicodeDecodeError):
        return None
    return content if len(content) <= MAX_BYTES_PER_LINE * (content.count(b"\n") + 1) else None


def choose_held_out(documents: Iterable[tuple[str, str, bytes]]) -> tuple[str, ...]:
    """Whole packages, in the order of their names' CRC, until they are `HELD_OUT_SHARE` of the text."""
    size: dict[str, int] = {}
    for package, _, content in documents:
        size[package] = size.get(package, 0) + len(content)
    total, chosen = sum(size.values()), []
    left = HELD_OUT_SHARE * total
    for package in sorted(size, key=lambda name: (zlib.crc32(name.encode()), name)):
        if left > 0 and size[package] <= LARGEST_HELD_OUT * total:
            chosen.append(package)
            left -= size[package]
    return tuple(sorted(chosen))


def prepare(
    cache: Path, vocabulary: str, vocab_size: int, needed_tokens: int, max_bytes: int | None = None
) -> tuple[Text, Path]:
    """Tokens of this machine's text, made once per `cache` folder.

    Args:
        cache: for `train.npy`, `held_out.npy` (uint16) and `text.json`.
        vocabulary: "bpe" or "bytes".
        vocab_size: of the BPE.
        needed_tokens: of training text, unique.
        max_bytes: of text; for dry runs.

    Raises:
        SystemExit: there is too little text.
    """
    about = cache / "text.json"
    if about.exists():
        found = json.loads(about.read_text())  # of before 2026-11-28 with more keys
        text = Text(**{key: found[key] for key in Text.__annotations__})
        return _enough(replace(text, held_out=tuple(text.held_out)), needed_tokens), cache
    cache.mkdir(parents=True, exist_ok=True)
    documents = find_documents(text_roots())
    if max_bytes is not None:  # about as many, from all packages
        documents = documents[:: max(1, sum(len(content) for _, _, content in documents) // max_bytes)]
    chosen = set(choose_held_out(documents))
    train = [content for package, _, content in documents if package not in chosen]
    held_out = [content for package, _, content in documents if package in chosen]
    num_train = sum(map(len, train))
    tokens = _bpe(train, held_out, vocab_size) if vocabulary == "bpe" else (_as_bytes(train), _as_bytes(held_out))
    digest = hashlib.blake2b(digest_size=8)
    for name, array in zip(("train", "held_out"), tokens, strict=True):
        np.save(cache / f"{name}.npy", array)
        digest.update(array.data)
    text = Text(
        vocabulary,
        num_train + sum(map(len, held_out)),
        len(documents),
        len({package for package, _, _ in documents}),
        len(tokens[0]),
        len(tokens[1]),
        tuple(sorted(chosen)),
        digest.hexdigest(),
    )
    about.write_text(json.dumps(asdict(text)))
    return _enough(text, needed_tokens), cache


def _enough(text: Text, needed_tokens: int) -> Text:
    if text.num_train < needed_tokens:
        raise SystemExit(
            f"text: expected at least {needed_tokens:,} training tokens (two epochs are the limit), got "
            f"{text.describe()}. Take fewer --steps, or more --text-bytes."
        )
    return text


def _as_bytes(documents: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"\n".join(documents), np.uint8).astype(np.uint16)


def _bpe(train: list[bytes], held_out: list[bytes], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Byte-level BPE with GPT-2's splitting, trained on training text only; token 0 ends a document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    every = max(1, sum(map(len, train)) // BPE_TRAINING_BYTES)
    tokenizer.train_from_iterator((content.decode() for content in train[::every]), trainer)

    def encoded(documents: list[bytes]) -> Iterator[np.ndarray]:
        for first in range(0, len(documents), CHUNK):
            texts = [content.decode() for content in documents[first : first + CHUNK]]
            for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                yield np.array([*encoding.ids, 0], dtype=np.uint16)

    return np.concatenate(list(encoded(train))), np.concatenate(list(encoded(held_out)))


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
