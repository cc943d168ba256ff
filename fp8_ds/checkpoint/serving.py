"""Export of a training checkpoint to an FP8 folder for servers: its layers and their form, from its own state.

Servers read scales a row, or a block of 128 x 128. Each can hold the bytes that training computes with if its scales
are as fine as theirs or finer; block scales must be powers of two for it, because servers round others to such when
they load, and quantise the weights again by those. A weight in another form is quantised from its master, by scales
that are powers of two.

Sources: vllm 0.33, model_executor/layers/quantization/utils/fp8_utils.py `requant_weight_ue8m0_inplace`; sglang 0.5.23,
srt/layers/quantization/fp8_utils.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fp8_ds.checkpoint.fp8_folder import BLOCKS, ROWS, ServingFormat
from fp8_ds.checkpoint.state import master_of
from fp8_ds.config import ScheduleConfig
from fp8_ds.config.schedule import PrecisionSchedule, saved_overrides
from fp8_ds.errors import CheckpointError, ConfigError, UnsupportedError
from fp8_ds.nn.linear.payload import Granularity, granularity_of, per_element
from fp8_ds.nn.plan.plan import LayerPlan, Plan
from fp8_ds.numerics.formats import E4M3
from fp8_ds.numerics.masters import BY_NAME, MasterFormat, encode
from fp8_ds.ops.blockwise import BLOCK
from fp8_ds.ops.quantize import quantize

FORMATS = {"fp8-block": BLOCKS, "compressed-tensors": ROWS}
_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
"""Linears that servers join into one: all of them are in FP8, or none."""
_HEADS = ("lm_head", "embed_out")
"""Linears that servers do not quantise."""


@dataclass(frozen=True)
class Export:
    """An FP8 folder to be made of a checkpoint.

    Attributes:
        layers: linears that are in FP8, by the names of their weights.
        others: names of the linears that stay bf16.
        own: which elements share a scale in training.
        master: format of the masters, of which split ones have the codes as their upper part.
        scale_inv: scales of split masters at the save, by names of weights; others follow from largest magnitudes.
        form: "fp8-block" or "compressed-tensors".
    """

    layers: Mapping[str, LayerPlan]
    others: tuple[str, ...]
    own: Granularity
    master: MasterFormat
    scale_inv: Mapping[str, Tensor]
    form: str

    @property
    def is_own(self) -> bool:
        """Whether the bytes are those that training computes with."""
        return _holds(self.form, self.own)

    def describe(self) -> str:
        """Say in a line whose the bytes are, and what stays bf16."""
        if self.is_own:
            text = f"{self.form}: {len(self.layers)} linears with the bytes that training computes with"
        else:
            kept = next(name for name in FORMATS if _holds(name, self.own))
            text = (
                f"{self.form}: {len(self.layers)} linears, quantised from their masters by powers of two, other bytes "
                f"than training's, which --format {kept} keeps"
            )
        return f"{text}; in bf16: {', '.join(self.others) or 'no linear'}"

    def tensors(self, masters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield what the folder holds: codes [out, in] and scales of FP8 weights, other floating tensors in bf16.

        Args:
            masters: all tensors of the checkpoint, by name; float32 where training has masters.
        """
        stored = FORMATS[self.form]
        for name, master in masters:
            if name not in self.layers:
                yield name, master.bfloat16() if master.is_floating_point() else master
                continue
            codes, scale_inv = self._quantized(name, master.float(), stored)
            yield name, codes
            yield f"{name.removesuffix('weight')}{stored.scale}", scale_inv

    def stored(self, name: str, codes: Tensor, scale_inv: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield what the folder holds of an FP8 weight whose form it keeps (`is_own`).

        Args:
            codes: float8_e4m3fn [out, in], of training.
            scale_inv: its grid of scales there, float32.
        """
        form = FORMATS[self.form]
        yield name, codes
        yield (
            f"{name.removesuffix('weight')}{form.scale}",
            scale_inv.expand(form.granularity.grid(codes.shape)).contiguous(),
        )

    def _quantized(self, name: str, master: Tensor, stored: ServingFormat) -> tuple[Tensor, Tensor]:
        grid = stored.granularity.grid(master.shape)
        used = self.own if self.is_own else replace(stored.granularity, is_pow2=True)
        if self.is_own and self.master.is_split:
            scale_inv = self.scale_inv[name].float()
            codes = encode(master, self.master, scale_inv)[0].view(E4M3.torch_dtype)
        else:
            scale, scale_inv = used.scales(used.amax(master.reshape(-1), master.shape))
            codes = quantize(master, per_element(scale, master.shape), E4M3)
        if not bool(scale_inv.isfinite().all()):
            raise CheckpointError(
                f"convert: expected finite masters, got others in {name}. Convert a checkpoint of before they came."
            )
        return codes, scale_inv.expand(grid).contiguous()

    def quantization_config(self) -> dict[str, Any]:
        """Return the entry of config.json, with full names of what is not in FP8: vLLM takes no parts of names."""
        if self.form == "fp8-block":
            return {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "weight_block_size": [BLOCK, BLOCK],
                "modules_to_not_convert": list(self.others),
            }
        common = {"num_bits": 8, "type": "float", "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": {**common, "strategy": "channel", "dynamic": False},
            "input_activations": {**common, "strategy": "token", "dynamic": True},
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "ignore": list(self.others),
            "config_groups": {"group_0": group},
        }


def export_of(state: Mapping[str, Any], shapes: Mapping[str, Any], form: str | None) -> Export:
    """Return what is made of a checkpoint whose own state is `state` (checkpoint/state.py).

    Args:
        shapes: of the trainable parameters, by name.
        form: a name in FORMATS; None: the one that keeps training's bytes, and of both fp8-block where all sizes are
            multiples of 128.

    Raises:
        ConfigError: there is no such form.
        UnsupportedError: no linear is in FP8, or the model has experts, a Conv1D, or frozen weights in FP8.
    """
    if form is not None and form not in FORMATS:
        raise ConfigError(f"form: expected one of {', '.join(FORMATS)}, got {form!r}. Name one.")
    config, plan = state["config"], Plan.from_state(state["plan"])
    in_fp8 = {row.fqn for row in plan.layers if row.converted and row.fqn.rpartition(".")[2] not in _HEADS}
    in_fp8 -= _in_bf16(config, state.get("precision"), in_fp8)
    in_fp8 -= {fqn for group in _split_groups(in_fp8, [row.fqn for row in plan.layers]) for fqn in group}
    rows = [row for row in plan.layers if row.fqn in in_fp8]
    if odd := _not_written_yet(plan, {row.fqn for row in rows}, shapes):
        raise UnsupportedError(
            f"convert: expected a model of trained nn.Linear, got {odd}, whose export is not written yet. Convert to "
            "safetensors, and quantise them for your server."
        )
    if not rows:
        raise UnsupportedError("convert: expected a linear in FP8 at the save, got none. Convert to safetensors.")
    linear, master = config["linear"], BY_NAME[master_of(config)]
    is_split = master.is_split
    is_pow2 = is_split or linear.get("weight_scales") == "power_of_two"
    own = granularity_of(linear.get("recipe", "tensorwise"), is_split=is_split, is_pow2=is_pow2)
    if form is None:
        fits = all(size % BLOCK == 0 for row in rows for size in (row.out_features, row.in_features))
        form = "fp8-block" if _holds("fp8-block", own) and (fits or not _holds("compressed-tensors", own)) else ""
        form = form or "compressed-tensors"
    others = tuple(row.fqn for row in plan.layers if row.fqn not in in_fp8)
    scale_inv = state["scale_inv"] if is_split else {}
    return Export({row.weight_name: row for row in rows}, others, own, master, scale_inv, form)


def _not_written_yet(plan: Plan, in_fp8: Collection[str], shapes: Mapping[str, Any]) -> str:
    """Name what of a model cannot be exported: what servers store in another way; empty if there is nothing."""
    experts = [row.fqn for row in plan.layers if row.num_experts] + [name for name in shapes if ".experts." in name]
    if experts:
        return f"experts ({experts[0]})"
    for row in plan.layers:
        shape = tuple(shapes.get(row.weight_name, ()))
        if shape and shape != row.shape:
            return f"a Conv1D or a part of a linear ({row.fqn}: {list(shape)} for {list(row.shape)})"
        if not shape and row.fqn in in_fp8:
            return f"frozen weights in FP8 ({row.fqn})"
    return ""


def _holds(form: str, own: Granularity) -> bool:
    """Whether `form` can hold the bytes of weights whose scales are `own`."""
    if form == "fp8-block":
        return own.is_pow2 and (own.is_tensor or own.block == (BLOCK, BLOCK))
    return own.is_tensor or own.is_row


def _in_bf16(config: Mapping[str, Any], precision: Mapping[str, Any] | None, names: Collection[str]) -> frozenset[str]:
    """Return the layers that training held in bf16 for what they are, and not for the step."""
    layers = (config.get("schedule") or {}).get("layers") or {}
    schedule = PrecisionSchedule.of(ScheduleConfig(layers=layers), names, None, may_miss=True)
    plain = () if precision is None else precision.get("plain", ())
    return schedule.in_bf16(sorted(names), 0, saved_overrides(precision), plain)


def _split_groups(in_fp8: Collection[str], names: Collection[str]) -> Iterator[set[str]]:
    """Yield the linears in FP8 of each group that servers join and that is in FP8 in part."""
    for parts in _TOGETHER:
        owners = {name.removesuffix(f".{parts[0]}") for name in names if name.endswith(f".{parts[0]}")}
        for owner in owners:
            group = {f"{owner}.{part}" for part in parts if f"{owner}.{part}" in names}
            if (inside := group & set(in_fp8)) != group:
                yield inside
