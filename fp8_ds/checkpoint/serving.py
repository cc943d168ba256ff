"""Export of a training checkpoint to an FP8 folder for servers: its layers and their form, from its own state.

Servers read scales a row, or a block of 128 x 128. Each can hold the bytes that training computes with if its scales
are as fine as theirs or finer; block scales must be powers of two for it, because servers round others to such when
they load, and quantise the weights again by those. A weight in another form is quantised from its master, by scales
that are powers of two.

A layer's experts are matrices of their own, as in the model's own files, all of them in FP8 or none.

Parts of tensor-parallel ranks have scales of their own. Joined they are the whole's where its scales are as fine: a
scale a row for what is split by rows, blocks for what is split between blocks. Else the whole is quantised from its
master, too.

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

from fp8_ds.checkpoint.fp8_folder import BLOCKS, ROWS
from fp8_ds.checkpoint.parts import Layout
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
        scale_inv: scales at the save, by names of weights, of each tensor-parallel rank.
        form: "fp8-block" or "compressed-tensors".
        names: names of tensors in the folder.
        left_out: names that modules have in the folder which are not in FP8 and could be.
        matrices: shapes of the folder's FP8 weights, by name.
        layouts: how parts are joined, by names of tensors of which tensor-parallel ranks have parts.
    """

    layers: Mapping[str, LayerPlan]
    others: tuple[str, ...]
    own: Granularity
    master: MasterFormat
    scale_inv: tuple[Mapping[str, Tensor], ...]
    form: str
    names: SavedNames
    left_out: tuple[str, ...]
    matrices: Mapping[str, tuple[int, ...]]
    layouts: Mapping[str, Layout]

    def is_own(self, name: str) -> bool:
        """Whether the bytes of the FP8 weight `name` are those that training computes with."""
        return _holds(self.form, self.own, self.layouts.get(name))

    def describe(self) -> str:
        """Say in a line whose the bytes are, and what stays bf16."""
        has_experts = any(row.num_experts for row in self.layers.values())
        num, kind = len(self.layers), "linears and weights of experts" if has_experts else "linears"
        num_own = sum(map(self.is_own, self.layers))
        text = f"{self.form}: {num} {kind}"
        if num_own:
            text += f"{'' if num_own == num else f', {num_own} of them'} with the bytes that training computes with"
        if num_own < num:
            whose = f"{num - num_own}, of whose parts it does not hold the scales, " if num_own else ""
            text += f", {whose}quantised from their masters by powers of two"
            kept = {name: _num_held(name, self.own, self.layers, self.layouts) for name in FORMATS}
            best = max(kept, key=lambda name: kept[name])
            if kept[best] == num:
                text += f", other bytes than training's, which --format {best} keeps"
            else:
                text += ", other bytes than training's"
                text += f"; --format {best} keeps those of {kept[best]}" if kept[best] > num_own else ""
        return f"{text}; in bf16: {', '.join(self.others) or 'no linear'}"

    def tensors(self, masters: Iterable[tuple[str, Sequence[Tensor]]]) -> Iterator[tuple[str, Tensor]]:
        """Yield what the folder holds of all tensors, as `saved` does.

        Args:
            masters: all tensors of the checkpoint, by name; float32 where training has masters.
        """
        for name, parts in masters:
            yield from self.saved(name, parts)

    def saved(self, name: str, parts: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield what the folder holds of one tensor: codes [out, in] and scales of FP8 weights, else bf16 of floats.

        Args:
            parts: the tensor; of one in `layouts` those of all ranks, or, if all have the whole, at least one.
        """
        if name in self.layers and self.is_own(name):
            yield from self.stored(name, [self.own_bytes(name, part, rank) for rank, part in enumerate(parts)])
            return
        whole = self.layouts[name].join(parts) if name in self.layouts else parts[0]
        if name not in self.layers:
            yield from self.names.saved(name, whole.bfloat16() if whole.is_floating_point() else whole).items()
            return
        stored = FORMATS[self.form]
        used = replace(stored.granularity, is_pow2=True)
        for key, matrix in self.names.saved(name, whole.float()).items():
            scale, scale_inv = used.scales(_as_code(used.amax(matrix.reshape(-1), matrix.shape)))
            _refuse_broken(name, scale_inv)
            codes = quantize(matrix, per_element(scale, matrix.shape), E4M3).view(torch.uint8)
            codes.masked_fill_(codes == _MINUS_ZERO, 0)  # a gather of masters that is a sum knows no signs of zeros
            yield key, codes.view(E4M3.torch_dtype)
            yield f"{key.removesuffix('weight')}{stored.scale}", scale_inv

    def stored(self, name: str, parts: Sequence[tuple[Tensor, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield what the folder holds of an FP8 weight whose form it keeps (`is_own`).

        Args:
            parts: (codes, float8_e4m3fn, scale_inv, its grid of scales, float32) of training; see `saved`.
        """
        stored = FORMATS[self.form]
        codes, scale_inv = parts[0]
        if (layout := self.layouts.get(name)) is not None:
            codes = layout.join([part.view(torch.uint8) for part, _ in parts]).view(E4M3.torch_dtype)
            scale_inv = layout.join_scales([grid for _, grid in parts], stored.granularity, self.own)
        _refuse_broken(name, scale_inv)
        scale_inv = scale_inv if scale_inv.dim() else scale_inv.view(1, 1)
        for key, matrix in self.names.saved(name, codes).items():
            yield key, matrix
            grid = stored.granularity.grid(matrix.shape)
            yield f"{key.removesuffix('weight')}{stored.scale}", _spread(scale_inv, grid)

    def own_bytes(self, name: str, master: Tensor, rank: int = 0) -> tuple[Tensor, Tensor]:
        """Return (codes, scale_inv), as training has them, of an FP8 weight or of the part of it that `rank` has."""
        master = master.float()
        if self.master.is_split:
            scale_inv = self.scale_inv[rank][name].float()
            return encode(master, self.master, scale_inv)[0].view(E4M3.torch_dtype), scale_inv
        amax = self.own.amax(master.reshape(-1), master.shape)
        scale, scale_inv = self.own.scales(amax)
        saved = self.scale_inv[rank].get(name)
        if saved is not None and saved.shape == scale_inv.shape:
            saved = saved.float().to(scale_inv.device)
            # Others than by rule are of an FP8 folder, or of what a user had written at the save.
            is_kept = (saved != scale_inv) & (amax <= E4M3.max * saved * (1 + 2**-20))
            scale, scale_inv = torch.where(is_kept, saved.reciprocal(), scale), torch.where(is_kept, saved, scale_inv)
        return quantize(master, per_element(scale, master.shape), E4M3), scale_inv

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
    state: Mapping[str, Any],
    shapes: Mapping[str, Any],
    form: str | None,
    names: SavedNames | None = None,
    layouts: Mapping[str, Layout] | None = None,
    other_ranks: Sequence[Mapping[str, Any]] = (),
) -> Export:
    """Return what is made of a checkpoint whose own state is `state` (checkpoint/state.py).

    Args:
        shapes: of the trainable parameters, by name; of whole ones.
        form: a name in FORMATS; None: the one that keeps training's bytes, or those of more weights, and of both
            fp8-block where all sizes are multiples of 128.
        names: names of tensors in the folder. None: those of training.
        layouts: how the parts of tensor-parallel ranks are joined, by names of trainable parameters.
        other_ranks: own states of the other tensor-parallel ranks.

    Raises:
        ConfigError: there is no such form.
        UnsupportedError: no linear is in FP8 but Conv1D; or some are that are frozen, on some ranks only, or held in
            another way by the model's files; or the model's files join weights.
    """
    if form is not None and form not in FORMATS:
        raise ConfigError(f"form: expected one of {', '.join(FORMATS)}, got {form!r}. Name one.")
    config, names, layouts = state["config"], names or SavedNames(), layouts or {}
    plan = _whole_plan(state, layouts, other_ranks)
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
        held = {name: _num_held(name, own, [row.weight_name for row in rows], layouts) for name in FORMATS}
        form = max(FORMATS, key=lambda name: (held[name], _holds(name, own), (name == "fp8-block") == fits))
    others = [row for row in plan.layers if row.fqn not in in_fp8]
    left_out = _left_out(known, others, {row.weight_name for row in rows}, beside)
    modules = tuple(key.removesuffix(".weight") for pair in left_out.items() for key in _shapes_in(names, *pair))
    fqns, layers = tuple(row.fqn for row in others), {row.weight_name: row for row in rows}
    scale_inv = tuple(one.get("scale_inv", {}) for one in (state, *other_ranks))
    return Export(layers, fqns, own, master, scale_inv, form, names, modules, matrices, layouts)


