"""The wrapper's pretrain_gpt.py; after each step Transformer Engine's FP8 weights are what our masters say.

Run by test_megatron_gpu.py under torchrun; $MEGATRON_LM_PATH names the clone.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
sys.path.insert(0, os.environ.get("MEGATRON_LM_PATH", ""))

from fp8_weight_checks import num_checked

from megatron_patches import pretrain_gpt
from megatron_patches.optimizer_sharded import Fp8DistributedOptimizer


def checked_step(optimizer: Any) -> bool:
    """In the place of DistributedOptimizer's."""
    done = stock_step(optimizer)
    num = num_checked(optimizer)
    print(f"checked {num} FP8 weights", flush=True)
    return done


stock_step = Fp8DistributedOptimizer.step_with_ready_grads

if __name__ == "__main__":
    Fp8DistributedOptimizer.step_with_ready_grads = checked_step  # type: ignore[method-assign]
    pretrain_gpt.main()
