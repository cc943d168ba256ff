"""Gradients that a CUDA graph wrote, where they wait for those of further micro-batches."""

from __future__ import annotations

import sys

import torch


def are_replayed() -> bool:
    """Whether torch.compile has CUDA graphs of this thread's on its device: outputs lie in memory that a replay writes.

    Source: torch 2.11 and 2.13, `torch/_inductor/cudagraph_trees.py`, `get_manager`; not imported for the question.
    """
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or not torch.cuda.is_initialized():
        return False
    return trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False) is not None