def _whole_plan(
    state: Mapping[str, Any], layouts: Mapping[str, Layout], other_ranks: Iterable[Mapping[str, Any]]
) -> Plan:
    """Return the plan of the whole model.

    Raises:
        UnsupportedError: a rank has another layer in FP8.
    """
    plan = Plan.from_state(state["plan"])
    own = {row.fqn: row.converted for row in plan.layers}
    for other in other_ranks:
        theirs = {row.fqn: row.converted for row in Plan.from_state(other["plan"]).layers}
        if odd := sorted(fqn for fqn in own | theirs if own.get(fqn) != theirs.get(fqn)):
            raise UnsupportedError(
                f"convert: expected the same layers in FP8 on all tensor-parallel ranks, got {odd[0]}, which is so on "
                "some. Leave it and its like in bf16 (fp8.linear.filter_fqns), or, if a rank has nothing of a layer, "
                "shard over fewer ranks."
            )
    rows = []
    for row in plan.layers:
        layout = layouts.get(row.weight_name)
        if layout is not None and layout.dim is not None:
            row = replace(row, out_features=layout.shape[0], in_features=layout.shape[1])
        rows.append(row)
    return Plan(tuple(rows))


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


def _holds(form: str, own: Granularity, layout: Layout | None = None) -> bool:
    """Whether `form` can hold the bytes of weights whose scales, or those of parts by `layout`, are `own`."""
    if form == "fp8-block":
        can = own.is_pow2 and (own.is_tensor or own.block == (BLOCK, BLOCK))
    else:
        can = own.is_tensor or own.is_row
    return can and (layout is None or layout.holds(FORMATS[form].granularity))


def _num_held(form: str, own: Granularity, weights: Iterable[str], layouts: Mapping[str, Layout]) -> int:
    return sum(_holds(form, own, layouts.get(name)) for name in weights)


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
