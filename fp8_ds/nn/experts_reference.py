"""Experts as transformers 5 writes them: the reference, and the text that a model's experts are compared with.

Source: huggingface/transformers 5.24 src/transformers/models/mixtral/modeling_mixtral.py, `MixtralExperts.forward`,
line by line; 54 other classes there have the same text, in 5.17 all of 48, in 5.0 of 24.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fp8_ds.nn.dataflow import parse


def stock_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Add up each expert's `down(act(gate(x)) * up(x))` of the tokens that chose it, times their weights for it.

    Args:
        self: num_experts; gate_up_proj [E, 2 I, H], gate first; down_proj [E, H, I]; act_fn.
        hidden_states: [T, H], as is the result.
        top_k_index: int64 [T, k], numbers of experts; num_experts stands for none.
        top_k_weights: [T, k].
    """
    final_hidden_states = torch.zeros_like(hidden_states)
    with torch.no_grad():
        expert_mask = torch.nn.functional.one_hot(top_k_index, num_classes=self.num_experts + 1)
        expert_mask = expert_mask.permute(2, 1, 0)
        expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
    for expert_idx in expert_hit:
        expert_idx = expert_idx[0]
        if expert_idx == self.num_experts:
            continue
        top_k_pos, token_idx = torch.where(expert_mask[expert_idx])
        current_state = hidden_states[token_idx]
        gate, up = nn.functional.linear(current_state, self.gate_up_proj[expert_idx]).chunk(2, dim=-1)
        current_hidden_states = self.act_fn(gate) * up
        current_hidden_states = nn.functional.linear(current_hidden_states, self.down_proj[expert_idx])
        current_hidden_states = current_hidden_states * top_k_weights[token_idx, top_k_pos, None]
        final_hidden_states.index_add_(0, token_idx, current_hidden_states.to(final_hidden_states.dtype))
    return final_hidden_states


def is_stock(function: Callable[..., Any]) -> bool:
    """Whether the text is that of `stock_forward`, of this or an earlier transformers 5; False without a source."""
    text = _text(function)
    return text is not None and text == _text(stock_forward)


@functools.cache
def _text(function: Callable[..., Any]) -> str | None:
    """Return the names of the arguments, and the statements without comments and docstring.

    transformers before 5.24 makes the mask without a row for tokens that another rank's experts compute.
    """
    tree = parse(function)
    if tree is None or tree.decorator_list or hasattr(function, "__wrapped__"):
        return None
    text = "\n".join([*(argument.arg for argument in tree.args.args), *map(ast.unparse, tree.body)])
    return text.replace("num_classes=self.num_experts + 1", "num_classes=self.num_experts")
