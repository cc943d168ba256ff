"""ZeRO optimizers of ours over stubs of DeepSpeed's: what its constructors leave, and nothing of its backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.tensor_fragment import get_full_hp_param
from torch import Tensor, nn

from fp8_ds.config import Fp8Config
from fp8_ds.numerics.scale import AmaxHistory
from fp8_ds.optim.core import virtual_flat
from fp8_ds.optim.zero_adamw import ZeroAdamW
from fp8_ds.zero.stage import Fp8Context
from fp8_ds.zero.stage3 import Fp8ZeroStage3
from fp8_ds.zero.stage12 import Fp8ZeroStage12
from support.zero3_host import sharded_parameter

ALIGNED = {"embedding": (16, 128), "up": (64, 128), "down": (128, 64), "gain": (512,)}
"""Shapes that 1, 2 and 4 ranks cut at multiples of 128, with which FP8 states do not depend on the cut."""
RAGGED = {"embedding": (3, 50), "up": (70, 50), "down": (50, 70), "gain": (51,)}
WEIGHTS = ("up", "down")
"""Which of these are in FP8."""


def values_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Float32 values of a model, the same on all ranks, a range of its own for each parameter."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(shape, generator=generator) / 4 ** (1 + i) for i, (name, shape) in enumerate(shapes.items())
    }


class _Host:
    """What both stages have. Masters are float32 of `values`, or their FP8 states if the block asks for them."""

    params: dict[str, Any]
    model_parallel_group: Any = None
    reduce_bucket_size = 10**6
    overflow = False
    clip_grad, loss_scale, model_parallel_rank, dtype = 0.0, 1.0, 0, torch.bfloat16

    def __init__(self, values: dict[str, Tensor], config: Fp8Config, frozen: dict[str, Any]) -> None:
        self.group: Any = dist.group.WORLD
        self.dp_process_group, self.timers = self.group, MagicMock()
        self.offloaded_states: set[Any] = set()
        self.make(values, config.optimizer.states == "fp8")
        has_states = config.optimizer.states == "fp8"
        adam = torch.optim.AdamW(
            [nn.Parameter(torch.zeros(1))] if has_states else self.flat_masters(), lr=1e-2, weight_decay=0.0
        )
        self.optimizer: Any = adam
        if has_states:
            self.optimizer = ZeroAdamW(adam, seed=config.optimizer.seed)
        history = AmaxHistory(2, [448.0, 448.0]) if config.linear.recipe == "delayed" else None
        weights = {name: self.params[name] for name in WEIGHTS} | frozen
        plan: Any = None
        self.context = Fp8Context(config, plan, weights, history)
        self.fp8_init(self.context)  # type: ignore[attr-defined]

    def make(self, values: dict[str, Tensor], has_states: bool) -> None:
        raise NotImplementedError

    def flat_masters(self) -> list[Any]:
        raise NotImplementedError

    def deepspeed_step(self, closure: Any) -> None:
        """DeepSpeed's own step; a test that has it run puts another here."""
        raise AssertionError("DeepSpeed's own step runs")

    def step(self, closure: Any = None) -> None:
        self.deepspeed_step(closure)

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def _model_parallel_all_reduce(self, tensor: Tensor, op: Any) -> None:
        pass

    def _update_scale(self, overflow: bool) -> None:
        pass

    offload_states = reload_states = lambda self, **keys: None

    def masters(self) -> dict[str, Tensor]:
        return {name: safe_get_full_fp32_param(p).clone() for name, p in self.params.items()}

    def states(self) -> dict[str, Tensor]:
        """All that a step of FP8 states may change, whole. Collective."""
        found = {f"{name} master": master for name, master in self.masters().items()}
        for name, p in self.params.items():
            for key in ("exp_avg", "exp_avg_sq") if self.optimizer.core.has_moments else ():
                found[f"{name} {key}"] = safe_get_full_optimizer_state(p, key).clone()
        for name, (codes, scale_inv) in self.weights().items():
            found |= {f"{name} bytes": codes, f"{name} scale_inv": scale_inv}
        return found | {"step": self.optimizer.core.step_count.max().clone()}

    def weights(self) -> dict[str, tuple[Tensor, Tensor]]:
        """name -> (bytes as uint8, scale_inv) of each FP8 weight, whole. Collective."""
        raise NotImplementedError

    def write(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        """As a user does under `GatheredParameters`, to `change` of what is read. Collective."""
        p = self.params[name]
        with torch.no_grad():
            p.copy_(change(p.detach().clone()))

    def read(self, name: str) -> Tensor:
        """As a user does under `GatheredParameters`. Collective."""
        found: Tensor = self.params[name].detach().clone()
        return found


class Host12(_Host):
    """In the place of DeepSpeedZeroOptimizer, with one parameter group."""

    check_grad_overflow, round_robin_gradients, overlap_comm = True, False, False
    use_grad_accum_attribute, gradient_predivide_factor = False, 1.0
    gradient_accumulation_dtype = torch.bfloat16

    def make(self, values: dict[str, Tensor], has_states: bool) -> None:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self.params = {name: nn.Parameter(value.bfloat16()) for name, value in values.items()}
        self.size = size = -(-sum(p.numel() for p in self.params.values()) // (2 * num_ranks)) * 2
        self.padding = torch.zeros(num_ranks * size - sum(p.numel() for p in self.params.values()))
        masters = torch.cat([*(value.flatten() for value in values.values()), self.padding])
        flat = masters.bfloat16()
        for (name, p), part in zip(
            self.params.items(), flat.split([v.numel() for v in values.values()] + [len(self.padding)]), strict=False
        ):
            p.data = part.view(values[name].shape)
            p._hp_mapping, p._dp_group = None, self.group
            p.get_full_hp_param = get_full_hp_param.__get__(p)
        params, own = list(self.params.values()), masters[rank * size : (rank + 1) * size].clone()
        self.bit16_groups = self.round_robin_bit16_groups = [params]
        self.bit16_groups_flat, self.partition_size = [flat], [size]
        self.parallel_partitioned_bit16_groups = [list(flat.split(size))]
        self.real_dp_process_group = [self.group]
        self.single_partition_of_fp32_groups: list[Any] = [nn.Parameter(own)]
        self.param_names = {p: name for name, p in self.params.items()}
        self.averaged_gradients: dict[int, Any] = {0: None}
        self.all_grad_tensors, self.offload_gradient_dict = {0: None}, {}
        starts = torch.tensor([0, *(p.numel() for p in params)]).cumsum(0).tolist()
        places = [range(max(a, rank * size), min(b, (rank + 1) * size)) for a, b in itertools.pairwise(starts)]
        self.parts = {
            name: slice(r.start - a, r.stop - a) for name, r, a in zip(values, places, starts, strict=False) if r
        }
        self.params_in_partition = [[self.params[name] for name in self.parts]]
        self.params_not_in_partition = [[p for name, p in self.params.items() if name not in self.parts]]

    def give(self, gradients: dict[str, Tensor]) -> None:
        """Whole gradients, the same on all ranks, as a backward and its reduction leave this rank's parts."""
        self.averaged_gradients[0] = [gradients[name].flatten()[part].bfloat16() for name, part in self.parts.items()]

    def masters(self) -> dict[str, Tensor]:
        own = self.single_partition_of_fp32_groups[0].detach()
        if own.untyped_storage().nbytes() == 4:
            return super().masters()
        flat = torch.empty(dist.get_world_size() * self.size)
        dist.all_gather_into_tensor(flat, own)
        parts = flat.split([*(p.numel() for p in self.params.values()), len(self.padding)])
        return {name: part.view(p.shape) for (name, p), part in zip(self.params.items(), parts, strict=False)}

    def weights(self) -> dict[str, tuple[Tensor, Tensor]]:
        payloads = {name: self.params[name]._fp8 for name in WEIGHTS}
        return {name: (one.data.view(torch.uint8).clone(), one.scale_inv.clone()) for name, one in payloads.items()}

    def flat_masters(self) -> list[Any]:
        return self.single_partition_of_fp32_groups

    _link_all_hp_params = _lazy_init_hp_params_optimizer_state = lambda self: None


class Host3(_Host):
    """In the place of DeepSpeedZeroOptimizer_Stage3, with one sub-group.

    Attributes:
        num_ended: steps that DeepSpeed's end of a step has seen.
    """

    num_ended: int

    def make(self, values: dict[str, Tensor], has_states: bool) -> None:
        self.num_ended = 0
        self.module: Any = nn.Module()
        self.module.ds_inflight_param_registry = {}
        self.params = {name: sharded_parameter(i, value) for i, (name, value) in enumerate(values.items())}
        params, rank = list(self.params.values()), dist.get_rank()
        for name, p in self.params.items():
            self.module.register_parameter(name, p)
            p._z3_optimizer, p.ds_persist = self, False
        sizes = [p.ds_tensor.ds_numel for p in params]
        flat = torch.cat([p.ds_tensor.data for p in params])
        for p, part in zip(params, flat.split(sizes), strict=True):
            p.ds_tensor.data = part
        masters = [
            torch.cat([value.flatten(), torch.zeros(p.ds_numel_aligned - p.ds_numel)])[rank * n :][:n]
            for p, value, n in zip(params, values.values(), sizes, strict=True)
        ]
        own: Any = virtual_flat(sum(sizes), "cpu") if has_states else nn.Parameter(torch.cat(masters))
        self.fp16_groups, self.sub_group_to_group_id = [params], {0: 0}
        self.fp16_partitioned_groups_flat, self.fp16_partitioned_groups_flat_numel = [flat], [sum(sizes)]
        self.fp32_partitioned_groups_flat, self.lp_param_buffer = [own], flat
        self.persistent_parameters: list[Any] = []
        self.param_names = {p: name for name, p in self.params.items()}
        self.averaged_gradients: dict[int, Any] = {0: None}

    def give(self, gradients: dict[str, Tensor]) -> None:
        """As `Host12.give`."""
        padded = {n: torch.zeros(p.ds_numel_aligned, dtype=torch.bfloat16) for n, p in self.params.items()}
        for name, whole in padded.items():
            whole[: gradients[name].numel()] = gradients[name].flatten()
        self.averaged_gradients[0] = [whole.chunk(dist.get_world_size())[dist.get_rank()] for whole in padded.values()]

    def weights(self) -> dict[str, tuple[Tensor, Tensor]]:
        found, shards = {}, self.fp8.shards  # type: ignore[attr-defined]
        for name in WEIGHTS:
            p = self.params[name]
            shards.gather(shards.of([p])).wait()
            found[name] = p._fp8.data.view(torch.uint8).clone(), p._fp8.scale_inv.clone()
            p.partition()
        return found

    def write(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        p = self.params[name]
        p.all_gather([p])
        with torch._C.DisableTorchFunctionSubclass():
            p.data.copy_(change(p.data.clone()))
        p.partition([p], has_been_updated=True)

    def read(self, name: str) -> Tensor:
        p = self.params[name]
        p.all_gather([p])
        with torch._C.DisableTorchFunctionSubclass():
            found: Tensor = p.data.clone()
        p.partition([p])
        return found

    def flat_masters(self) -> list[Any]:
        return self.fp32_partitioned_groups_flat

    def get_full_hp_param(self, p: Any, optim_state_key: str | None = None) -> Tensor:
        own, _ = self._get_fp32_opt_state_partition(p, True, optim_state_key)
        whole = torch.empty(dist.get_world_size() * own.numel())
        dist.all_gather_into_tensor(whole, own.detach().clone())
        return whole[: p.ds_numel].view(p.ds_shape)

    def _get_fp32_opt_state_partition(self, p: Any, release: bool, key: str | None = None) -> tuple[Tensor, int]:
        row, start = self.fp8.flat.place(p)  # type: ignore[attr-defined]
        return self.fp32_partitioned_groups_flat[row].narrow(0, start, p.ds_tensor.ds_numel), row

    def set_full_hp_param(self, value: Tensor, p: Any, key: str | None = None) -> None:
        raise AssertionError("DeepSpeed's own masters are written")

    set_local_hp_param = set_full_hp_param

    def _post_step(self, timer_names: Any) -> None:
        self.num_ended += 1

    _pre_step = _partition_all_parameters = zero_grad = lambda self, *args, **keys: None
    _reassign_or_swap_out_partitioned_parameters = lambda self, group: None  # noqa: E731


class Zero12(Fp8ZeroStage12, Host12):
    pass


class Zero3(Fp8ZeroStage3, Host3):
    pass


def zero_optimizer(
    stage: int, shapes: dict[str, tuple[int, ...]], frozen: dict[str, Any] | None = None, **block: Any
) -> Any:
    """An FP8 optimizer of ZeRO-3, or of 1 and 2, over a stub. Collective.

    Args:
        frozen: weights that do not train, by name.
        block: the "fp8" block.
    """
    config = Fp8Config.from_block({"enabled": True, "preset": None, **block})
    kind: type = Zero3 if stage == 3 else Zero12
    return kind(values_of(shapes), config, frozen or {})
