"""`fp8-ds convert` on checkpoints of real engines: safetensors hold bf16 of the masters, bitwise, and engines start
from what is made of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import training
from safetensors.torch import load_file
from support.hostile import Hostile
from typer.testing import CliRunner

from fp8_ds.checkpoint import folders
from fp8_ds.checkpoint.folders import MANIFEST
from fp8_ds.cli.app import app
from fp8_ds.errors import CheckpointError, UnsupportedError
from fp8_ds.tools.convert import convert

pytestmark = pytest.mark.distributed
MODEL = {"frozen": "blocks.1.up"}


def save(folder: str, stage: int, fp8: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Checkpoints after one and two steps; masters after the first, frozen weights among them, in bf16."""
    engine = training.build(training.ds_config(stage, fp8), MODEL)
    training.train(engine, 1)
    engine.save_checkpoint(folder, tag="first")
    masters = {name: p.bfloat16() for name, p in training.full_masters(engine).items()}
    training.train(engine, 1, first_step=1)
    engine.save_checkpoint(folder, tag="second")
    engine.save_checkpoint(folder, tag="adapters", exclude_frozen_parameters=True)  # as transformers does
    training.destroy(engine)
    return masters


STATES = {"optimizer": {"states": "fp8", "master": "e4m11"}}


@pytest.mark.parametrize(("stage", "fp8"), [(2, {}), (3, STATES)])
def test_safetensors_are_bf16_of_the_masters(ranks: Any, tmp_path: Path, stage: int, fp8: dict[str, Any]) -> None:
    masters = ranks(2).run(save, str(tmp_path / "ckpt"), stage, fp8)[0]
    found = convert(tmp_path / "ckpt", tmp_path / "out", "safetensors", tag="first")
    saved = load_file(tmp_path / "out/model.safetensors")
    assert found["num_tensors"] == len(saved) == len(masters) + 2  # the frozen weight and its bias
    assert found["files"] == ["model.safetensors"]
    for name, master in masters.items():
        assert torch.equal(saved[name], master), name
    torch.manual_seed(0)
    frozen = dict(training.TinyLM(**MODEL).named_parameters())["blocks.1.up.weight"]
    assert torch.equal(saved["blocks.1.up.weight"], frozen.bfloat16())
    with pytest.raises(UnsupportedError, match=r"without 2 frozen ones, .*blocks\.1\.up\.weight"):
        convert(tmp_path / "ckpt", tmp_path / "latest", "safetensors")  # the newest: it is not whole
    assert not (tmp_path / "latest").exists()


