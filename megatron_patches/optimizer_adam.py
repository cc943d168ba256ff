"""Fp8AdamW as Megatron's optimizers want Adam: made from model parameters, given shards or main parameters later."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer
from torch import Tensor

from fp8_ds.comm.layout import ShardRange
from fp8_ds.errors import UnsupportedError
from fp8_ds.numerics.predicted import PredictedScales
from fp8_ds.ops.adamw import AdamShard
from fp8_ds.ops.adamw.dense import MOMENTS, allocate_lo, read_dense, write_dense
from fp8_ds.optim.adamw import AdamOptimizer, check_group
from fp8_ds.optim.core import AdamCore, FlatBuffer

SCALES = "fp8_scale_inv"
"""Key of saved param groups: name -> scale_inv that an FP8 master is stored with. Megatron carries it along unread."""
BOUND_SUM = "fp8_bound_sum"
"""Key of saved param groups whose betas have changed: (count of steps, sum that bounds the update then)."""
_STEP_IS_OF_GROUPS = distrib_optimizer.HAVE_APEX_OR_TE
"""Whether Megatron's Adam counts steps in its param groups (FusedAdam) or states (torch). Checkpoints follow that."""


class MegatronFp8AdamW(AdamOptimizer):
    """AdamW or Adam with FP8 moments in the place of FusedAdam; Megatron's optimizers say what it works on (`hold`).

    Gradients are read from `decoupled_grad`, just as by a precision-aware FusedAdam.

    Args:
        params, lr, weight_decay, betas, eps, adam_w_mode: as in FusedAdam.
        capturable: passed by Megatron 0.19 and later for --optimizer-cuda-graph, which is refused.
        master: format of the masters of FP8 weights, or of bf16 ones ("bf16_8").
        seed: seed of the rounding noise, the same on all ranks.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        capturable: bool = False,
        *,
        master: str = "bf16_8",
        seed: int = 0,
    ) -> None:
        self.master = master
        self.is_sharded = False
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "master": None}
        super().__init__(params, defaults, decoupled=adam_w_mode, seed=seed)
        for group in self.param_groups:
            check_group(group)
            group["bias_correction"] = True  # FusedAdam reads it in each step, from the groups that it has loaded

    def hold(self, shards: Sequence[AdamShard], scales: PredictedScales | None, device: torch.device) -> None:
        """Update `shards` from now on: one for each tensor in the param groups, in their order.

        Args:
            shards: with `hi` set; the rest is set here.
            scales: those of FP8 masters.
            device: that of the shards.
        """
        found, flats = iter(shards), []
        self._shard_of: dict[int, AdamShard] = {}
        for row, group in enumerate(self.param_groups):
            pieces, offset = [], 0
            for p in group["params"]:
                shard = self._shard_of[id(p)] = next(found)
                shard.group = row
                allocate_lo(shard, device)
                pieces.append((ShardRange(offset, offset + shard.numel), shard))
                offset += shard.numel
            flats.append(FlatBuffer(row, offset, pieces))
        self.manage(AdamCore(flats, range(len(flats)), scales, device, self.decoupled, self.seed))
        self._announce()

    def shard_of(self, p: Any) -> AdamShard:
        """Return the shard that is updated for a tensor of the param groups."""
        return self._shard_of[id(p)]

    def _announce(self) -> None:
        """Put empty entries into `state`: Megatron allocates a dense state for everything if it finds none."""
        self.state.clear()
        for p in self.flat_params():
            self.state[p] = {}

    @property
    def num_steps(self) -> int:
        """Number of updates so far. Reading it waits for the device."""
        return int(self.core.step_count.max()) if len(self.core.flats) else 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update everything that has a gradient; the caller knows whether all gradients are finite."""
        grads = []
        for p in self.flat_params():
            grad = getattr(p, "decoupled_grad", None)
            assert grad is not None or not self.shard_of(p).fmt.is_fp8, "its scale changes, and it must be rewritten"
            grads.append(None if grad is None else grad.detach().contiguous().view(-1))
        inputs = self.core.begin(self.param_groups)
        if any(grad is None for grad in grads):
            self.core.sums.keep()
        self.core.run(grads, inputs)
        self.core.end()

    def read(self, p: Any, key: str | None) -> Tensor:
        """Return float32 on the CPU, of p's shape: the master (key None) or a moment by its torch name, zeros at first.

        It is on the CPU since a checkpoint wants all of them at once, at six times the size of the shards.
        """
        shard = self.shard_of(p)
        if key is not None:
            self.core.allocate()
        out = torch.empty(shard.numel, dtype=torch.float32)
        read_dense(shard, key, out, self.core.scales.scale_inv)
        return out.view(p.shape)

    @torch.no_grad()
    def write(self, p: Any, key: str | None, value: Tensor) -> None:
        """Write what `read` gave, exactly, or another value, to nearest; `value` may be on any device."""
        shard = self.shard_of(p)
        if key is not None:
            self.core.allocate()
        write_dense(shard, key, value.detach().reshape(-1), self.core.scales.scale_inv)

    @torch.no_grad()
    def forget_masters(self) -> None:
        """Zero the low parts after bf16 weights were loaded: these are their own masters until the next update."""
        for shard in self.core.shards:
            if shard.lo is not None and not shard.fmt.is_fp8:
                shard.lo.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return the form of Megatron's own Adam: param groups, and dense float32 moments on the CPU.

        A distributed optimizer gets no moments: it asks for them by parameter.
        """
        if not self.has_core:
            return super().state_dict()
        num_steps = self.num_steps
        self.core.follow(self.param_groups)
        sums = self.core.sums.by_group()
        state: dict[int, dict[str, Any]] = {}
        groups, index = [], 0
        for row, group in enumerate(self.param_groups):
            packed = {key: value for key, value in group.items() if key != "params"}
            packed["params"] = list(range(index, index + len(group["params"])))
            if _STEP_IS_OF_GROUPS and num_steps:
                packed["step"] = num_steps
            if row in sums:
                packed[BOUND_SUM] = (num_steps, sums[row])
            groups.append(packed)
            for p in group["params"]:
                entry: dict[str, Any] = {}
                if self.core.has_moments and not self.is_sharded:
                    entry = {key: self.read(p, key) for key in MOMENTS}
                if not _STEP_IS_OF_GROUPS and (entry or self.is_sharded):
                    entry["step"] = torch.tensor(float(num_steps), dtype=torch.float32)
                if entry:
                    state[index] = entry
                index += 1
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over param groups, the count of steps, and moments where there are any.

        Raises:
            ValueError: groups or parameters differ in number, or a number is out of its range.
            UnsupportedError: steps differ from parameter to parameter.
        """
        if not self.has_core:
            return  # DistributedOptimizer.__init__ has put shards into the groups and loads what it has just read
        state = {i: dict(entry) for i, entry in state_dict["state"].items() if isinstance(i, int)}
        groups = [dict(group) for group in state_dict["param_groups"]]
        steps = {int(group.pop("step")) for group in groups if group.get("step") is not None}
        steps |= {int(entry.pop("step")) for entry in state.values() if entry.get("step") is not None}
        if len(steps - {0}) > 1:
            raise UnsupportedError(
                f"step: expected one count for all parameters, got {sorted(steps)}. Megatron writes one; load another "
                "checkpoint."
            )
        carried = {row: group.pop(BOUND_SUM) for row, group in enumerate(groups) if BOUND_SUM in group}
        for group in groups:
            group.pop(SCALES, None)
        self.load_groups(groups)
        ids = [i for group in groups for i in group["params"]]
        for p, i in zip(self.flat_params(), ids, strict=True):
            for key in MOMENTS:
                if state.get(i, {}).get(key) is not None:
                    self.write(p, key, state[i][key])
        if steps:
            self.core.step_count.fill_(max(steps))
            self.core.follow(self.param_groups)
            current = {row: found for row, (step, found) in carried.items() if step == max(steps)}  # no other run since
            self.core.sums.set_by_group(current)
