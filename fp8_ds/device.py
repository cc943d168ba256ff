"""Where DeepSpeed computes, for those who have no engine to ask."""

from __future__ import annotations

import os


def uses_cuda() -> bool:
    """DeepSpeed computes on CUDA, here and in processes started from here.

    DS_ACCELERATOR, and without it CUDA where torch has some: as deepspeed 0.19.8 chooses (real_accelerator.py). torch
    alone is no answer, for who sets DS_ACCELERATOR=cpu on a machine with GPUs means it. What is part of a run asks
    `get_accelerator()`, whose choice is final in a process and needs deepspeed; `fp8-ds doctor` may not have it.
    """
    import torch

    return os.environ.get("DS_ACCELERATOR", "cuda") == "cuda" and torch.cuda.is_available()


def num_gpus() -> int:
    """How many DeepSpeed has for ranks; 0 where it computes on the CPU."""
    import torch

    return torch.cuda.device_count() if uses_cuda() else 0
