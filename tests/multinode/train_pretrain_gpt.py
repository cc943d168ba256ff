"""Run by torchrun: pretrain_gpt.py of the clone that $MEGATRON_LM_PATH names, through megatron_patches.pretrain_gpt.

    torchrun train_pretrain_gpt.py --cases CASES.json --out DIR

One case, for Megatron trains once a process: {"name", "words": its arguments}. DIR/<name>-rank<r>.json: `text`, all
that this rank wrote to its standard output, and `cable`, bytes that its host sent and received.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from hosts import cable_bytes

from megatron_patches.pretrain_gpt import main as pretrain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    (case,) = json.loads(args.cases.read_text())
    sys.argv = ["pretrain_gpt", *case["words"]]
    before, said = cable_bytes(), io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            pretrain()
    finally:
        print(said.getvalue())
    found = {"text": said.getvalue(), "cable": cable_bytes() - before}
    (args.out / f"{case['name']}-rank{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
