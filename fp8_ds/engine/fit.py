"""Does a checkpoint fit this run? Its layout over ranks, and its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.constants import CAT_DIM, PARAM, VOCAB_TENSOR
from deepspeed.runtime.pipe.module import PipelineModule

from fp8_ds.checkpoint.contents import deepspeed_classes, read_structure
from fp8_ds.checkpoint.universal import TENSORS
from fp8_ds.engine.cut_models import is_cut, lacks_info
from fp8_ds.engine.saving import layout

_NUM_SHOWN = 3
_AUTOTP_META = "ds_autotp_universal_checkpoint_meta"
"""DeepSpeed's attribute of parameters, from 0.19 on."""


def other_run(engine: Any, header: dict[str, Any], with_optimizer: bool) -> str:
    """How the run that wrote `header` was laid out unlike this one; empty if what is to be loaded fits."""
    now = layout(engine)
    shards = now["zero_stage"] == 3
    if header["mp_world_size"] == 1 < now["mp_world_size"] and is_cut(engine.module):
        return (
            f"{differs(header, now, ('mp_world_size',))} (a checkpoint of a whole model does not say how "
            "fp8_ds.tp.parallelize cuts: `fp8-ds convert FOLDER OUT --to safetensors` gives its weights, which the "
            "model loads before it is cut; docs/checkpoints.md)"
        )
    if (header["zero_stage"] == 3) != shards:
        stage = differs(header, now, ("zero_stage",))
        if header["mp_world_size"] > 1:  # whose parts are joined in their own stage alone
            own = header["zero_stage"]
            return (
                f"{stage}, of several tensor-parallel ranks (in stage {own}, without tensor parallelism, a universal "
                f"checkpoint of it loads: {_remedy(own)}. What that engine saves goes to another stage)"
            )
        return f"{stage} (a universal checkpoint loads in another stage: {_remedy(now['zero_stage'])})"
    keys = ("dp_world_size", "mp_world_size") if with_optimizer else ("mp_world_size",)
    other = differs(header, now, keys)
    if not other and shards and now["dp_world_size"] > header["dp_world_size"]:
        other = differs(header, now, ("dp_world_size",))
    if not other:
        return ""
    return f"{other} (a universal checkpoint loads at any world size: {_remedy(now['zero_stage'])})"


