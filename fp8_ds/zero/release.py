"""Gradient release: weights are updated during the backward, bucket by bucket, and their gradients freed at once.

Exact clipping needs all reduced gradients at once: `release_clipping: "exact"` with clipping holds the reduced shards
until `step` (2 bytes per parameter and rank share) and this module has nothing to do. "delayed_norm" clips by the
global norm of the step before; a first step is not clipped.

A bucket with an infinite or NaN gradient is skipped, alone: buckets before it have been updated already. Ranks of model
parallelism would skip different ones, and parameters that all of them hold would differ: this is refused.

In stages 1 and 2 the copy of reduced gradients into the partition becomes their update; in stage 3 the copy of reduced
gradient shards into their buffer.

Source: LOMO (arXiv 2306.09782).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.comm.layout import OUTSTANDING_UPDATE_BYTES
from fp8_ds.errors import ConfigError
from fp8_ds.numerics.scale import AmaxHistory
from fp8_ds.ops.adamw import StepInputs
from fp8_ds.ops.step_cache import StepCache
from fp8_ds.optim.core import AdamCore
from fp8_ds.zero.norm import HyperparameterCheck, clip_factor
from fp8_ds.zero.split_states import SplitStates
from fp8_ds.zero.stage import Fp8Context, ZeroHost

NO_GRADIENT = (
    "expected release false to read or write gradients after the backward, got true: they are freed once used. "
    'Set "fp8": {"optimizer": {"release": false}}, or look at them in a hook of the parameter.'
)


def refuse_model_parallel(group: Any) -> None:
    """Raise ConfigError where `group`, of tensor and model parallelism (None: without), has several ranks."""
    size = 1 if group is None else dist.get_world_size(group)
    if size > 1:
        raise ConfigError(
            f"fp8.optimizer.release: expected false with tensor or model parallelism of {size} ranks, got true. They "
            "would skip and clip a bucket each by its own gradients, and weights that all of them hold would differ. "
            'Set "release": false; with "release_clipping": "exact" and gradient_clipping, reduced shards are held and '
            "it may stay."
        )


def bucket_size(copies: int, dtype: torch.dtype) -> int:
    """Return the most elements of a bucket of which there are `copies` in memory, in the dtype of gradients."""
    return OUTSTANDING_UPDATE_BYTES // copies // dtype.itemsize


class ReleaseUpdater:
    """Updater of the shards of one bucket's parameters, as soon as their gradients are reduced.

    Args:
        num_parameters: number of optimized parameters, the same on all ranks.
        scale_indices: entry in the scale vectors by name, of FP8 weights with split masters.
        max_norm: DeepSpeed's gradient_clipping, applied to the norm of the step before; 0: none.
    """

    def __init__(
        self,
        core: AdamCore,
        num_parameters: int,
        scale_indices: dict[str, int],
        group: Any,
        max_norm: float,
    ) -> None:
        self.core = core
        self.group = group
        self.max_norm = max_norm
        device = core.device
        self._num_parameters = num_parameters
        self._scale_indices = scale_indices
        self._shard_index = {shard.name: index for index, shard in enumerate(core.shards)}
        self.alike = HyperparameterCheck(core, group)
        self._inputs: StepInputs | None = None
        self._expected: set[str] = set()
        self._square_sum = torch.zeros((), dtype=torch.float32, device=device)
        self._indices: StepCache[tuple[str, ...], Tensor] = StepCache()
        self.last_norm = torch.zeros((), dtype=torch.float32, device=device)
        """Global norm of the last step without infinities and NaN."""

    def expect(self, names: Sequence[str]) -> None:
        """Record gradients of the parameters `names`; RuntimeError if one comes twice before `finish`."""
        if twice := self._expected.intersection(names):
            raise RuntimeError(
                f"fp8.optimizer.release: expected one backward per step, got a second gradient of {sorted(twice)[0]}. "
                "Call engine.step() after every backward, or turn release off."
            )
        self._expected.update(names)

    @torch.no_grad()
    def update(
        self, names: Sequence[str], grads: dict[str, Tensor], param_groups: Sequence[dict[str, Any]], loss_scale: float
    ) -> None:
        """Update the parameters `names` (the same on all ranks). Collective; no host synchronisation.

        Args:
            grads: this rank's reduced gradient shards by name, 1-D; a name may be missing where it holds no shard.
                They may be freed once the current stream is done with them.
        """
        if self._inputs is None:
            self._inputs = self.core.begin(param_groups)
        names, held = list(names), [name for name in names if name in grads]
        squares = self._squares(names, held, grads, param_groups)
        total = squares.sum()
        self._square_sum += total
        skip = (~torch.isfinite(total)).int()
        factor = clip_factor(self.last_norm, self.max_norm, loss_scale)
        chosen = [self._scale_indices[name] for name in names if name in self._scale_indices]
        indices = self._entries(("scales", *names), chosen)
        scales = self.core.scales
        if indices.numel():
            kept = torch.where(skip == 0, scales.next_scale_inv[indices], scales.previous_scale_inv[indices])
            scales.next_scale_inv[indices] = kept
        inputs = replace(self._inputs, skip=skip, grad_scale=factor)
        if held:
            self.core.run([grads[name] for name in held], inputs, [self._shard_index[name] for name in held])
        if indices.numel():
            scales.commit(indices)

    @torch.no_grad()
    def finish(self, history: AmaxHistory | None) -> Tensor:
        """End the step, start reducing amaxes, and return the gradient norm before clipping (float32, 0-dim)."""
        norm = self._square_sum.sqrt()
        self.last_norm.copy_(torch.where(torch.isfinite(norm), norm, self.last_norm))
        self._square_sum.zero_()  # in place, both: a CUDA graph of an update reads and writes them where they are
        if self._inputs is not None and self.core.sums.any_moved:  # what was skipped or has no gradient counts, too
            self.core.sums.keep(~torch.isfinite(norm) if len(self._expected) == self._num_parameters else None)
        self._expected.clear()
        self._inputs = None
        self._indices.next_step()
        scales = self.core.scales
        if history is not None and scales.extra.numel():
            scales.extra.copy_(history.amax_local)
        scales.start_reduce()
        return norm

    def restart(self) -> None:
        """Forget a backward that began before a checkpoint was loaded; weights are as they were."""
        self._square_sum.zero_()
        self._expected.clear()
        self._inputs = None

    def _squares(
        self, names: list[str], held: list[str], grads: dict[str, Tensor], param_groups: Sequence[dict[str, Any]]
    ) -> Tensor:
        """Return float32 [len(names)]: squared gradient norms over all ranks; NaN if ranks would step differently."""
        squares = torch.zeros(len(names), dtype=torch.float32, device=self.core.device)
        if held:
            norms = torch.stack(list(torch._foreach_norm([grads[name] for name in held], 2, dtype=torch.float32)))
            if len(held) == len(names):
                squares = norms.square()
            else:
                place = {name: position for position, name in enumerate(names)}
                squares[self._entries(("held", *names), [place[name] for name in held])] = norms.square()
        if dist.get_world_size(self.group) > 1:
            squares = self.alike.sum(squares, param_groups)
        return squares

    def _entries(self, key: tuple[str, ...], values: list[int]) -> Tensor:
        """Return `values` on the device; cached, since buckets are mostly the same in every step."""
        return self._indices.get(key, lambda: torch.tensor(values, dtype=torch.long, device=self.core.device))

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a bit-exact resume needs, in builtin types."""
        return {"last_norm": float(self.last_norm)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_norm.fill_(state["last_norm"])


def make_release(
    host: ZeroHost, context: Fp8Context, states: SplitStates, num_parameters: int
) -> ReleaseUpdater | None:
    """Make the updater of gradient release, if the configuration has it, and tell `context` and `states`."""
    if not context.config.optimizer.releases(host.clip_grad):
        return None
    indices = {name: index for index, name in enumerate(states.names)}
    made = ReleaseUpdater(states.core, num_parameters, indices, host.dp_process_group, host.clip_grad)
    context.release, states.alike = made, made.alike
    return made
