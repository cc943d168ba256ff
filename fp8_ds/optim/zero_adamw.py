"""ZeroAdamW: Adam and AdamW over the shards of a ZeRO optimizer, which steps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8_ds.errors import UnsupportedError
from fp8_ds.ops.adamw.dense import MOMENTS
from fp8_ds.optim.adamw import AdamOptimizer, check_group
from fp8_ds.optim.core import dense_flat
from fp8_ds.optim.param_state import absorb_state


class ZeroAdamW(AdamOptimizer):
    """Optimizer in the place of `client`, with the list `client.param_groups`, for a ZeRO optimizer to `manage`.

    Args:
        client: torch's Adam or AdamW, or DeepSpeed's FusedAdam, that has not stepped yet.
        seed: seed of the rounding noise.

    Attributes:
        is_dense: whether DeepSpeed works on dense states, which are absorbed afterwards; the ZeRO optimizer says so.

    Raises:
        UnsupportedError: `client` is another optimizer, or has an option that FP8 states do not have.
    """

    def __init__(self, client: torch.optim.Optimizer, *, seed: int = 0) -> None:
        super().__init__([{"params": []}], dict(client.defaults), decoupled=_is_decoupled(client), seed=seed)
        self.is_dense = False
        self.param_groups = client.param_groups
        if any(client.state.values()):
            raise UnsupportedError(
                "fp8.optimizer.states: expected an optimizer that has not stepped, got one with state. Pass it fresh, "
                "and load its state as a checkpoint."
            )
        for group in self.param_groups:
            check_group(group)
        vars(client)["_opt_called"] = True  # torch's schedulers read it: the client's must not miss its steps

    def step(self, closure: Any = None) -> Any:
        """Raise RuntimeError: the engine steps."""
        raise RuntimeError("ZeroAdamW.step: expected to be called by nobody under ZeRO. Call engine.step().")

    def state_dict(self) -> dict[str, Any]:
        """Return the state that torch's Adam would: "step", "exp_avg", "exp_avg_sq" in float32, on the CPU. Lossless.

        It is of flat tensors, whose masters ZeRO keeps.
        """
        if not self.has_core or any(self.state.values()):
            return super().state_dict()
        core, dense = self.core, dict(self.state)  # entries of nothing: somebody has looked there
        self.state.clear()
        for p, flat in zip(self.flat_params(), core.flats, strict=True) if core.has_moments else ():
            moments = {key: dense_flat(flat, key, core.scales.scale_inv, "cpu").view(p.shape) for key in MOMENTS}
            dense[p] = {"step": core.step_count[flat.row].cpu().float(), **moments}
        return self._state_dict_of(dense)

    def _load_states(self, saved_groups: Sequence[dict[str, Any]], states: Sequence[Mapping[str, Any] | None]) -> None:
        self.load_groups(saved_groups)
        for row, (p, state) in enumerate(zip(self.flat_params(), states, strict=True)):
            if state:
                self.state[p] = dict(state)
            else:
                self.core.forget(row)
        if not self.is_dense:
            self.absorb_dense()

    def absorb_dense(self, params: Sequence[Tensor] | None = None) -> None:
        """Quantise the dense states in `self.state` (float32, one entry per flat tensor), and empty it.

        Args:
            params: flat tensors in the order of their rows; None: those in the param groups.
        """
        rows = enumerate(self.flat_params() if params is None else params)
        found = {row: self.state[p] for row, p in rows if self.state.get(p)}
        if found:
            self.core.follow(self.param_groups)
        for row, state in found.items():
            absorb_state(self.core, row, state)
        self.state.clear()


def _is_decoupled(client: torch.optim.Optimizer) -> bool:
    """Whether `client` is AdamW. Raises UnsupportedError where it is neither AdamW nor Adam, or both by group."""
    kind = type(client)
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        is_adamw = kind is torch.optim.AdamW
        found = [bool(group.get("decoupled_weight_decay", is_adamw)) for group in client.param_groups]
        if any(found) != all(found):
            raise UnsupportedError(
                f"decoupled_weight_decay: expected one value in all parameter groups with FP8 optimizer states, got "
                f"{found}. Use AdamW or Adam for all of them."
            )
        return found[0]
    if kind.__name__ == "FusedAdam" and kind.__module__.startswith("deepspeed"):
        if not all(group.get("bias_correction", True) for group in client.param_groups):
            raise UnsupportedError("bias_correction: expected true with FP8 optimizer states, got false. Remove it.")
        return bool(vars(client)["adam_w_mode"])
    raise UnsupportedError(
        f"optimizer: expected Adam or AdamW (torch's, or DeepSpeed's FusedAdam) with fp8.optimizer.states fp8, got "
        f'{kind.__module__}.{kind.__name__}. Use one of these, or "states": "fp32".'
    )