def differs(header: Mapping[str, Any], now: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    """Return `key 1 in the checkpoint, 2 now` for each of `keys` that differs; empty if none does."""
    return ", ".join(
        f"{key} {header.get(key)} in the checkpoint, {now[key]} now" for key in keys if header.get(key) != now[key]
    )


def _remedy(stage: int) -> str:
    """`load_checkpoint` looks for a universal checkpoint in the folder that it is given."""
    return (
        f"`fp8-ds convert FOLDER FOLDER/universal --to universal --stage {stage}`, then "
        '"checkpoint": {"load_universal": true} and the same FOLDER; docs/checkpoints.md'
    )


def other_parameters(engine: Any, folder: Path, tag: str) -> str:
    """How the parameters in this rank's model file differ from the engine's. ZeRO's flat shards do not say."""
    path = Path(engine._get_ckpt_name(str(folder), tag))
    saved = read_structure(path, deepspeed_classes()).get("param_shapes")
    if saved is None:
        return ""
    groups = engine._get_zero_param_shapes()
    theirs, ours = [
        [{name: list(shape) for name, shape in group.items()} for group in side] for side in (saved, groups)
    ]
    # Order counts: shards are cut from one flat tensor.
    if [list(group.items()) for group in theirs] == [list(group.items()) for group in ours]:
        return ""
    before, now = _by_name(theirs), _by_name(ours)
    return _differing(path, before, now) or f"{path} has the model's parameters in another order or in other groups"


def _by_name(groups: Iterable[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Shapes, of whatever group."""
    return {name: list(shape) for group in groups for name, shape in group.items()}


def _differing(path: Path, before: Mapping[str, list[int]], now: Mapping[str, list[int]]) -> str:
    """Describe which shapes differ, by name; empty if none does."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if not names:
        return ""
    shown = ", ".join(
        f"{name} {before.get(name, 'missing')} in the checkpoint, {now.get(name, 'missing')} now"
        for name in names[:_NUM_SHOWN]
    )
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    return f"{path} is of another model: {shown}{more}"


def missing_layers(engine: Any, path: Path) -> list[str]:
    """Name the files of this rank's pipeline layers that are not in `path`, which stock code looks for by pattern."""
    if not isinstance(module := engine.module, PipelineModule):
        return []
    layers = [i for i, layer in enumerate(module.forward_funcs) if hasattr(layer, "load_state_dict")]
    return [f"{module.ckpt_layer_path(path, i)} is missing" for i in layers if not module.ckpt_layer_path_list(path, i)]


def misfits(engine: Any, path: Path, with_optimizer: bool) -> list[str]:
    """List what this rank would look for in a universal checkpoint in vain, or find in other shapes than its own.

    In stages 1 and 2 a parameter that has had no gradient has no moments.
    """
    if not (model_files := engine._get_all_ckpt_names(str(path.parent), path.name)):
        stage = int(engine.zero_optimization_stage())
        return [f"a model file of this ZeRO stage is missing in {path} ({_in_form_of(path, stage)}, if it is whole)"]
    if lacks_info(engine.module, Path(model_files[0])):
        return [
            f"{path} of a whole model, which does not say how fp8_ds.tp.parallelize cuts its weights (load it without, "
            "or start the cut model from the weights themselves)"
        ]
    if not engine.zero_optimization():
        return []
    tensors = TENSORS if engine.zero_optimization_partition_weights() and with_optimizer else TENSORS[:1]
    names = [name for group in engine._get_zero_param_shapes() for name in group]
    wanted = [path / "zero" / name / tensor for name in names for tensor in tensors]
    if missing := [f"{file} is missing" for file in wanted if not file.is_file()]:
        return missing
    other = other_universal(engine, path, Path(model_files[0]))
    return [other] if other else []


def other_universal(engine: Any, path: Path, model_file: Path) -> str:
    """How the universal checkpoint in `path` has this rank's parameters in other shapes, or in the form of another
    stage; empty if it has not. Stock code asks for the number of elements in stages 1 and 2, and for nothing in 3:
    what is left of a parameter becomes the start of the next.

    Args:
        engine: of ZeRO, that is to load it.
        path: has a file of each of its parameters.
        model_file: with the shapes of parameters that are flat in their files, which only stage 3 reads.
    """
    stage = int(engine.zero_optimization_stage())
    listed = read_structure(model_file, deepspeed_classes()).get("param_shapes") if stage == 3 else None
    flat_shapes = _by_name(listed or ())
    parameters = dict(engine.module.named_parameters())
    before, now = {}, {}
    for name, shape in _by_name(engine._get_zero_param_shapes()).items():
        content = read_structure(path / "zero" / name / TENSORS[0], deepspeed_classes())
        if isinstance(content, dict):
            before[name] = list(content[PARAM].shape)
            now[name] = _whole_shape(parameters[name], shape, content, 1 if stage == 3 else engine.mp_world_size)
        elif stage < 3:
            return f"{path} is in the form that stage 3 reads ({_in_form_of(path, stage)})"
        else:
            saved = flat_shapes.get(name, shape)
            before[name], now[name] = saved if prod(saved) == content.numel() else list(content.shape), shape
    return _differing(path, before, now)


def _in_form_of(path: Path, stage: int) -> str:
    """Return the command that brings the universal checkpoint in `path` into the form that `stage` reads."""
    return f"`python -m fp8_ds.checkpoint.universal {path} {stage}` makes it that of stage {stage}"


def _whole_shape(p: Any, shape: list[int], content: Mapping[str, Any], num_parts: int) -> list[int]:
    """The shape in a universal checkpoint of which stock code gives this rank `shape`, as it is, or as a part.

    Source: deepspeed/checkpoint/universal_checkpoint.py, load_hp_checkpoint_state (0.19.8).

    Args:
        p: AutoTP says on it how it has cut it.
        shape: of `p` on this rank.
        content: of the parameter's file, which says along which dim it is cut.
        num_parts: tensor-parallel ranks.
    """
    saved, dim = list(content[PARAM].shape), content.get(CAT_DIM, 0)
    cut_by_autotp: Mapping[str, Any] = getattr(p, _AUTOTP_META, None) or {}
    if logical := cut_by_autotp.get("logical_shape"):
        is_view = len(logical) != len(saved) and prod(logical) == prod(saved)  # of fused parts
        return saved if is_view else list(logical)
    if saved == shape or dim >= len(shape):
        return shape
    whole = [size * num_parts if i == dim else size for i, size in enumerate(shape)]
    if content.get(VOCAB_TENSOR):  # without the rows that only pad it
        whole[0] = min(whole[0], saved[0])
    return whole
