"""Fp8AdamW: Adam and AdamW with moments of one byte each and master weights of 0 to 2 bytes beside the weight."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from fp8_ds.comm.layout import ShardRange
from fp8_ds.errors import UnsupportedError
from fp8_ds.nn.linear.parameter import retype
from fp8_ds.nn.linear.payload import Fp8Payload
from fp8_ds.numerics.formats import E4M3
from fp8_ds.numerics.masters import BF16_8, BY_NAME, FP32, MasterFormat
from fp8_ds.numerics.new_masters import overwrite
from fp8_ds.numerics.predicted import PredictedScales, check_betas
from fp8_ds.numerics.scale import amax_of
from fp8_ds.ops.adamw import AdamShard
from fp8_ds.ops.adamw.dense import allocate_lo, write_first, write_low
from fp8_ds.optim.core import AdamCore, FlatBuffer
from fp8_ds.optim.param_state import ParamState, checked_state

SMALLEST_EPS = 1e-30
"""The smallest eps; its reciprocal is a normal float32."""


class AdamOptimizer(torch.optim.Optimizer):
    """Adam or AdamW, whose states lie in an AdamCore; a subclass steps it, and says what `state_dict` holds.

    Args:
        params, defaults: as in torch.optim.Optimizer.
        decoupled: true for AdamW, false for Adam.
        seed: seed of the rounding noise of 8-bit low parts.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any], *, decoupled: bool, seed: int) -> None:
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

    def flat_params(self) -> list[Tensor]:
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
        if self.has_core:
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

    def _state_dict_of(self, dense: Mapping[Tensor, dict[str, Tensor]]) -> dict[str, Any]:
        """Return what torch's `state_dict` returns with `dense` in the place of `state`."""
        held = self.state
        self.state = defaultdict(dict, dense)
        try:
            return super().state_dict()
        finally:
            self.state = held

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


