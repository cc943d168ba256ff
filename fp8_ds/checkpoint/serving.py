"""Export of a training checkpoint to an FP8 folder for servers: its layers and their form, from its own state.

Servers read scales a row, or a block of 128 x 128. Each can hold the bytes that training computes with if its scales
are as fine as theirs or finer; block scales must be powers of two for it, because servers round others to such when
they load, and quantise the weights again by those. A weight in another form is quantised from its master, by scales
that are powers of two.

A layer's experts are matrices of their own, as in the model's own files, all of them in FP8 or none.

Sources: vllm 0.33, model_executor/layers/quantization/utils/fp8_utils.py `requant_weight_ue8m0_inplace`,
utils/quant_utils.py `is_layer_skipped`, compressed_tensors/compressed_tensors_moe.py `get_moe_method`; sglang 0.5.23,
srt/layers/quantization/fp8_utils.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fp8_ds.checkpoint.fp8_folder import BLOCKS, ROWS, ServingFormat
from fp8_ds.checkpoint.saved_names import SavedNames
from fp8_ds.checkpoint.state import master_of
from fp8_ds.config import ScheduleConfig
from fp8_ds.config.schedule import PrecisionSchedule, saved_overrides
from fp8_ds.errors import CheckpointError, ConfigError, UnsupportedError
from fp8_ds.nn.linear.payload import Granularity, granularity_of, per_element
from fp8_ds.nn.plan.plan import LayerPlan, Plan
from fp8_ds.numerics.formats import E4M3
from fp8_ds.numerics.masters import BY_NAME, MasterFormat, encode
from fp8_ds.numerics.scale import MANTISSA_BITS
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
_HEADS = ("lm_head", "embed_out", "score", "classifier", "qa_outputs", "v_head")
"""Linears that servers do not quantise."""
_EXPERTS = ".experts"
_MINUS_ZERO = 0x80
_ASKED_FOR = ("0.gate_proj", "0.up_proj", "0.down_proj")
"""Names below a layer's experts by which vLLM asks whether compressed-tensors leaves them out, whatever they are."""


