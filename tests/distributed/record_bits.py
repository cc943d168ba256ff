"""Record the bits of short trainings, to show that a change which should alter no number alters none.

    python tests/distributed/record_bits.py bits-before.json --checkpoints kept      # before the change
    python tests/distributed/record_bits.py bits-after.json --checkpoints kept --compare bits-before.json

The grid is stages 1 to 3, all recipes, fp32, e4m19 and e4m11 masters, eager and `aot_eager` with fused modules, on 1, 2
and 4 gloo ranks. Beside it stand `WAYS` of training (accumulation, no clipping, checkpointing, evaluation, release,
LoRA, layers in bf16, offload, FP8 reduce-scatters, tensor parallelism, ...), each in all stages that have it, with two
recipes and fp32 and e4m11 masters, on 1, 2 and 3 ranks, or 2 and 4. All are 20 steps of a Llama of two layers.

What is recorded of each: its losses, a hash of its masters, moments, FP8 bytes, scales and amax histories, and for WAYS
one of all tensors that a checkpoint has. The way "resume" saves its tenth step in the folder of `--checkpoints`, and
goes on from what it finds there: after a change, from checkpoints of before. 45 minutes on two cores for the grid, 20
for the ways; `--world` and `--only` choose.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parents[number]) for number in (0, 1, 2)]

import tensor_parallel as tpar  # noqa: E402
import test_checkpoint  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import training  # noqa: E402
from support.ranks import RankPool  # noqa: E402

STAGES = (1, 2, 3)
RECIPES = ("tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise")
MASTERS = ("fp32", "e4m19", "e4m11")
MODES = ("eager", "aot_eager")
WORLDS = (1, 2, 4)
NUM_STEPS, VOCABULARY, LENGTH = 20, 256, 32

WAYS: dict[str, dict[str, Any]] = {
    "accumulation": {"ds": {"gradient_accumulation_steps": 2}},
    "accumulation-overlap": {"ds": {"gradient_accumulation_steps": 2, "zero_optimization": {"overlap_comm": True}}},
    "no-clipping": {"ds": {"gradient_clipping": 0.0}},
    "checkpointing": {},
    "evaluation": {},
    "release": {"masters": ("e4m11",), "fp8": {"optimizer": {"release": True}}, "ds": {"gradient_clipping": 0.0}},
    "lora": {"fp8": {"linear": {"frozen": "fp8", "filter_fqns": ["lm_head", "lora_"]}}},
    "layers-in-bf16": {"fp8": {"schedule": {"layers": {"layers.0.mlp.down_proj": "bf16"}}}},
    "ends-in-bf16": {"fp8": {"schedule": {"bf16_last_fraction": 0.25, "total_steps": NUM_STEPS}}},
    "offload": {"masters": ("e4m11",)},
    "reduce-scatter": {"stages": (2, 3), "fp8": {"zero": {"reduce_scatter": "fp8"}}},
    "persistent": {"stages": (3,), "ds": {"zero_optimization": {"stage3_param_persistence_threshold": 20_000}}},
    "written": {"worlds": (1, 2)},
    "resume": {},
    "tp": {"worlds": (2, 4), "recipes": ("tensorwise", "rowwise")},
    "autotp": {"stages": (1, 2), "worlds": (2, 4), "ds": {"tensor_parallel": {"autotp_size": 2}}},
}
"""Ways of training: keys of the "fp8" block and of DeepSpeed's configuration; stages, recipes, masters and numbers of
ranks where they are not all; what else they do is told by the name."""


def build(stage: int, recipe: str, master: str, mode: str, way: str = "", seed: int = 0) -> Any:
    """An engine over a seeded Llama whose sizes are multiples of 128, of which "blockwise" makes blocks."""
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    import fp8_ds

    torch.manual_seed(seed)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    net: Any = LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=4, vocab_size=VOCABULARY, use_cache=False))
    more = WAYS.get(way, {})
    fp8: dict[str, Any] = {"activations": {"fused": mode == "aot_eager"}, **more.get("fp8", {})}
    fp8["linear"] = {"recipe": recipe, **fp8.get("linear", {})}
    if master != "fp32":
        fp8["optimizer"] = {"states": "fp8", "master": master, **fp8.get("optimizer", {})}
    config = training.ds_config(stage, fp8, **more.get("ds", {}))
    if way == "checkpointing":
        net.gradient_checkpointing_enable()
    if way == "lora":
        import peft

        net = peft.get_peft_model(net, peft.LoraConfig(r=8, target_modules=["q_proj", "down_proj"]))
    mpu = None
    if way == "tp":
        mpu = tpar.groups(2)
        fp8_ds.tp.parallelize(net, fp8_ds.tp.LLAMA, mpu.tp_group)
    parameters = [p for p in net.parameters() if p.requires_grad]
    engine = deepspeed.initialize(model=net, config=config, model_parameters=parameters, mpu=mpu)[0]
    if mode != "eager":
        torch._dynamo.reset()
        engine.compile(backend=mode)
    return engine


def tokens_of(step: int, shares: int) -> torch.Tensor:
    """`shares`: ranks that read the same tokens."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank() // shares)
    start = torch.randint(0, VOCABULARY, (2, 1), generator=generator)
    return (start + torch.randint(1, 4, (2, 1), generator=generator) * torch.arange(LENGTH)) % VOCABULARY