def save_kinds(folder: str, stage: int) -> dict[str, torch.Tensor]:
    """Checkpoints of our engine and of stock DeepSpeed's, tag "first"; our masters in bf16."""
    masters = {}
    for name, fp8 in (("stock", None), ("ours", {})):
        engine = training.build(training.ds_config(stage, fp8))
        training.train(engine, 1)
        engine.save_checkpoint(f"{folder}/{name}", tag="first")
        masters = {name: p.bfloat16() for name, p in training.full_masters(engine).items()}
        training.destroy(engine)
    return masters


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """What `save_kinds` saves in stage 2, once; to be copied."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, ranks(2).run(save_kinds, str(folder), 2)[0]


def copy(saved: Any, folder: Path, kind: str = "ours") -> None:
    shutil.copytree(saved[0] / kind, folder, dirs_exist_ok=True)


def test_a_damaged_or_unfinished_checkpoint_is_not_converted(saved: Any, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    copy(saved, folder)
    (folder / "first").rename(folder / "first.replaced")  # killed between the renames of a second save
    assert convert(folder, tmp_path / "whole", "safetensors")["num_tensors"] > 0
    path = next((folder / "first.replaced").glob("*_optim_states.pt"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4  # in a tensor: torch.load does not notice
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{path.name} has \d+ bytes of CRC-32"):
        convert(folder, tmp_path / "out", "safetensors")
    (folder / "first.replaced").rename(folder / "first.incomplete")
    with pytest.raises(CheckpointError, match=r"first\.incomplete is of a save that did not end"):
        convert(folder / "first.incomplete", tmp_path / "out", "universal")
    (folder / "first.incomplete").rename(folder / "first")
    (folder / "first" / MANIFEST).unlink()
    convert(folder, tmp_path / "without", "universal", tag="first")  # a bit that nothing knows of
    (folder / "first" / path.name).unlink()
    with pytest.raises(CheckpointError, match=f"{path.name} is missing"):
        convert(folder, tmp_path / "out", "universal", tag="first", trust_pickle=True)
    assert not list((tmp_path / "out").glob("*"))


def add_to(path: Path, mark: Path, new_format: bool = True) -> None:
    state = torch.load(path, weights_only=False)
    torch.save({**state, "more": Hostile(mark)}, path, _use_new_zipfile_serialization=new_format)


def test_code_in_a_checkpoint_is_not_executed_unless_it_is_trusted(saved: Any, tmp_path: Path) -> None:
    folder, mark = tmp_path / "ckpt", tmp_path / "mark"
    copy(saved, folder, "stock")
    for kind in ("model", "optim"):
        for new_format in (True, False):
            path = sorted((folder / "first").glob(f"*_{kind}_states.pt"))[-1]
            content = path.read_bytes()
            add_to(path, mark, new_format)
            for target in ("safetensors", "universal"):
                with pytest.raises(CheckpointError, match=rf"{path.name}: expected tensors.*add --trust-pickle"):
                    convert(folder, tmp_path / "out", target)  # type: ignore[arg-type]
            assert not mark.exists() and not list((tmp_path / "out").glob("*"))
            path.write_bytes(content)
    add_to(path := next((folder / "first").glob("*_model_states.pt")), mark)
    arguments = ["convert", str(folder), str(tmp_path / "out"), "--to", "safetensors"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 2 and "os.makedirs" in json.loads(result.stdout)["error"] and not mark.exists()
    assert CliRunner().invoke(app, [*arguments, "--trust-pickle"]).exit_code == 0
    assert mark.exists()  # it is hostile


PREFIXED = ("mp_rank_00_a", "zero_pp_rank_0_mp_rank_00_a", "bf16_zero_pp_rank_9_mp_rank_00", "more/mp_rank_00_a")
"""DeepSpeed opens files by how their names begin (stages 1 and 2), in folders within as well."""
MATCHING = ("zero_pp_rank_9_mp_rank_00_optim_states.pt", "mp_rank_07_model_states.pt", "more_states.pt")
"""Names that its patterns match, or ours: the manifest does not know them."""


def test_files_that_are_none_of_the_save_are_not_opened(saved: Any, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for kind, names in (("ours", PREFIXED + MATCHING), ("stock", PREFIXED)):
        folder = tmp_path / kind
        copy(saved, folder, kind)
        convert(folder, tmp_path / kind / "clean", "universal")
        (folder / "first/more").mkdir()
        for name in names:
            torch.save(Hostile(mark), folder / "first" / name)
        convert(folder, folder / "universal", "universal")
        convert(folder, folder / "weights", "safetensors")
        assert not mark.exists()
        found, clean = (folders.read_manifest(folder / name) for name in ("universal", "clean"))
        assert found is not None and clean is not None
        assert {name: entry.num_bytes for name, entry in found.files.items()} == {
            name: entry.num_bytes for name, entry in clean.files.items()
        }


NAME = "blocks.0.up.weight"


def renamed(value: Any, name: Any) -> Any:
    """`value`, of a checkpoint, in which NAME is called `name`."""
    if isinstance(value, dict):
        return type(value)((name if key == NAME else key, renamed(item, name)) for key, item in value.items())
    return [renamed(item, name) for item in value] if isinstance(value, list) else value


def test_a_parameters_name_leads_to_no_other_folder(saved: Any, tmp_path: Path) -> None:
    """Whoever sends a checkpoint has written the names, which become folders."""
    copy(saved, tmp_path / "stock", "stock")
    elsewhere = tmp_path / "elsewhere"
    for kind, key in PLACES:
        path = next((tmp_path / "stock/first").glob(f"*_{kind}_states.pt"))
        content = path.read_bytes()
        state = torch.load(path, weights_only=False)
        for name in ("../" * 30 + str(elsewhere)[1:], str(elsewhere), PurePosixPath(elsewhere), ".", "a/../../b"):
            torch.save({**state, key: renamed(state[key], name)}, path)
            with pytest.raises(CheckpointError, match=rf"{path.name}: expected names that stay in their folder"):
                convert(tmp_path / "stock", tmp_path / "out", "universal", trust_pickle=True)
        torch.save({**state, key: renamed(state[key], "up[0].weight")}, path)
        with pytest.raises(UnsupportedError, match=r"got 'up\[0\]\.weight'"):
            convert(tmp_path / "stock", tmp_path / "out", "universal")
        path.write_bytes(content)
    assert not elsewhere.exists() and not (tmp_path / "out").exists()


PLACES = (("model", "param_shapes"), ("model", "module"), ("optim", "optimizer_state_dict"))
"""Where the files of stages 1 and 2 have names of parameters."""


def test_the_name_of_a_folder_is_no_pattern_that_opens_another(saved: Any, tmp_path: Path) -> None:
    """`latest` comes with the checkpoint: of `a[b]` DeepSpeed opens the files of `ab`, without a check."""
    folder, mark = tmp_path / "ours", tmp_path / "mark"
    copy(saved, folder)
    (folder / "first").rename(folder / "a[b]")
    (folder / "latest").write_text("a[b]")
    shutil.copytree(folder / "a[b]", folder / "ab")
    for path in (folder / "ab").glob("*_states.pt"):
        torch.save(Hostile(mark), path)
    universal, again = folder / "u[n]", folder / "again"
    found = convert(folder, universal, "universal")
    assert found | {"latest": None} == convert(folder, again, "universal") | {"latest": None}
    convert(folder, folder / "weights", "safetensors")
    assert not mark.exists()
    weights = load_file(folder / "weights/model.safetensors")
    for name in ("lm_head.weight", "blocks.0.up.weight"):  # of the masters, not of bf16 weights
        one, other = (torch.load(path / "zero" / name / "fp32.pt")["param"] for path in (universal, again))
        assert torch.equal(one, other) and not torch.equal(one, one.bfloat16().float())
        assert torch.equal(one.bfloat16().flatten(), weights[name].flatten())
    for latest in ("../first", str(saved[0] / "ours/first")):
        (folder / "latest").write_text(latest)
        with pytest.raises(CheckpointError, match=rf"latest: expected names that stay in .*, got '{latest}'"):
            convert(folder, tmp_path / "out", "safetensors")


def test_code_in_a_universal_checkpoint_is_not_executed_unless_it_is_trusted(saved: Any, tmp_path: Path) -> None:
    folder, mark = tmp_path / "ckpt", tmp_path / "mark"
    copy(saved, folder)
    convert(folder, folder / "universal", "universal")
    universal = folder / "universal"
    (universal / MANIFEST).unlink()  # of somebody else
    for path in (universal / "mp_rank_00_model_states.pt", universal / "zero/lm_head.weight/fp32.pt"):
        content = path.read_bytes()
        add_to(path, mark)
        for target, stage in (("safetensors", None), ("universal", 3)):
            with pytest.raises(CheckpointError, match=r"os\.makedirs.*add --trust-pickle"):
                convert(universal, tmp_path / "out", target, stage=stage)  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match=r"os\.makedirs"):
            convert(universal, universal, "universal", stage=3)
        assert not mark.exists() and not list((tmp_path / "out").glob("*"))
        convert(universal, tmp_path / f"out-{path.stem}", "safetensors", trust_pickle=True)
        assert mark.exists()
        mark.rmdir()
        path.write_bytes(content)
    convert(universal, universal, "universal", stage=3)


def start_from(folder: str, stages: dict[int, dict[str, Any]]) -> list[Any]:
    """For each stage and its "fp8" block: masters and losses of an engine of two parameter groups, in stage 3 of some
    sub-groups, with a scheduler, that loads the universal checkpoint; losses of one that starts from safetensors."""
    import torch.distributed as dist

    found = []
    for stage, fp8 in stages.items():
        config = training.ds_config(
            stage,
            fp8,
            checkpoint={"load_universal": True},
            zero_optimization={"sub_group_size": 20_000} if stage == 3 else {},
            scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 3e-3}},
            gradient_accumulation_steps=6 // dist.get_world_size(),
        )
        engine = training.build(config, seed=5, groups=two_groups)
        engine.load_checkpoint(folder, tag=f"stage{max(stage, 2)}")
        assert engine.global_steps == 0 and [group["weight_decay"] for group in engine.optimizer.param_groups] == DECAYS
        masters, losses = training.full_masters(engine), training.train(engine, 2)
        training.destroy(engine)

        del config["checkpoint"]
        other = training.build(config, weights=f"{folder}/weights/model.safetensors", groups=two_groups)
        found.append((masters, losses, training.train(other, 2)))
        training.destroy(other)
    return found


DECAYS = [0.1, 0.0]


def two_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    groups = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() < 2]
    return [{"params": group, "weight_decay": decay} for group, decay in zip(groups, DECAYS, strict=True)]


WHOLE: dict[int, dict[int, dict[str, Any]]] = {1: {1: {}, 3: STATES}, 2: {2: STATES, 3: {}}}
"""World size -> stage -> "fp8" block."""


def test_training_starts_from_safetensors_at_any_stage_and_world_size(ranks: Any, saved: Any, tmp_path: Path) -> None:
    """Masters are the bf16 values in the files, moments are zero, and the steps are those of an engine that starts from
    the files without a checkpoint."""
    masters = saved[1]
    copy(saved, tmp_path / "ckpt")
    weights = tmp_path / "weights"
    convert(tmp_path / "ckpt", weights, "safetensors")
    for stage in (2, 3):
        done = convert(weights, tmp_path / f"stage{stage}", "universal", stage=stage)
        assert (done["source"], done["target"], done["num_tensors"]) == ("safetensors", "universal", 3 * len(masters))
        assert done["num_bytes"] == 12 * sum(master.numel() for master in masters.values())
    assert (tmp_path / "latest_universal").read_text() == "stage3"
    for world, stages in WHOLE.items():
        found = ranks(world).run(start_from, str(tmp_path), stages)[0]
        for fp8, (loaded, losses, expected) in zip(stages.values(), found, strict=True):
            assert loaded.keys() == masters.keys()
            for name, master in masters.items():
                assert torch.equal(loaded[name], master.float()), name
            # Split masters take the smallest scale that fits from a load, and one with room to grow from a start.
            assert losses == (pytest.approx(expected, rel=1e-3) if fp8 else expected)
    convert(tmp_path / "stage3", tmp_path / "again", "safetensors")
    first, again = load_file(weights / "model.safetensors"), load_file(tmp_path / "again/model.safetensors")
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)
