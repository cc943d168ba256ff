"""Small models that several test files convert."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import silu

from fp8_ds.tp import TensorParallelPlan

MIXER_PLAN = TensorParallelPlan(
    heads=(),
    column=("layers.*.mixer.up",),
    row=("layers.*.mixer.down",),
    row_heads=(),
    blocks=("layers.*.mixer",),
    first="layers.0",
    last="last",
    in_shards=("layers.*.norm", "last"),
)
"""The plan of a model whose layers have a norm and a `mixer` with linears `up` and `down`."""


class SwigluMlp(nn.Module):
    """A SwiGLU MLP as models of the Llama family write it, with a function for the activation."""

    def __init__(self, width: int, hidden: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=bias)
        self.up_proj = nn.Linear(width, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
