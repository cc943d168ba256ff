"""Does a checkpoint fit this run? Its layout over ranks, and its parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fp8_ds.checkpoint import manifest as manifests
from fp8_ds.checkpoint.contents import deepspeed_classes, read_structure
from fp8_ds.engine.cut_models import is_cut

_NUM_SHOWN = 3


def other_run(engine: Any, header: dict[str, Any], with_optimizer: bool) -> str:
    """How the run that wrote `header` was laid out unlike this one; empty if what is to be loaded fits."""
    now = layout(engine)
    shards = now["zero_stage"] == 3
    if header["mp_world_size"] == 1 < now["mp_world_size"] and is_cut(engine.module):
        return (
            f"{manifests.differs(header, now, ('mp_world_size',))} (a checkpoint of a whole model does not say how "
            "fp8_ds.tp.parallelize cuts: `fp8-ds convert FOLDER OUT --to safetensors` gives its weights, which the "
            "model loads before it is cut; docs/checkpoints.md)"
        )
    if (header["zero_stage"] == 3) != shards:
        stage = manifests.differs(header, now, ("zero_stage",))
        if header["mp_world_size"] > 1:  # whose parts are joined in their own stage alone
            own = header["zero_stage"]
            return (
                f"{stage}, of several tensor-parallel ranks (in stage {own}, without tensor parallelism, a universal "
                f"checkpoint of it loads: {_remedy(own)}. What that engine saves goes to another stage)"
            )
        return f"{stage} (a universal checkpoint loads in another stage: {_remedy(now['zero_stage'])})"
    keys = ("dp_world_size", "mp_world_size") if with_optimizer else ("mp_world_size",)
    other = manifests.differs(header, now, keys)
    if not other and shards and now["dp_world_size"] > header["dp_world_size"]:
        other = manifests.differs(header, now, ("dp_world_size",))
    if not other:
        return ""
    return f"{other} (a universal checkpoint loads at any world size: {_remedy(now['zero_stage'])})"


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
    before, now = [{name: shape for group in side for name, shape in group.items()} for side in (theirs, ours)]
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if not names:
        return f"{path} has the model's parameters in another order or in other groups"
    shown = ", ".join(
        f"{name} {before.get(name, 'missing')} in the checkpoint, {now.get(name, 'missing')} now"
        for name in names[:_NUM_SHOWN]
    )
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    return f"{path} is of another model: {shown}{more}"


def layout(engine: Any) -> dict[str, int]:
    return {
        "zero_stage": int(engine.zero_optimization_stage()),
        "dp_world_size": engine.seq_dp_world_size,
        "mp_world_size": engine.mp_world_size,
    }
