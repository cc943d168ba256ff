"""Record the bits of short trainings, to show that a change which should alter no number alters none.

    python tests/distributed/record_bits.py bits-before.json      # before the change
    python tests/distributed/record_bits.py bits-after.json --compare bits-before.json

Stages 1 to 3, all recipes, fp32, e4m19 and e4m11 masters, eager and `aot_eager` with fused modules, and 1, 2 and 4 gloo
ranks: 20 steps each of a Llama of two layers. What is recorded of each: its losses, and a hash of its masters, moments,
FP8 bytes, scales and amax histories. 45 minutes on two cores for all; `--world` and `--only` choose.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parents[number]) for number in (0, 1, 2)]

import test_checkpoint  # noqa: E402
import torch  # noqa: E402
import training  # noqa: E402
from support.ranks import RankPool  # noqa: E402

STAGES = (1, 2, 3)
RECIPES = ("tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise")
MASTERS = ("fp32", "e4m19", "e4m11")
MODES = ("eager", "aot_eager")
WORLDS = (1, 2, 4)
NUM_STEPS, VOCABULARY, LENGTH = 20, 256, 32


def build(stage: int, recipe: str, master: str, mode: str) -> Any:
    """An engine over a seeded Llama whose sizes are multiples of 128, of which "blockwise" makes blocks."""
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    import fp8_ds  # noqa: F401

    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    net = LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=4, vocab_size=VOCABULARY, use_cache=False))
    fp8: dict[str, Any] = {"linear": {"recipe": recipe}, "activations": {"fused": mode == "aot_eager"}}
    if master != "fp32":
        fp8["optimizer"] = {"states": "fp8", "master": master}
    config = training.ds_config(stage, fp8)
    engine = deepspeed.initialize(model=net, config=config, model_parameters=list(net.parameters()))[0]
    if mode != "eager":
        torch._dynamo.reset()
        engine.compile(backend=mode)
    return engine


def run(stage: int, recipe: str, master: str, mode: str) -> dict[str, Any]:
    """Inside a rank: losses of all steps as hexadecimal floats, and the hash of the state after the last."""
    engine = build(stage, recipe, master, mode)
    losses = []
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(1000 * step + torch.distributed.get_rank())
        start = torch.randint(0, VOCABULARY, (2, 1), generator=generator)
        tokens = (start + torch.randint(1, 4, (2, 1), generator=generator) * torch.arange(LENGTH)) % VOCABULARY
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss).hex())
    digest = hashlib.sha256()
    for name, value in sorted(test_checkpoint.snapshot(engine).items()):
        digest.update(name.encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    training.destroy(engine)
    return {"losses": losses, "state": digest.hexdigest()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--compare", type=Path, help="a file of an earlier run; exit status 1 where bits differ")
    parser.add_argument("--world", type=int, nargs="+", default=WORLDS)
    parser.add_argument("--only", default="", help="cells whose name contains this")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    started = time.monotonic()
    for world in arguments.world:
        pool = RankPool(world)
        try:
            for cell in itertools.product(STAGES, RECIPES, MASTERS, MODES):
                name = "-".join(map(str, (*cell, world)))
                if arguments.only in name:
                    found[name] = pool.run(run, *cell)
                    arguments.output.write_text(json.dumps(found, indent=0))
        finally:
            pool.close()
        print(f"{len(found)} trainings, {time.monotonic() - started:.0f} s", flush=True)
    if arguments.compare is None:
        return 0
    before = json.loads(arguments.compare.read_text())
    different = [name for name, results in found.items() if before.get(name) != results]
    print(f"{len(found) - len(different)} of {len(found)} trainings have the same bits", *different, sep="\n")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