class Fp8AdamW(AdamOptimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) or, with `decoupled=False`, Adam with L2 decay.

    A parameter's master weight follows from its dtype: float32 is its own master; bf16 gets 8 more bits ("bf16_8").
    A param group may say otherwise with the key "master": "fp32" keeps float32 masters of bf16 parameters; "e4m19" and
    "e4m11" store its bf16 parameters in FP8, the byte being the high part of the master (for the weights of Fp8Linear
    layers). Those become `Fp8Parameter`s in place: `p.data` is a placeholder, readers get de-quantised values. Steps
    start from values written into a parameter and from data that replaces its own; shape, dtype and device must stay.

    Differences from torch.optim.AdamW: the update is clamped to the bound that exact Adam obeys; a step with an
    infinite or NaN gradient is skipped as a whole; `state_dict` has float32 moments under torch's names, "master" where
    the master is not the parameter ("scale_inv" beside it in FP8), and "bound_sum" where betas have changed. After the
    first step `state[p]` has the same entries, each decoded into a copy when it is read and quantised when it is set.

    Args:
        params: parameters or param groups, all on one device.
        lr: number or tensor of one element (read on the device).
        betas: with beta1**2 < beta2.
        eps: >= 1e-30.
        weight_decay: >= 0.
        decoupled: true for AdamW, false for Adam.
        seed: seed of the rounding noise of 8-bit low parts.
        check_finite: whether to look for infinities and NaN in the gradients first (one more read of them).

    Raises:
        ValueError: a number out of its range, an unknown master, a dtype that is neither float32 nor bf16, a parameter
            given twice.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        decoupled: bool = True,
        seed: int = 0,
        check_finite: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "master": None}
        super().__init__(params, defaults, decoupled=decoupled, seed=seed)
        self.check_finite = check_finite
        for group in self.param_groups:
            check_group(group)
        self._build()

    def _build(self) -> None:
        """Make masters for all parameters; retype bf16 ones of groups with FP8 masters."""
        chosen = [(p, g, _format_of(p, group)) for g, group in enumerate(self.param_groups) for p in group["params"]]
        if not chosen:
            raise ValueError("params: expected at least one parameter, got none.")
        if len({id(p) for p, _, _ in chosen}) < len(chosen):
            raise ValueError("params: expected every parameter once, got one twice. It would have two states.")
        device = chosen[0][0].device
        scales = PredictedScales(sum(fmt.is_fp8 for _, _, fmt in chosen), device)
        flats, index, no_data = [], 0, torch.empty(0, dtype=torch.float32)
        for row, (p, _, fmt) in enumerate(chosen):
            if p.device != device:
                raise ValueError(f"params: expected one device, got {device} and {p.device}. Use one optimizer each.")
            shard = AdamShard(f"parameter {row}", p.numel(), 0, row, row, index, fmt, hi=no_data)
            flats.append(FlatBuffer(row, p.numel(), [(ShardRange(0, p.numel()), shard)]))
            index += fmt.is_fp8
        core = AdamCore(flats, [g for _, g, _ in chosen], scales, device, self.decoupled, self.seed)
        self.manage(core)
        amaxes = [amax_of(p.detach()) for p, _, fmt in chosen if fmt.is_fp8]
        if amaxes:
            scales.set(torch.stack(amaxes))
        for (p, _, _), shard in zip(chosen, core.shards, strict=True):
            self._adopt(p, shard)
        self._params = [ParamState(core, row, p) for row, (p, _, _) in enumerate(chosen)]

    def _follow(self) -> None:
        """Update masters and moments to changes of parameters and of `state`; the groups must be the same."""
        params = self.flat_params()
        if [id(p) for p in params] != [id(held.param) for held in self._params]:
            raise UnsupportedError(
                f"param_groups: expected the {len(self._params)} parameters of construction, got {len(params)}, some "
                "of them others. Make a new optimizer and load the state_dict of this one."
            )
        has_moments = self.core.has_moments
        for row, held in enumerate(self._params):
            held.follow()
            entry = self.state.get(held.param)
            if entry is held:
                continue
            if entry:
                checked = checked_state(held.shard.name, held.param.shape, entry)
                self.core.follow(self.param_groups)
                held.load(checked)
            elif has_moments:
                self.core.forget(row)

    @torch.no_grad()
    def _adopt(self, p: Tensor, shard: AdamShard) -> None:
        """Set the master of a shard from `p`, in the memory of `p` where possible; retype `p` if its master is FP8."""
        flat = p.detach().contiguous().view(-1)
        allocate_lo(shard, p.device)
        if not shard.fmt.is_fp8:
            shard.hi = flat if shard.fmt.is_split else flat.float()
            return
        shard.hi = torch.empty(p.numel(), dtype=torch.uint8, device=p.device)
        scales, index = self.core.scales, shard.scale_index
        write_first(shard, flat, scales, self.seed)
        payload = Fp8Payload(shard.name, scales.scale[index], scales.scale_inv[index], p.dtype, p.device)
        payload.data = shard.hi.view(E4M3.torch_dtype).view(p.shape)
        payload.write = lambda value: self._overwrite(shard, value)
        retype(p, payload)

    @torch.no_grad()
    def _overwrite(self, shard: AdamShard, value: Tensor) -> None:
        """Make a value that a user wrote into an FP8 parameter its master, except elements that equal what was read."""
        if not shard.numel:
            return
        scales, flat = self.core.scales, value.reshape(-1)
        kept = overwrite(shard.hi, flat, scales, shard.scale_index, shard.fmt)
        write_low(shard, flat, kept, scales.scale_inv)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow()
        core, grads = self.core, [_flat_grad(held.param) for held in self._params]
        present = [grad for grad in grads if grad is not None]
        if not present:
            return loss
        skip = _has_nonfinite(present) if self.check_finite else None
        moves = None
        if len(present) < len(grads):
            moves = torch.tensor([grad is not None for grad in grads], device=core.device)
        inputs = core.begin(self.param_groups, skip=skip, moves=moves)
        core.run(grads, inputs)
        core.end()
        for held, grad in zip(self._params, grads, strict=True):
            if grad is not None:
                held.write_back()
                torch.autograd.graph.increment_version(held.param)  # a kernel's writes are unknown to autograd
        self.state.update({held.param: held for held in self._params})  # by which others see that there are moments
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state that torch's Adam would: "step", "exp_avg", "exp_avg_sq" in float32. Lossless.

        "master" (float32) is there where it is not the parameter, and with it "scale_inv" (0-dim) where the parameter
        is FP8. Such a parameter has a state of zeros before the first step, too.
        """
        self._follow()
        self.core.follow(self.param_groups)
        # Before the first step a parameter is its master, but for FP8's first one, of which it is the high part.
        has_moments = self.core.has_moments
        return self._state_dict_of(
            {held.param: dict(held) for held in self._params if has_moments or held.shard.fmt.is_fp8}
        )

    def _load_states(self, saved_groups: Sequence[dict[str, Any]], states: Sequence[Mapping[str, Any] | None]) -> None:
        checked = [
            checked_state(held.shard.name, held.param.shape, state) if state else None
            for held, state in zip(self._params, states, strict=True)
        ]
        self._follow()
        self.load_groups(saved_groups)
        self.core.follow(self.param_groups)
        for row, (held, state) in enumerate(zip(self._params, checked, strict=True)):
            if state:
                held.load(state)
            else:
                self.core.forget(row)
        if self.core.has_moments:
            self.state.update({held.param: held for held in self._params})


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


def _format_of(p: Tensor, group: dict[str, Any]) -> MasterFormat:
    if p.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"params: expected float32 or bf16, got {p.dtype} of shape {tuple(p.shape)}.")
    master = group["master"]
    if p.dtype == torch.float32:
        if master not in (None, "fp32"):
            raise ValueError(f"master: expected None or fp32 for float32 parameters, got {master!r}. Make them bf16.")
        return FP32
    return BF16_8 if master is None else BY_NAME[master]


def _flat_grad(p: Tensor) -> Tensor | None:
    if p.grad is None:
        return None
    if p.grad.is_sparse:
        raise UnsupportedError("gradients: expected dense ones, got a sparse one. FP8 states have no sparse step.")
    return p.grad.detach().contiguous().view(-1)


def _has_nonfinite(grads: list[Tensor]) -> Tensor:
    """Return int32, 0-dim on the device: 1 if a gradient holds an infinity, a NaN, or overflows when squared."""
    norms = torch.stack(list(torch._foreach_norm(grads, 2, dtype=torch.float32)))
    return (~torch.isfinite(norms).all()).int()
