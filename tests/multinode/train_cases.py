"""Run by launchers: train each case of a JSON file in turn, and write what each rank saw.

    <launcher> train_cases.py --cases CASES.json --out DIR

A case: {"name", "kind"} and by its kind, one for all cases of a file or several of DeepSpeed's:

- "zero", "pipeline", "tensor_parallel": "stage", "fp8" (block or null), "steps"; for "zero" also "size", fields of
  ModelSize, and "body_only": embedding and head are frozen, so that all ranks own as many FP8 weights; for
  "tensor_parallel" also "tp_size" (all ranks without it).
- "megatron": "layout", fields of megatron_training.Layout, and "steps". No DeepSpeed is in the process.
- "pretrain_gpt": "words", arguments of pretrain_gpt.py in the clone that $MEGATRON_LM_PATH names. One case.

One start of a launcher (5 to 20 s) serves all cases. DIR/<name>-rank<r>.json: `losses`, `report` (what
engine.fp8_report() says) or `norms` and `text` of the module, and for "zero" `seconds` of each of the steps after
NUM_WARM; of "pretrain_gpt" the `text` that it writes. `cable`: bytes that this rank's host sent and received, for
"zero" in the steps after NUM_WARM.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/deepspeed"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from hosts import cable_bytes
from processes import leave

NUM_WARM = 2
"""ZeRO-3 traces its first step, and prefetches by the trace from the second on."""
SIZE = {"dim": 128, "ffn_dim": 384, "num_layers": 2, "head_dim": 32}
# Every weight is fetched in forward and again in backward, at any link speed.
STAGE_3 = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}


def engine_of(case: dict[str, Any]) -> Any:
    import training
    from model import ByteLlama, ModelSize

    zero = STAGE_3 if case["stage"] == 3 else {}
    config = training.ds_config(case["stage"], case["fp8"], zero_optimization=zero, **case.get("config", {}))
    torch.manual_seed(0)
    model = ByteLlama(ModelSize(**{**SIZE, **case.get("size", {})}))
    if case.get("body_only"):
        model.embed_tokens.requires_grad_(False)
        model.lm_head.requires_grad_(False)
    return training.start(model, config)


def zero_case(case: dict[str, Any]) -> dict[str, Any]:
    """Losses of all steps, and bytes and times of those after the warm-up."""
    import training

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


def megatron_case(case: dict[str, Any]) -> dict[str, Any]:
    import megatron_training

    dist.barrier()
    before = cable_bytes()
    found = megatron_training.train(megatron_training.Layout(**case["layout"]), case["steps"])
    dist.barrier()
    assert "deepspeed" not in sys.modules
    return {**found, "cable": cable_bytes() - before}


def pretrain_case(case: dict[str, Any]) -> dict[str, Any]:
    from megatron_patches.pretrain_gpt import main as pretrain

    sys.argv = ["pretrain_gpt", *case["words"]]
    before, said = cable_bytes(), io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            pretrain()
    finally:
        print(said.getvalue())
    return {"text": said.getvalue(), "cable": cable_bytes() - before}


KINDS = {
    "zero": zero_case,
    "pipeline": pipeline_case,
    "tensor_parallel": tensor_parallel_case,
    "megatron": megatron_case,
    "pretrain_gpt": pretrain_case,
}


def start(kind: str) -> None:
    """Make the process group, which pretrain_gpt.py makes by itself."""
    if kind == "pretrain_gpt":
        return
    torch.set_num_threads(1)
    if kind == "megatron":
        dist.init_process_group("gloo")
        return
    import deepspeed

    # Training never calls it, and g++ compiles it for a minute where no run did before.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(verbose=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the deepspeed launcher")
    args = parser.parse_args()
    cases = json.loads(args.cases.read_text())
    start(cases[0]["kind"])
    for case in cases:
        result = KINDS[case["kind"]](case)
        (args.out / f"{case['name']}-rank{os.environ['RANK']}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        leave()
