"""Real text for a trial, without a download: the Python standard library's sources, in Megatron's indexed format.

    python examples/megatron/prepare_data.py OUTPUT_FOLDER [--megatron-path CLONE]

Tokens are bytes, and 256 after a document. OUTPUT_FOLDER/{train,held_out}.{bin,idx} are for `--train-data-path` and
`--valid-data-path`, with `--tokenizer-type NullTokenizer --vocab-size 257` (core 0.16 adds one for the end by itself,
0.19 does not). For text of your own use tools/preprocess_data.py of your clone.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import numpy
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "deepspeed"))
from data import read_stdlib

END_OF_DOCUMENT = 256
DOCUMENT = 1 << 16


def write(split: str, folder: Path) -> int:
    """One split as documents of 64 KiB; returns its tokens."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(folder / f"{split}.bin"), dtype=numpy.uint16)
    text = read_stdlib(split)
    end = torch.tensor([END_OF_DOCUMENT], dtype=torch.int32)
    for document in text.split(DOCUMENT):
        builder.add_document(torch.cat([document.int(), end]), [len(document) + 1])
    builder.finalize(str(folder / f"{split}.idx"))
    return len(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megatron-path", default=os.environ.get("MEGATRON_LM_PATH"))
    args = parser.parse_args()
    if args.megatron_path:
        sys.path.insert(0, args.megatron_path)
    args.folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "held_out"):
        print(f"{args.folder / split}: {write(split, args.folder):,} tokens")


if __name__ == "__main__":
    main()
