"""Megatron's distributed optimizer over `MegatronFp8AdamW`: shards of the parameter buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from fp8_ds.numerics.masters import BY_NAME
from fp8_ds.ops.adamw import AdamShard
from fp8_ds.ops.adamw.dense import MOMENTS
from fp8_ds.optim.core import virtual_flat
from megatron_patches.optimizer_adam import SCALES, MegatronFp8AdamW
from megatron_patches.optimizer_classes import format_of, number_of
from megatron_patches.optimizer_fp8 import Fp8Weights

_MASTER = "param"
"""Key of the master in DistributedOptimizer's own dicts."""

_SHARD_ATTRIBUTES = {
    "shared",
    "allreduce",
    "grad_norm_group",
    "is_gtp_weight_remat",
    "gtp_replica_group",
    "pad_length",
}
"""Attributes of its parameter that Megatron, in one version or another, asks a shard for when it computes norms: in the
main branch `copy_optimizer_param_metadata` and `copy_gtp_attributes`."""


class Fp8DistributedOptimizer(DistributedOptimizer):
    """Megatron's distributed optimizer with FP8 moments; checkpoints are Megatron's own, dense and under its names."""

    optimizer: MegatronFp8AdamW
    _fp8_weights: Fp8Weights | None = None

    @classmethod
    def _build_model_and_main_param_groups(
        cls, gbuf_ranges: Any, param_gbuf_map: Any, opt_group_ranges: Any, config: Any
    ) -> Any:
        """Build Megatron's groups; a shard of FP8 bytes, which has no tensor there, gets one that holds its gradient.

        A bf16 weight's own shard is its `main_param`, of which --log-params-norm takes the norm.
        """
        groups = super()._build_model_and_main_param_groups(gbuf_ranges, param_gbuf_map, opt_group_ranges, config)
        low, _, low_shards, fp32_shards, _ = groups
        for params, shards, others, group in zip(low, low_shards, fp32_shards, opt_group_ranges, strict=True):
            for p, shard in zip(params, shards, strict=True):
                if p.main_param is None and shard is not None:
                    p.main_param = shard
            if all(shard is not None for shard in shards):
                continue
            for i, (p, shard) in enumerate(zip(params, shards, strict=True)):
                if shard is None:
                    buffer, dtype, bucket = param_gbuf_map[p]
                    numel = gbuf_ranges[buffer][dtype][bucket]["param_map"][p]["param"].size
                    shards[i] = virtual_flat(numel, p.device).detach()
                    tensor_parallel.copy_tensor_model_parallel_attributes(shards[i], p)
                    for name in _SHARD_ATTRIBUTES & vars(p).keys():
                        setattr(shards[i], name, getattr(p, name))
            group["orig_group"]["params"] = [*others, *shards]
        return groups

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        rows = {}
        if optimizer is not None:
            rows = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
        super().__init__(optimizer, *args, **kwargs)
        if self.is_stub_optimizer:
            return
        device = torch.device(torch.cuda.current_device())
        chunks = enumerate(self.model_chunks)
        self._fp8_names = {id(p): f"{i}.{name}" for i, chunk in chunks for name, p in chunk.named_parameters()}
        weights = {self._fp8_names[id(p)]: p for buffer in self.buffers for p in buffer.params if is_float8tensor(p)}
        if weights:
            fmt = BY_NAME[self.optimizer.master]
            self._fp8_weights = Fp8Weights(weights, fmt, self.data_parallel_group, device)
        shards = [self._fp8_shard(*pair) for pair in self._fp8_pairs()]
        self.optimizer.is_sharded = True
        self.optimizer.hold(shards, self._fp8_weights.scales if self._fp8_weights else None, device)
        if self._fp8_weights:
            self.optimizer.core.set_weight_rows([rows[id(p)] for p in weights.values()])
            self._fp8_take_values()

    def _fp8_shard(self, model_param: Any, shard_param: Any) -> AdamShard:
        name = self._fp8_names[id(model_param)]
        start = self._get_model_param_range_map(model_param)["param"].start
        index, fmt, hi = 0, format_of(shard_param), shard_param.detach()
        if is_float8tensor(model_param):
            assert self._fp8_weights is not None
            index, fmt = self._fp8_weights.index(model_param), BY_NAME[self.optimizer.master]
            hi = model_param._data.view(-1)[start : start + shard_param.numel()]
        return AdamShard(name, hi.numel(), start, number_of(name, model_param), 0, index, fmt, hi)

    def _fp8_pairs(self) -> Iterator[tuple[Any, Any]]:
        """Yield (parameter of the model, the tensor that is updated for it), in the order of the param groups."""
        groups = self.optimizer.param_groups
        for fp32, low, group in zip(self.model_fp32_groups, self.model_float16_groups, groups, strict=True):
            yield from zip([*fp32, *low], group["params"], strict=True)

    def _fp8_tensor_of(self, model_param: Any) -> Any:
        group, order = self.model_param_group_index_map[model_param]
        return self.optimizer.param_groups[group]["params"][order]

    def _fp8_take_values(self) -> None:
        assert self._fp8_weights is not None
        shards = {shard.scale_index: shard for shard in self.optimizer.core.shards if shard.fmt.is_fp8}
        self._fp8_weights.take_values(shards, self.optimizer.seed)

    def _copy_main_params_to_model_params(self) -> None:
        super()._copy_main_params_to_model_params()  # nothing: the step has written weights
        if self._fp8_weights:
            self._fp8_weights.publish()

    @torch.no_grad()
    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        self.optimizer.forget_masters()
        if self._fp8_weights and state_dict is None:
            self._fp8_take_values()
        if state_dict is None:
            return
        source = self._build_model_param_to_state_dict_param_map(state_dict)
        for model_param, _ in self._fp8_pairs():
            param_range = self._get_model_param_range_map(model_param)["param"]
            self._fp8_write_master(model_param, source[model_param].reshape(-1)[param_range.start : param_range.end])
        self._fp8_finish_loading()

    def _get_main_param_and_optimizer_states(self, model_param: Any) -> dict[str, Tensor]:
        p = self._fp8_tensor_of(model_param)
        return {_MASTER: self.optimizer.read(p, None), **{key: self.optimizer.read(p, key) for key in MOMENTS}}

    def _set_main_param_and_optimizer_states(self, model_param: Any, tensors: dict[str, Any]) -> None:
        self._fp8_write_master(model_param, tensors[_MASTER])
        for key in MOMENTS:
            self.optimizer.write(self._fp8_tensor_of(model_param), key, tensors[key])

    def _fp8_write_master(self, model_param: Any, value: Tensor) -> None:
        p = self._fp8_tensor_of(model_param)
        if is_float8tensor(model_param):
            assert self._fp8_weights is not None
            self._fp8_weights.keep(self.optimizer.shard_of(p), value)
        else:
            self.optimizer.write(p, None, value)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = super().state_dict()
        if self._fp8_weights:
            # Of all weights, other ranks' too: Megatron saves what one rank of data parallelism says here.
            state["optimizer"]["param_groups"][0][SCALES] = self._fp8_weights.scale_inv_by_name()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._fp8_weights:
            saved = [group.get(SCALES, {}) for group in state_dict["optimizer"]["param_groups"]]
            self._fp8_weights.saved_scales = {name: value for one in saved for name, value in one.items()}
        super().load_state_dict(state_dict)
        # dp_zero_gather_scatter goes through `load_parameter_state_from_dp_zero`, which has finished: nothing is kept.
        if state_dict.get("param_state_sharding_type", "dp_zero_gather_scatter") != "dp_zero_gather_scatter":
            self._fp8_finish_loading()

    def load_parameter_state_from_dp_zero(self, state_dict: Any, **kwargs: Any) -> None:
        super().load_parameter_state_from_dp_zero(state_dict, **kwargs)
        self._fp8_finish_loading()

    def _fp8_finish_loading(self) -> None:
        """Round loaded masters to this rank's weights, and gather: the others' may be from elsewhere. Collective."""
        if self._fp8_weights:
            self._fp8_weights.take_loaded()
        for chunk in self.model_chunks:
            chunk.start_param_sync(force_sync=True)
