"""Run by test_megatron_te_spec.py under torchrun: checkpoints between Megatron's TE spec and ours.

Transformer Engine's classes are those of a stand-in without GEMMs; Megatron's layers over them, and their
`sharded_state_dict`, are its own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "megatron_patches"))

import megatron_training as mt
import transformer_engine_stand_in
from processes import leave

LAYOUT = mt.Layout(tp=2)
SAME = ("key", "local_shape", "global_shape", "global_offset", "replica_id", "axis_fragmentations")


def model(spec: Any) -> Any:
    from megatron.core.models.gpt import GPTModel

    return GPTModel(
        mt.transformer_config(LAYOUT),
        spec,
        vocab_size=mt.VOCABULARY,
        max_sequence_length=mt.LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


def models() -> dict[str, Any]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    from megatron_patches.attention import AttentionSettings
    from megatron_patches.layer_specs import layer_spec
    from megatron_patches.recipes import settings

    config = mt.transformer_config(LAYOUT)
    attention = AttentionSettings("reference")
    fp8 = settings("hybrid", "tensorwise")
    return {
        "stock": model(get_gpt_layer_with_transformer_engine_spec()),
        "ours": model(layer_spec(config, use_transformer_engine=True, attention=attention)),
        "without": model(layer_spec(config, use_transformer_engine=False, fp8=fp8, attention=attention)),
    }


def sharded(module: Any) -> dict[str, Any]:
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    found: dict[str, Any] = module.sharded_state_dict(prefix="", metadata={"dp_cp_group": group})
    return found


def place(one: Any) -> tuple[Any, ...]:
    """In the checkpoint; layers share keys, one after another along a first dim."""
    return one.key, getattr(one, "global_offset", None)


def places(module: Any) -> dict[Any, Any]:
    """Place -> its shapes and who writes it."""
    return {place(one): [getattr(one, name, None) for name in SAME] for one in sharded(module).values()}


def parameters(module: Any) -> dict[Any, torch.Tensor]:
    """By place."""
    return {place(one): one.data.detach().clone() for one in sharded(module).values() if hasattr(one, "local_shape")}


def goes_over(source: Any, target: Any, path: Path) -> bool:
    """Whether the parameters of `target` are those of `source` after a checkpoint of the one went into the other."""
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        path.mkdir()
    dist.barrier()
    with mt.writers():
        dist_checkpointing.save(sharded(source), str(path))
    state = dist_checkpointing.load(sharded(target), str(path), strict="log_all")
    target.load_state_dict(state, strict=False)
    one, other = parameters(source), parameters(target)
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def main(folder: Path) -> None:
    transformer_engine_stand_in.install()  # before Megatron is imported
    dist.init_process_group("gloo")
    with mt.megatron(LAYOUT):
        found = models()
        from megatron.core.extensions.transformer_engine import TEDotProductAttention, TELayerNormColumnParallelLinear

        layer = found["ours"].decoder.layers[0].self_attention
        assert isinstance(layer.core_attention, TEDotProductAttention) and layer.core_attention.fp8_attention
        assert type(layer.linear_qkv) is TELayerNormColumnParallelLinear
        stock, ours, without = (places(one) for one in found.values())
        assert stock == ours == without and len(stock) > 10 * mt.NUM_LAYERS
        pairs = (("stock", "ours"), ("ours", "stock"), ("stock", "without"), ("without", "stock"))
        for i, (source, target) in enumerate(pairs):
            with torch.no_grad():
                for p in found[source].parameters():
                    p.normal_()
            assert goes_over(found[source], found[target], folder / str(i)), (source, target)
            if dist.get_rank() == 0:
                print(f"{source} -> {target}: same parameters", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave()
