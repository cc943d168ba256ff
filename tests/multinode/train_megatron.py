"""Run by torchrun: train each Megatron case of a JSON file in turn, and write what each rank saw.

    torchrun train_megatron.py --cases CASES.json --out DIR

A case: {"name", "layout": fields of megatron_training.Layout, "steps"}. DIR/<name>-rank<r>.json: `losses` (empty before
the last pipeline stage), `norms` of gradients, `text` of the module, `cable`: bytes that this rank's host sent and
received. Megatron alone: no DeepSpeed in this process.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/distributed"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import megatron_training
import torch
import torch.distributed as dist
from hosts import cable_bytes
from processes import leave


def trained(case: dict[str, Any]) -> dict[str, Any]:
    dist.barrier()
    before = cable_bytes()
    found = megatron_training.train(megatron_training.Layout(**case["layout"]), case["steps"])
    dist.barrier()
    return {**found, "cable": cable_bytes() - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in json.loads(args.cases.read_text()):
        (args.out / f"{case['name']}-rank{dist.get_rank()}.json").write_text(json.dumps(trained(case)))
    dist.barrier()
    assert "deepspeed" not in sys.modules


if __name__ == "__main__":
    main()
    leave()
