"""Take the files of a checkpoint as they are: it has a manifest of them afterwards.

    python -m fp8_ds.checkpoint.adopt CKPT/TAG

For checkpoints of fp8_ds from before manifests, for one whose files have been changed by hand, and for universal ones
that ds_to_universal.py wrote. Nobody can tell afterwards what was wrong with a file before. Where hosts have disks of
their own: once on each.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from fp8_ds.checkpoint import manifest as manifests
from fp8_ds.checkpoint.contents import deepspeed_classes, read_structure
from fp8_ds.checkpoint.folders import INCOMPLETE
from fp8_ds.checkpoint.manifest import Manifest
from fp8_ds.errors import ConfigError, refusals_without_traceback

GLOBAL_STATE = "zero/optimizer_state.pt"
"""The file that universal checkpoints have, and others have not."""


def adopt(folder: Path, trust_pickle: bool = False) -> Manifest:
    """`folder` has a manifest of its files, which is returned. What a manifest before said of the save stays.

    Args:
        folder: of one save (`CKPT/TAG`), or a universal checkpoint.
        trust_pickle: files may hold more than data; then code of whoever wrote them is executed.

    Raises:
        ConfigError: it is neither.
        CheckpointError: its manifest is damaged, or a file that it reads holds more than data.
        OSError: a file cannot be read or written.
    """
    is_universal = (folder / GLOBAL_STATE).is_file()
    names = manifests.files_in(folder, ".pt" if is_universal else "_states.pt") if folder.is_dir() else {}
    model_files = sorted(name for name in names if name.endswith("_model_states.pt") and "/" not in name)
    if not model_files:
        raise ConfigError(
            f"folder: expected one save, with *_model_states.pt in it, got {str(folder)!r}. Name CKPT/TAG."
        )
    before = manifests.read_manifest(folder)
    if before is None:
        header = _header(folder, model_files, is_universal, trust_pickle)
    else:
        header = before.header
    ranks = {name: entry.rank for name, entry in before.files.items()} if before else {}
    records = {name: manifests.record(folder / name, ranks.get(name, 0)) for name in sorted(names)}
    manifest = Manifest(header, records)
    manifests.write_manifest(folder, manifest)
    return manifest


def _header(folder: Path, model_files: list[str], is_universal: bool, trust_pickle: bool) -> dict[str, Any]:
    """As save_checkpoint's, as far as the files say: "unknown" are the versions of what wrote them."""
    name = next((name for name in model_files if "mp_rank_" in name), model_files[0])
    model = _structure(folder / name, trust_pickle)
    header = {"tag": folder.name.removesuffix(INCOMPLETE), "global_steps": model.get("global_steps")}
    if is_universal:
        return {**header, **manifests.versions()}
    optimizer = next(folder.glob("*_optim_states.pt"), None)
    if optimizer is None:
        stage = 3 if name.startswith("zero_pp_rank_") else 0
    else:
        stage = int(_structure(optimizer, trust_pickle).get("optimizer_state_dict", {}).get("zero_stage", 0))
    return {
        **header,
        "zero_stage": stage,
        "dp_world_size": model["dp_world_size"],
        "mp_world_size": model["mp_world_size"],
        **dict.fromkeys(manifests.versions(), "unknown"),
        "deepspeed": model.get("ds_version", "unknown"),
    }


def _structure(path: Path, trust_pickle: bool) -> Any:
    """What torch.load returns, tensors on the meta device.

    Raises:
        CheckpointError: the file holds more than data, and is not trusted to.
    """
    if trust_pickle:
        return torch.load(path, map_location="meta", weights_only=False)
    return read_structure(path, deepspeed_classes())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("use: python -m fp8_ds.checkpoint.adopt CKPT/TAG")
    with refusals_without_traceback():
        written = adopt(Path(sys.argv[1]))
    print(f"{Path(sys.argv[1]) / manifests.MANIFEST}: {len(written.files)} files")