def train(engine: Any, steps: range, way: str) -> list[str]:
    """Losses of all micro-batches as hexadecimal floats."""
    losses, shares = [], 2 if "tp" in way else 1
    for step in steps:
        if way == "evaluation" and step % 3 == 2:
            engine.eval()
            with torch.no_grad():
                losses.append(float(engine(input_ids=tokens_of(step + 500, shares)).logits.float().sum()).hex())
            engine.train()
        if way == "offload" and step % 7 == 3:
            engine.offload_states(device=SimpleNamespace(value="cpu"), pin_memory=False)
            engine.reload_states()
        if way == "written" and step % 7 == 3:
            write(engine)
        for part in range(engine.gradient_accumulation_steps()):
            tokens = tokens_of(step + 100 * part, shares)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss).hex())
    return losses


def write(engine: Any) -> None:
    """Change a weight in FP8, and another's master."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

    first, second = [p for name, p in engine.module.named_parameters() if "up_proj" in name][:2]
    with deepspeed.zero.GatheredParameters([first], modifier_rank=0), torch.no_grad():
        if dist.get_rank() == 0 or not hasattr(first, "ds_id"):
            first.mul_(1.5)
    safe_set_full_fp32_param(second, safe_get_full_fp32_param(second) * 0.75)


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in what a checkpoint's file holds, with their places."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from tensors_in(one, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, one in enumerate(value):
            yield from tensors_in(one, f"{path}.{index}")


def digest_of(tensors: Iterator[tuple[str, torch.Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(tensors, key=lambda pair: pair[0]):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def digest_of_checkpoint(engine: Any) -> str:
    """Hash of all tensors of a checkpoint. Collective."""
    place: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(place)
    engine.save_checkpoint(place[0], "tag")
    files = sorted(Path(place[0], "tag").glob("*.pt"))
    read = {path.name: torch.load(path, map_location="cpu", weights_only=False) for path in files}
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(place[0])
    return digest_of(tensors_in(read))


def run(stage: int, recipe: str, master: str, mode: str, way: str = "", kept: str = "") -> dict[str, Any]:
    """Inside a rank: losses of all steps, and hashes of what is there after the last.

    Args:
        kept: for "resume": the folder that has the checkpoint of the tenth step, or gets it.
    """
    if "tp" not in way:
        from deepspeed.utils import groups

        groups.mpu = None  # DeepSpeed keeps it for whatever engine comes next
    engine, losses, half = build(stage, recipe, master, mode, way), [], NUM_STEPS // 2
    if way == "resume":
        has_one = Path(kept, "latest").exists()
        dist.barrier()
        if not has_one:
            train(engine, range(half), way)
            engine.save_checkpoint(kept)
        training.destroy(engine)
        engine = build(stage, recipe, master, mode, way, seed=7)
        engine.load_checkpoint(kept)
    losses = train(engine, range(half if way == "resume" else 0, NUM_STEPS), way)
    found = {"losses": losses, "state": digest_of(iter(test_checkpoint.snapshot(engine).items()))}
    if way:
        found["checkpoint"] = digest_of_checkpoint(engine)
    training.destroy(engine)
    return found


def cells(world: int) -> Iterator[tuple[Any, ...]]:
    """Arguments of `run` on `world` ranks."""
    if world in WORLDS:
        yield from itertools.product(STAGES, RECIPES, MASTERS, MODES)
    for way, more in WAYS.items():
        if world in more.get("worlds", (1, 2, 3)):
            stages, masters = more.get("stages", STAGES), more.get("masters", ("fp32", "e4m11"))
            recipes = more.get("recipes", ("delayed", "rowwise"))
            yield from itertools.product(stages, recipes, masters, ("eager",), (way,))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--compare", type=Path, help="a file of an earlier run; exit status 1 where bits differ")
    parser.add_argument("--checkpoints", type=Path, help='folder of checkpoints that "resume" goes on from')
    parser.add_argument("--world", type=int, nargs="+", default=sorted({*WORLDS, 3}))
    parser.add_argument("--only", default="", help="cells whose name contains this")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        kept = arguments.checkpoints or Path(place)
        for world in arguments.world:
            pool = RankPool(world)
            try:
                for cell in cells(world):
                    name = "-".join(map(str, (*cell, world)))
                    if arguments.only in name:
                        found[name] = pool.run(run, *cell, kept=str(kept.resolve() / name))
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
