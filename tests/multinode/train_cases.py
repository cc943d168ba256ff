"""Run by launchers: train each case of a JSON file in turn, and write what each rank saw.

    <launcher> train_cases.py --cases CASES.json --out DIR

A case: {"name", "kind": "zero" | "pipeline" | "tensor_parallel", "stage", "fp8": block or null, "steps"}; for "zero"
also "size", fields of ModelSize, and "body_only": embedding and head are frozen, so that all ranks own as many FP8
weights; for "tensor_parallel" also "tp_size" (all ranks without it). One start of a launcher (5 to 20 s) serves all
cases. DIR/<name>-rank<r>.json: `losses`, `report` (what engine.fp8_report() says), for "zero" also `cable` (bytes that
this rank's host sent and received in the steps after NUM_WARM) and `seconds` of each of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/deepspeed"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/distributed"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import deepspeed
import torch
import torch.distributed as dist
import training
from hosts import cable_bytes
from model import ByteLlama, ModelSize
from processes import leave

import fp8_ds  # noqa: F401

NUM_WARM = 2
"""ZeRO-3 traces its first step, and prefetches by the trace from the second on."""
SIZE = {"dim": 128, "ffn_dim": 384, "num_layers": 2, "head_dim": 32}
# Every weight is fetched in forward and again in backward, at any link speed.
STAGE_3 = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}


def engine_of(case: dict[str, Any]) -> Any:
    zero = STAGE_3 if case["stage"] == 3 else {}
    config = training.ds_config(case["stage"], case["fp8"], zero_optimization=zero, **case.get("config", {}))
    torch.manual_seed(0)
    model = ByteLlama(ModelSize(**{**SIZE, **case.get("size", {})}))
    if case.get("body_only"):
        model.embed_tokens.requires_grad_(False)
        model.lm_head.requires_grad_(False)
    trainable = [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trainable, config=config)[0]


def zero_case(case: dict[str, Any]) -> dict[str, Any]:
    """Losses of all steps, and bytes and times of those after the warm-up."""
    engine = engine_of(case)
    losses = training.train(engine, NUM_WARM)
    dist.barrier()
    first, seconds = cable_bytes(), []
    for step in range(NUM_WARM, case["steps"]):
        start = time.perf_counter()
        losses += training.train(engine, 1, first_step=step)  # ends with a collective
        seconds.append(time.perf_counter() - start)
    dist.barrier()
    cable = cable_bytes() - first
    report = engine.fp8_report() if case["fp8"] is not None else {}
    training.destroy(engine)
    return {"losses": losses, "report": report, "cable": cable, "seconds": seconds}


def pipeline_case(case: dict[str, Any]) -> dict[str, Any]:
    from test_pipeline import pipeline

    found = pipeline(case["fp8"], "balanced", case["steps"])
    return {"losses": found["losses"], "report": found.get("report", {})}


def tensor_parallel_case(case: dict[str, Any]) -> dict[str, Any]:
    from test_tp_llama import trained

    found = trained(case["stage"], case["fp8"], case.get("tp_size", dist.get_world_size()), case["steps"])
    return {"losses": found["losses"], "report": found["report"]}


KINDS = {"zero": zero_case, "pipeline": pipeline_case, "tensor_parallel": tensor_parallel_case}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the deepspeed launcher")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # Training never calls it, and g++ compiles it for a minute where no run did before.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(verbose=False)
    for case in json.loads(args.cases.read_text()):
        result = KINDS[case["kind"]](case)
        (args.out / f"{case['name']}-rank{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()


if __name__ == "__main__":
    main()
    leave()