@dataclass(frozen=True)
class Export:
    """An FP8 folder to be made of a checkpoint.

    Attributes:
        layers: linears and weights of experts that are in FP8, by the names of their weights in training.
        others: names of those that stay bf16.
        own: which elements share a scale in training.
        master: format of the masters, of which split ones have the codes as their upper part.
        scale_inv: scales of split masters at the save, by names of weights; others follow from largest magnitudes.
        form: "fp8-block" or "compressed-tensors".
        names: names of tensors in the folder.
        left_out: names that modules have in the folder which are not in FP8 and could be.
        matrices: shapes of the folder's FP8 weights, by name.
    """

    layers: Mapping[str, LayerPlan]
    others: tuple[str, ...]
    own: Granularity
    master: MasterFormat
    scale_inv: Mapping[str, Tensor]
    form: str
    names: SavedNames
    left_out: tuple[str, ...]
    matrices: Mapping[str, tuple[int, ...]]

    @property
    def is_own(self) -> bool:
        """Whether the bytes are those that training computes with."""
        return _holds(self.form, self.own)

    def describe(self) -> str:
        """Say in a line whose the bytes are, and what stays bf16."""
        has_experts = any(row.num_experts for row in self.layers.values())
        what = f"{len(self.layers)} {'linears and weights of experts' if has_experts else 'linears'}"
        if self.is_own:
            text = f"{self.form}: {what} with the bytes that training computes with"
        else:
            kept = next(name for name in FORMATS if _holds(name, self.own))
            text = (
                f"{self.form}: {what}, quantised from their masters by powers of two, other bytes "
                f"than training's, which --format {kept} keeps"
            )
        return f"{text}; in bf16: {', '.join(self.others) or 'no linear'}"

    def tensors(self, masters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield what the folder holds of all tensors, as `saved` does.

        Args:
            masters: all tensors of the checkpoint, by name; float32 where training has masters.
        """
        for name, master in masters:
            yield from self.saved(name, master)

    def saved(self, name: str, master: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield what the folder holds of one tensor: codes [out, in] and scales of FP8 weights, else bf16 of floats."""
        if name not in self.layers:
            yield from self.names.saved(name, master.bfloat16() if master.is_floating_point() else master).items()
            return
        stored, master = FORMATS[self.form], master.float()
        scales = self._scales(name, master, stored) if self.is_own else None  # of all experts
        for key, part in self.names.saved(name, master).items():
            codes, scale_inv = self._quantized(name, part, stored, scales)
            yield key, codes
            yield f"{key.removesuffix('weight')}{stored.scale}", scale_inv

    def stored(self, name: str, codes: Tensor, scale_inv: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield what the folder holds of an FP8 weight whose form it keeps (`is_own`).

        Args:
            codes: float8_e4m3fn of the weight's shape, of training.
            scale_inv: its grid of scales there, float32.
        """
        stored = FORMATS[self.form]
        _refuse_broken(name, scale_inv)
        scale_inv = scale_inv.view(1, 1) if self.own.is_tensor else scale_inv
        for key, part in self.names.saved(name, codes).items():
            yield key, part
            grid = stored.granularity.grid(part.shape)
            yield f"{key.removesuffix('weight')}{stored.scale}", _spread(scale_inv, grid)

    def _scales(self, name: str, master: Tensor, stored: ServingFormat) -> tuple[Tensor, Tensor]:
        """Return (scale, scale_inv) for the weight `name`."""
        if self.is_own and self.master.is_split:
            scale_inv = self.scale_inv[name].float()
            return scale_inv.reciprocal(), scale_inv
        used = self.own if self.is_own else replace(stored.granularity, is_pow2=True)
        amax = used.amax(master.reshape(-1), master.shape)
        return used.scales(amax if self.is_own else _as_code(amax))

    def _quantized(
        self, name: str, master: Tensor, stored: ServingFormat, scales: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return codes and scales of a matrix of the weight `name`; `scales`: those of the whole weight."""
        scale, scale_inv = self._scales(name, master, stored) if scales is None else scales
        if self.is_own and self.master.is_split:
            codes = encode(master, self.master, scale_inv)[0].view(E4M3.torch_dtype)
        else:
            codes = quantize(master, per_element(scale, master.shape), E4M3)
        if not self.is_own:  # a gather of masters that is a sum knows no signs of zeros
            bits = codes.view(torch.uint8)
            bits.masked_fill_(bits == _MINUS_ZERO, 0)
        _refuse_broken(name, scale_inv)
        return codes, _spread(scale_inv, stored.granularity.grid(master.shape))

    def quantization_config(self) -> dict[str, Any]:
        """Return the entry of config.json, with full names of what is not in FP8: vLLM takes no parts of names."""
        if self.form == "fp8-block":
            return {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "weight_block_size": [BLOCK, BLOCK],
                "modules_to_not_convert": list(self.left_out),
            }
        experts = sorted({found for name in self.left_out if (found := _experts_of(name))})
        asked_for = [
            name for found in experts for last in _ASKED_FOR if (name := f"{found}.{last}") not in self.left_out
        ]
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
            "ignore": [*self.left_out, *asked_for],
            "config_groups": {"group_0": group},
        }


def _as_code(amax: Tensor) -> Tensor:
    """Round largest magnitudes to E4M3's four bits, so that scales are those which the codes themselves would get."""
    dropped = MANTISSA_BITS - E4M3.mantissa_bits
    bits = amax.view(torch.int32)
    rounded = bits + (1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1) >> dropped << dropped
    return torch.where(amax.isfinite(), rounded.view(torch.float32), amax)


def _spread(scale_inv: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Return scales as a grid of their own: safetensors refuses tensors that share memory, as matrices of a stack."""
    return scale_inv.expand(grid).clone(memory_format=torch.contiguous_format)


def export_of(
    state: Mapping[str, Any], shapes: Mapping[str, Any], form: str | None, names: SavedNames | None = None
) -> Export:
    """Return what is made of a checkpoint whose own state is `state` (checkpoint/state.py).

    Args:
        shapes: of the trainable parameters, by name.
        form: a name in FORMATS; None: the one that keeps training's bytes, and of both fp8-block where all sizes are
            multiples of 128.
        names: names of tensors in the folder. None: those of training.

    Raises:
        ConfigError: there is no such form.
        UnsupportedError: no linear is in FP8 but Conv1D; or some are that are frozen, or held in another way by the
            model's files; or the model's files join weights.
    """
    if form is not None and form not in FORMATS:
        raise ConfigError(f"form: expected one of {', '.join(FORMATS)}, got {form!r}. Name one.")
    config, plan, names = state["config"], Plan.from_state(state["plan"]), names or SavedNames()
    known = {**names.shapes, **shapes}
    shaped = [*known.items(), *((row.weight_name, row.shape) for row in plan.layers)]
    if names.model is None and (stacked := [name for name, shape in shaped if len(shape) > 2 and _experts_of(name)]):
        raise UnsupportedError(
            f"--model: expected a model whose files' names of experts ({stacked[0]}) are known, got {names.reason}. "
            "Name the folder of the model that was trained, where the transformers that trained it is installed."
        )
    beside, listed = _beside_experts([name for name, _ in shaped]), [row.fqn for row in plan.layers]
    in_fp8 = {row.fqn for row in plan.layers if row.converted and row.fqn.rpartition(".")[2] not in _HEADS}
    in_fp8 -= {fqn for fqn in in_fp8 if fqn.rpartition(".")[0] in beside}
    in_fp8 -= (conv1ds := _conv1ds(plan, known))
    in_fp8 -= _in_bf16(config, state.get("precision"), in_fp8)
    in_fp8 -= {fqn for group in _split_groups(in_fp8, listed) for fqn in group}
    rows = [row for row in plan.layers if row.fqn in in_fp8]
    _refuse_parts_and_frozen(rows, shapes)
    if not rows:
        got = f"Conv1D alone ({min(conv1ds)}), which no form for servers holds" if conv1ds else "none"
        raise UnsupportedError(f"convert: expected a linear in FP8 at the save, got {got}. Convert to safetensors.")
    matrices = {name: shape for row in rows for name, shape in _matrices(row, names).items()}
    linear, master = config["linear"], BY_NAME[master_of(config)]
    is_split = master.is_split
    is_pow2 = is_split or linear.get("weight_scales") == "power_of_two"
    own = granularity_of(linear.get("recipe", "tensorwise"), is_split=is_split, is_pow2=is_pow2)
    if form is None:
        fits = all(size % BLOCK == 0 for shape in matrices.values() for size in shape)
        form = "fp8-block" if _holds("fp8-block", own) and (fits or not _holds("compressed-tensors", own)) else ""
        form = form or "compressed-tensors"
    others = [row for row in plan.layers if row.fqn not in in_fp8]
    left_out = _left_out(known, others, {row.weight_name for row in rows}, beside)
    modules = tuple(key.removesuffix(".weight") for pair in left_out.items() for key in _shapes_in(names, *pair))
    fqns, scale_inv = tuple(row.fqn for row in others), state["scale_inv"] if is_split else {}
    return Export({row.weight_name: row for row in rows}, fqns, own, master, scale_inv, form, names, modules, matrices)


def _refuse_broken(name: str, scale_inv: Tensor) -> None:
    if not bool(scale_inv.isfinite().all()):
        raise CheckpointError(f"{name}: expected finite values, got others. Export a checkpoint of before they came.")


def _left_out(
    known: Mapping[str, Sequence[int]], others: Iterable[LayerPlan], in_fp8: Collection[str], beside: Collection[str]
) -> dict[str, Sequence[int]]:
    """Return the shapes of the weights in bf16 that servers look up: linears, experts, and what says which of these."""
    found: dict[str, Sequence[int]] = {row.weight_name: known.get(row.weight_name, row.shape) for row in others}
    for name, shape in known.items():
        owner, _, last = name.rpartition(".")
        is_beside = last == "weight" and owner.rpartition(".")[0] in beside
        if name not in in_fp8 and len(shape) > 1 and (is_beside or _experts_of(name)):
            found.setdefault(name, shape)
    return found


def _shapes_in(names: SavedNames, name: str, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the shapes that the folder has of the tensor `name`, by name."""
    parts = names.saved(name, torch.empty(tuple(shape), dtype=torch.bfloat16, device="meta"))
    return {key: tuple(part.shape) for key, part in parts.items()}


def _matrices(row: LayerPlan, names: SavedNames) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the FP8 matrices that the folder has of a weight, by name.

    Raises:
        UnsupportedError: the model's files hold it in another way.
    """
    found = _shapes_in(names, row.weight_name, row.shape)
    are_matrices = all(key.endswith(".weight") and len(shape) == 2 for key, shape in found.items())
    if are_matrices and (row.num_experts or names.is_kept(row.weight_name)):
        return found
    raise UnsupportedError(
        f"convert: expected weights that the model's files hold as matrices, got {row.weight_name}, there "
        f"{next(iter(found))}. Convert to safetensors, and quantise them for your server."
    )


def _experts_of(name: str) -> str:
    """Return the name of the experts that the layer or tensor `name` is of; empty if of none."""
    before, found, _ = name.rpartition(f"{_EXPERTS}.")
    return f"{before}{_EXPERTS}" if found else ""


def _beside_experts(names: Iterable[str]) -> set[str]:
    """Return the modules that hold experts. Linears directly in them say which; servers do not quantise these."""
    return {found.removesuffix(_EXPERTS) for name in names if (found := _experts_of(name))}


def _conv1ds(plan: Plan, shapes: Mapping[str, Any]) -> set[str]:
    """Return the layers whose weight is [in, out], as a Conv1D has it: in a model with such, square ones too.

    compressed-tensors has no scales of a Conv1D, and vLLM turns its weight over and not the scales.
    Source: compressed-tensors 0.20 (loaded by transformers 5.24), vllm 0.33 models/gpt2.py `load_weights`.
    """
    found = [(row, tuple(shapes.get(row.weight_name, ()))) for row in plan.layers if not row.num_experts]
    turned = {row.fqn for row, shape in found if shape == row.shape[::-1]}
    return turned if any(row.fqn in turned and shape != row.shape for row, shape in found) else set()


def _refuse_parts_and_frozen(rows: Iterable[LayerPlan], shapes: Mapping[str, Any]) -> None:
    for row in rows:
        shape = tuple(shapes.get(row.weight_name, ()))
        if shape != row.shape:
            odd = f"a part of a linear ({row.fqn}: {list(shape)} for {list(row.shape)})"
            odd = odd if shape else f"frozen weights in FP8 ({row.fqn})"
            raise UnsupportedError(
                f"convert: expected a model of trained nn.Linear, got {odd}, whose export is not written yet. Convert "
                "to safetensors, and quantise them for your server."
            )


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
    """Yield the linears in FP8 of each group that servers join and that is in FP8 in part: by names, and experts."""
    groups: dict[str, set[str]] = {}
    for name in names:
        if experts := _experts_of(name):
            groups.setdefault(experts, set()).add(name)
    for parts in _TOGETHER:
        owners = {name.removesuffix(f".{parts[0]}") for name in names if name.endswith(f".{parts[0]}")}
        for owner in owners:
            groups[f"{owner}.{parts[0]}"] = {f"{owner}.{part}" for part in parts if f"{owner}.{part}" in names}
    for group in groups.values():
        if (inside := group & set(in_fp8)) != group:
            yield inside
