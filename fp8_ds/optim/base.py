"""AdamOptimizer: what torch optimizers over an AdamCore share, whoever the gradients belong to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fp8_ds.errors import UnsupportedError
from fp8_ds.numerics.masters import BY_NAME
from fp8_ds.numerics.predicted import check_betas
from fp8_ds.optim.core import AdamCore

SMALLEST_EPS = 1e-30
"""The smallest eps; its reciprocal is a normal float32."""


class AdamOptimizer(torch.optim.Optimizer):
    """Adam or AdamW, whose states lie in an AdamCore; a subclass steps it, and says what `state_dict` holds.

    Args:
        params, defaults: as in torch.optim.Optimizer.
        decoupled: true for AdamW, false for Adam.
        seed: seed of the rounding noise of 8-bit low parts.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], *, decoupled: bool, seed: int) -> None:
        self.decoupled = decoupled
        self.seed = seed
        self._core: AdamCore | None = None
        super().__init__(params, defaults)

    @property
    def has_core(self) -> bool:
        return self._core is not None

    @property
    def core(self) -> AdamCore:
        assert self._core is not None, "no parameters"
        return self._core

    def manage(self, core: AdamCore) -> None:
        """Work on the shards of `core`, whose rows are `flat_params` or, under Megatron, the groups."""
        self._core = core

    def flat_params(self) -> list[Any]:
        """Return the tensors in the param groups, in the order of rows."""
        return [p for group in self.param_groups for p in group["params"]]

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedError(
            f"{type(self).__name__}: expected to be saved by state_dict(), got a copy or a pickle of the object, whose "
            "parameters would no longer be those that hold its masters. Build another one and load the state_dict."
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch's optimizers do, before the optimizer is built.

        Raises:
            UnsupportedError: the optimizer is built already.
        """
        if self._core is not None:
            raise UnsupportedError(
                f"{type(self).__name__}.add_param_group: expected all groups at construction, got another one. Make a "
                "new optimizer and load the state_dict of this one for the parameters they share."
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state_dict of this class, or of torch's AdamW and Adam; float32 moments are quantised.

        Parameters without a state in it (it was saved before their first step) have none afterwards, as in torch.

        Raises:
            ValueError: groups or parameters differ in number, or a state lacks an entry, is not finite or has another
                shape than its parameter. Nothing has changed then.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        saved_groups = state_dict["param_groups"]
        self._checked_groups(saved_groups)
        ids = [i for g in saved_groups for i in g["params"]]
        self._load_states(saved_groups, [state_dict["state"].get(i) for i in ids])
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load_states(self, saved_groups: Sequence[dict[str, Any]], states: Sequence[Mapping[str, Any] | None]) -> None:
        """Load groups, which are checked, and a state for each of `flat_params`."""
        raise NotImplementedError

    def load_groups(self, saved_groups: Sequence[dict[str, Any]]) -> None:
        """Take over the options in the groups of a state_dict except masters' formats; no states.

        Raises:
            ValueError: groups or parameters differ in number, or a number is out of its range.
        """
        for group, loaded in zip(self.param_groups, self._checked_groups(saved_groups), strict=True):
            group.update(loaded)

    def _checked_groups(self, saved_groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the groups as `load_groups` leaves them; change nothing yet."""
        groups = self.param_groups
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in saved_groups]:
            raise ValueError(
                f"state_dict: expected {[len(g['params']) for g in groups]} parameters by group, "
                f"got {[len(g['params']) for g in saved_groups]}. Build the optimizer with the same groups."
            )
        loaded = []
        for group, saved in zip(groups, saved_groups, strict=True):
            loaded.append({**group, **deepcopy({k: v for k, v in saved.items() if k not in ("params", "master")})})
            check_group(loaded[-1])
        return loaded


def check_group(group: dict[str, Any]) -> None:
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr: expected a number or a tensor of one element, got {list(lr.shape)}. Take one of them.")
    for name in ("lr", "weight_decay"):
        if not 0 <= float(group[name]) < math.inf:
            raise ValueError(f"{name}: expected a finite number >= 0, got {group[name]}.")
    if not SMALLEST_EPS <= group["eps"] < math.inf:
        raise ValueError(
            f"eps: expected a finite number >= {SMALLEST_EPS}, got {group['eps']}. FP8 states divide by it if v is 0."
        )
    check_betas(*group["betas"])
    master = group.get("master")
    if master is not None and master not in BY_NAME:
        raise ValueError(f"master: expected one of {sorted(BY_NAME)}, got {master!r}.")
    for option in ("amsgrad", "maximize", "differentiable"):
        if group.get(option):
            raise UnsupportedError(f"{option}: expected false with FP8 optimizer states, got true. Remove it.")
    for p in group["params"]:
        if isinstance(p, DTensor):
            raise UnsupportedError(
                f"params: expected whole tensors or shards as plain ones, got a DTensor {list(p.shape)} (of FSDP2 or "
                "torch's tensor parallelism). Use ZeRO through DeepSpeed, or torch.optim.AdamW."
            )
