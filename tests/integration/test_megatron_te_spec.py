"""Checkpoints between Megatron's spec of Transformer Engine, ours over it, and ours without it: the same places.

Transformer Engine's classes are those of a stand-in without GEMMs; Megatron's layers over them, and their
`sharded_state_dict`, are its own. This file is also what torchrun starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import HANG

SAME = ("key", "local_shape", "global_shape", "global_offset", "replica_id", "axis_fragmentations")


@pytest.mark.slow
def test_a_checkpoint_of_the_stock_te_spec_has_the_places_of_ours(root: Path) -> None:
    """Keys, shapes, offsets and writers; on GPUs checkpoints go to the real one and back (test_megatron_gpu.py)."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron-core==0.16.1")
    folders = (root / name for name in ("", "benchmarks", "tests", "tests/distributed", "tests/unit/megatron_patches"))
    environment = {
        # Megatron sets these in its own process, and refuses to start where they are set.
        **{name: value for name, value in os.environ.items() if not name.startswith("NVTE_")},
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG)
    assert run.returncode == 0, run.stderr[-4000:]


def places(module: Any) -> dict[Any, Any]:
    """Where each tensor is in the checkpoint -> its shapes and who writes it; layers share keys, one after another."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    found = module.sharded_state_dict(prefix="", metadata={"dp_cp_group": group}).values()
    return {
        (one.key, getattr(one, "global_offset", None)): [getattr(one, name, None) for name in SAME] for one in found
    }


def main() -> None:
    import megatron_training as mt
    import torch.distributed as dist
    import transformer_engine_stand_in

    transformer_engine_stand_in.install()  # before Megatron is imported
    dist.init_process_group("gloo")
    layout = mt.Layout(tp=2)
    with mt.megatron(layout):
        from megatron.core.extensions.transformer_engine import TEDotProductAttention, TELayerNormColumnParallelLinear
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        from megatron_patches.attention import AttentionSettings
        from megatron_patches.layer_specs import layer_spec
        from megatron_patches.recipes import settings

        config, attention = mt.transformer_config(layout), AttentionSettings("reference")
        fp8 = settings("hybrid", "tensorwise")
        stock, ours, without = (
            GPTModel(
                mt.transformer_config(layout),
                spec,
                vocab_size=mt.VOCABULARY,
                max_sequence_length=mt.LENGTH,
                position_embedding_type="rope",
                share_embeddings_and_output_weights=False,
            )
            for spec in (
                get_gpt_layer_with_transformer_engine_spec(),
                layer_spec(config, use_transformer_engine=True, attention=attention),
                layer_spec(config, use_transformer_engine=False, fp8=fp8, attention=attention),
            )
        )
        layer = ours.decoder.layers[0].self_attention
        assert isinstance(layer.core_attention, TEDotProductAttention) and layer.core_attention.fp8_attention
        assert type(layer.linear_qkv) is TELayerNormColumnParallelLinear
        assert places(stock) == places(ours) == places(without) and len(places(stock)) > 10 * mt.NUM_LAYERS


if __name__ == "__main__":
    main()
    from processes import leave

    leave()
