"""What `fp8-ds convert` makes of safetensors and universal checkpoints, and what it refuses and leaves as it was."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from fp8_ds.checkpoint import folders as m
from fp8_ds.checkpoint import model_folder
from fp8_ds.checkpoint.contents import read_data
from fp8_ds.checkpoint.folders import GLOBAL_STATE
from fp8_ds.cli.app import app
from fp8_ds.errors import CheckpointError, ConfigError, Fp8DsError, UnsupportedError
from fp8_ds.tools.convert import convert, kind_of

MODEL_FILE = "zero_pp_rank_0_mp_rank_00_model_states.pt"
WEIGHTS = {
    "a.weight": torch.randn(33, 5, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "scale": torch.tensor(0.1, dtype=torch.float16),
    "b.weight": torch.full((7,), 1 + 2.0**-20),
}


def write(folder: Path, **files: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    return folder


def indexed(folder: Path, names: dict[str, str], **files: dict[str, torch.Tensor]) -> Path:
    write(folder, **files)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def universal_of(folder: Path, has_manifest: bool = False) -> Path:
    """folder/universal, of stage 2, with one weight `w` of four ones."""
    convert(write(folder / "model", model={"w": torch.ones(4)}), folder / "universal", "universal", stage=2)
    if not has_manifest:
        (folder / "universal" / m.MANIFEST).unlink()
    return folder / "universal"


def save(folder: Path, tag: str) -> None:
    (folder / tag).mkdir(parents=True)
    torch.save({"module": {}}, folder / tag / MODEL_FILE)
    m.write_manifest(folder / tag, m.Manifest({"tag": tag}, {MODEL_FILE: m.record(folder / tag / MODEL_FILE, 0)}))
    (folder / "latest").write_text(tag)


def files_in(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- what is made ---


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_masters_are_the_tensors_and_moments_are_zero_and_take_no_room(tmp_path: Path, stage: int) -> None:
    """Of those in the files that the index names; what is no weight is left out."""
    big = {"big.weight": torch.ones(1000, 1000)}
    names = {**dict.fromkeys(WEIGHTS, "one.safetensors"), **dict.fromkeys([*big, "ids"], "two.safetensors")}
    two = big | {"ids": torch.arange(4)}
    source = indexed(tmp_path / "model", names, one=WEIGHTS, two=two, other={"other": torch.ones(2)})
    found = convert(source, tmp_path / "out", "universal", stage=stage)
    everything = WEIGHTS | big
    numel = sum(tensor.numel() for tensor in everything.values())
    assert (found["num_tensors"], found["num_bytes"]) == (3 * len(everything), 12 * numel)
    assert {path.name for path in (tmp_path / "out/zero").iterdir()} == {*everything, "optimizer_state.pt"}
    assert m.read_manifest(tmp_path / "out") is not None
    for name, tensor in everything.items():
        for file in ("fp32", "exp_avg", "exp_avg_sq"):
            content = read_data(tmp_path / "out/zero" / name / f"{file}.pt")
            value = content if stage == 3 else content["param"]
            expected = tensor.float() if file == "fp32" else torch.zeros(tensor.shape)
            assert torch.equal(value, expected.reshape(-1) if stage == 3 else expected), (name, file)
        assert read_data(tmp_path / "out/zero" / name / "step.pt") == 0
    assert sum(path.stat().st_size for path in (tmp_path / "out").rglob("*.pt")) < 4 * numel + 100_000


def test_shards_have_the_layout_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_folder, "_SHARD_BYTES", 100)
    convert(write(tmp_path / "model", one=WEIGHTS), tmp_path / "universal", "universal", stage=2)
    (tmp_path / "model/config.json").write_text("{}")
    found = convert(tmp_path / "universal", tmp_path / "out", "safetensors", model=tmp_path / "model")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert {"config.json", "model.safetensors.index.json", *files} == set(found["files"])
    assert index["metadata"]["total_size"] == found["num_bytes"] == 2 * sum(w.numel() for w in WEIGHTS.values())
    for name, weight in WEIGHTS.items():
        assert torch.equal(load_file(tmp_path / "out" / index["weight_map"][name])[name], weight.bfloat16())


def test_latest_universal_names_the_first_result_beside_a_source(tmp_path: Path) -> None:
    source = write(tmp_path / "model", one=WEIGHTS)
    latest = tmp_path / "start/latest_universal"

    def run(source: Path, out: str, stage: int = 2) -> Any:
        words = ["convert", str(source), str(tmp_path / "start" / out), "--to", "universal", "--stage", str(stage)]
        result = CliRunner().invoke(app, [*words, "--json"])
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)["latest"]

    assert run(source, "again") == str(latest) and latest.read_text() == "again"
    assert run(tmp_path / "start/again", "other") is None and latest.read_text() == "again"
    before = read_data(tmp_path / "start/again/zero/a.weight/fp32.pt")["param"]
    run(tmp_path / "start/again", "again", stage=3)  # in place
    assert torch.equal(read_data(tmp_path / "start/again/zero/a.weight/fp32.pt"), before.flatten())


def test_schedulers_of_torch_stay_at_their_start(tmp_path: Path) -> None:
    """DeepSpeed hands them the file's state."""
    state = read_data(universal_of(tmp_path) / "mp_rank_00_model_states.pt")["lr_scheduler"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    half = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for scheduler in (half, torch.optim.lr_scheduler.ChainedScheduler([half])):
        scheduler.load_state_dict({**state})
        assert scheduler.get_last_lr() == [1.0]


# --- what is refused, and leaves nothing ---


def with_index(folder: Path, text: str) -> Path:
    (write(folder, one=WEIGHTS) / "model.safetensors.index.json").write_text(text)
    return folder


def cut(folder: Path) -> Path:
    path = write(folder, model=WEIGHTS) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    return folder


ONES = {"w": torch.ones(2)}
REFUSED: list[tuple[Any, dict[str, Any], type[Fp8DsError], str]] = [
    (lambda f: write(f, one=WEIGHTS, two=WEIGHTS), {}, CheckpointError, "two.safetensors: .* a.weight again"),
    (lambda f: indexed(f, {"c": "one.safetensors"}, one=WEIGHTS), {}, CheckpointError, r"\['c'\]"),
    (lambda f: write(f, one={"w": torch.ones(2).to(torch.float8_e4m3fn)}), {}, UnsupportedError, "torch.float8"),
    (lambda f: write(f, one={"ids": torch.arange(3)}), {}, ConfigError, "expected weights"),
    (cut, {}, CheckpointError, "damaged"),
    (lambda f: with_index(f, "{"), {}, CheckpointError, "index.json"),
    (lambda f: write(f, one={"../../outside": torch.ones(2)}), {}, CheckpointError, "got '../../out"),
    (lambda f: write(f, one={str(f.parent / "a"): torch.ones(2)}), {}, CheckpointError, "stay in their folder"),
    (lambda f: indexed(f, {"a": "../x.safetensors"}, one=WEIGHTS), {}, CheckpointError, r"got '\.\./x.safetensors'"),
    (lambda f: write(f, one=ONES), {"stage": None}, ConfigError, "--stage"),
    (lambda f: write(f, one=ONES), {"stage": 0}, ConfigError, "stage: expected 1, 2 or 3, got 0"),
    (lambda f: write(f, one=ONES), {"trust_pickle": True}, ConfigError, "--trust-pickle"),
    (lambda f: write(f, one=ONES), {"target": "deepspeed"}, UnsupportedError, "load_universal"),
    (lambda f: write(f, one=ONES), {"target": "safetensors", "stage": None}, UnsupportedError, "safetensors already"),
    (write, {}, ConfigError, "expected a folder of save_checkpoint"),
]


@pytest.mark.parametrize(("make", "options", "error", "message"), REFUSED)
def test_what_is_no_whole_model_or_makes_no_sense_is_refused_and_leaves_nothing(
    tmp_path: Path, make: Any, options: dict[str, Any], error: type[Fp8DsError], message: str
) -> None:
    source = make(tmp_path / "model")
    with pytest.raises(error, match=message):
        convert(source, tmp_path / "out", **{"target": "universal", "stage": 2, **options})
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("name", ["gone", "empty", "file.csv"])
def test_a_model_without_a_configuration_and_a_folder_with_something_in_it_are_refused_before_weights_are_read(
    tmp_path: Path, name: str
) -> None:
    """What `save` has written would be refused as a save without a rank's file."""
    save(tmp_path / "ckpt", "one")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.csv").touch()
    with pytest.raises(ConfigError, match=f"--model: .*{name}"):
        convert(tmp_path / "ckpt", tmp_path / "out", "safetensors", model=tmp_path / name)
    with pytest.raises(ConfigError, match="expected an empty folder"):
        convert(tmp_path / "ckpt", tmp_path / "ckpt", "safetensors")
    assert not (tmp_path / "out").exists()


def test_weights_beside_a_save_that_did_not_end_are_not_taken_in_its_place(tmp_path: Path) -> None:
    """Trainer writes model.safetensors before DeepSpeed's save: a universal checkpoint of it would be at step 0."""
    save(tmp_path, "global_step8")
    assert kind_of(tmp_path) == "deepspeed"
    (tmp_path / "latest").unlink()
    save_file(ONES, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"by --tag: global_step8\.$"):
        convert(tmp_path, tmp_path / "out", "universal", stage=2)
    with pytest.raises(ConfigError, match="got 'other'"):
        convert(tmp_path, tmp_path / "out", "universal", tag="other")
    assert not (tmp_path / "out").exists()
    (tmp_path / "global_step8" / GLOBAL_STATE).parent.mkdir()
    (tmp_path / "global_step8" / GLOBAL_STATE).touch()  # a universal checkpoint is no save of its own
    assert kind_of(tmp_path) == "safetensors"


PARTS = ("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt")
LAYERS = ("layer_01-model_00-model_states.pt", "layer_01-model_01-model_states.pt")


@pytest.mark.parametrize(
    ("names", "reasons", "error"),
    [
        (PARTS, dict.fromkeys(("safetensors", "universal"), "by which parts"), UnsupportedError),
        ([f"zero_pp_rank_0_{name}" for name in PARTS], {"safetensors": "by which parts"}, UnsupportedError),
        # Layers of pipeline stages are whole, and joined (test_pipeline.py), unless tensor parallelism has cut them.
        ((*PARTS, *LAYERS), {"universal": "by which parts"}, UnsupportedError),
        (
            (PARTS[0], "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
            dict.fromkeys(("safetensors", "universal"), "the files of all ranks"),
            CheckpointError,
        ),
    ],
)
def test_parts_that_nothing_says_how_to_join_or_that_are_not_all_there_are_refused(
    tmp_path: Path, names: tuple[str, ...], reasons: dict[Any, str], error: type[Fp8DsError]
) -> None:
    (tmp_path / "one").mkdir()
    optimizer = {"zero_stage": 2, "partition_count": 2, "single_partition_of_fp32_groups": [torch.ones(2)]}
    for name in names:
        states = {"optimizer_state_dict": optimizer} if "optim" in name else {"module": {}, "ds_version": "0.19.8"}
        torch.save(states, tmp_path / "one" / name)
    for target, reason in reasons.items():
        with pytest.raises(error, match=reason):
            convert(tmp_path / "one", tmp_path / "out", target)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("prefix", "stages", "other"), [("", (1, 2), 3), ("zero_pp_rank_0_", (3,), 2)])
def test_model_files_of_tensor_parallel_ranks_stay_where_the_stage_reads_them(
    tmp_path: Path, prefix: str, stages: tuple[int, ...], other: int
) -> None:
    """The way that a refused load at another tensor-parallel size names, `--stage` and all."""
    universal = tmp_path / "universal"
    (universal / GLOBAL_STATE).parent.mkdir(parents=True)
    for name in (*(f"{prefix}{part}" for part in PARTS), GLOBAL_STATE):
        torch.save({}, universal / name)
    before = {path: path.read_bytes() for path in universal.rglob("*.pt")}
    for stage in stages:
        convert(universal, universal, "universal", stage=stage)
    assert {path: path.read_bytes() for path in universal.rglob("*.pt")} == before
    with pytest.raises(UnsupportedError, match="expected one tensor-parallel rank"):
        convert(universal, universal, "universal", stage=other)


# --- disks and kills ---


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """A longer one cannot be written, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_cannot_be_written_is_an_error_of_files(tmp_path: Path) -> None:
    write(tmp_path / "model", model={"w": torch.ones(1 << 16)})
    convert(tmp_path / "model", tmp_path / "whole", "universal", stage=2)
    commands = [("model", "--to", "universal", "--stage", "2"), ("whole", "--to", "universal", "--stage", "3")]
    for source, *more in [*commands, ("whole", "--to", "safetensors")]:
        with files_of_at_most(1 << 15):
            result = CliRunner().invoke(app, ["convert", str(tmp_path / source), str(tmp_path / "out"), *more])
        assert result.exit_code == 3, result.stderr
        assert "File too large" in result.stderr and str(tmp_path / "out") in result.stderr.replace("\n", "")
        assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


def test_a_conversion_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    universal = universal_of(tmp_path, has_manifest=True)
    before = files_in(tmp_path)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(m, "seal_universal", fail)  # the files have been written
        for source, out in ((tmp_path / "model", tmp_path / "other"), (universal, universal)):
            with pytest.raises(OSError, match="No space left"):
                convert(source, out, "universal", stage=3)
            assert files_in(tmp_path) == before
    universal.rename(tmp_path / "universal.replaced")  # killed between two renames
    convert(universal, universal, "universal", stage=3)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "universal", "latest_universal"}


@pytest.mark.parametrize("at", [0, 1])
def test_a_conversion_that_was_killed_leaves_nothing_that_passes_for_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """At the first of three shards, and between their last names."""
    tensors = ((str(number), torch.ones(4)) for number in range(3))
    monkeypatch.setattr(model_folder, "_SHARD_BYTES", 16)
    named: list[Path] = []
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        named.append(target)
        if len(named) > at:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        model_folder.write_tensors(tensors, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == at
    with pytest.raises((FileNotFoundError, ConfigError)):
        convert(tmp_path / "out", tmp_path / "again", "universal", stage=2)


@pytest.mark.parametrize("where", ["tensors", "beside", "rename"])
def test_an_error_on_the_way_leaves_no_part_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((str(number), torch.ones(4)) for number in range(3))
        if where == "tensors":
            fail()

    monkeypatch.setattr(model_folder, "_SHARD_BYTES", 16)
    rename, named = Path.rename, []

    def renamed(path: Path, target: Path) -> Path:
        named.append(target)
        return fail() if where == "rename" and len(named) == 3 else rename(path, target)

    monkeypatch.setattr(Path, "rename", renamed)
    with pytest.raises(OSError, match="No space left"):
        model_folder.write_tensors(tensors(), tmp_path / "out", fail if where == "beside" else lambda: None)
    assert not any((tmp_path / "out").iterdir())


# --- what is no file, and names that lead elsewhere ---


SPECIAL: dict[str, Callable[[Path], object]] = {
    "a named pipe": os.mkfifo,
    "a socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_file_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    to_stage = {"target": "universal", "stage": 3}
    to_model: dict[str, Any] = {"target": "safetensors"}
    universal, configs, saves = universal_of(tmp_path), tmp_path / "configs", tmp_path / "save"
    configs.mkdir()
    (configs / "config.json").write_text("{}")
    cases: list[tuple[Path, Path, dict[str, Any]]] = [
        (tmp_path / "model/model-2.safetensors", tmp_path / "model", to_stage),
        (tmp_path / "model/model.safetensors.index.json", tmp_path / "model", to_stage),
        (configs / "tokenizer.json", universal, {**to_model, "model": configs}),
        (saves / "one/mp_rank_00_model_states.pt", saves, {"target": "universal", "tag": "one"}),
        (saves / "one/mp_rank_00_model_states.pt", saves, {**to_model, "tag": "one"}),
        (saves / "latest", saves, {"target": "universal"}),
    ]
    for name in ("zero/w/fp32.pt", m.MANIFEST, "mp_rank_00_model_states.pt"):
        if kind != "a folder" or "/" not in name:  # a parameter may have such a name
            cases += [(universal / name, universal, words) for words in (to_stage, to_model)]
    for path, source, words in cases:
        content = path.read_bytes() if path.exists() else None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        SPECIAL[kind](path)
        for out in (tmp_path / "out", universal) if source == universal and words == to_stage else (tmp_path / "out",):
            with pytest.raises(CheckpointError, match=f"^{re.escape(str(path))}: expected a file, got {kind}"):
                convert(source, out, **words)
        shutil.rmtree(path) if kind == "a folder" else path.unlink()
        if content is not None:
            path.write_bytes(content)


@pytest.mark.parametrize("name", ["../../elsewhere", "{}/elsewhere"])
def test_names_in_a_universal_checkpoint_lead_to_no_other_folder(tmp_path: Path, name: str) -> None:
    universal = universal_of(tmp_path)
    (universal / "zero/w").rename(tmp_path / "elsewhere")
    before = files_in(tmp_path / "elsewhere")
    for path in universal.glob("*_model_states.pt"):
        state = torch.load(path, weights_only=False)
        torch.save({**state, "param_shapes": [{name.format(tmp_path): torch.Size([4])}]}, path)
    for out, words in (("out", {"target": "universal", "stage": 3}), ("out", {"target": "safetensors"})):
        with pytest.raises(CheckpointError, match=r"expected names that stay in their folder, got '.*elsewhere'"):
            convert(universal, tmp_path / out, **words)
    with pytest.raises(CheckpointError, match="stay in their folder"):
        convert(universal, universal, "universal", stage=3)
    assert files_in(tmp_path / "elsewhere") == before


@pytest.mark.parametrize("linked", ["zero/w", "zero/w/fp32.pt", "zero/w/fp32.pt.tmp"])
def test_a_link_in_a_universal_checkpoint_is_not_written_through(tmp_path: Path, linked: str) -> None:
    universal = universal_of(tmp_path)
    path, elsewhere = universal / linked, tmp_path / "elsewhere"
    if path.exists():
        path.rename(elsewhere)
    else:
        elsewhere.write_text("something else")
    path.symlink_to(elsewhere)
    before = files_in(elsewhere) or elsewhere.read_bytes()
    convert(universal, universal, "universal", stage=3)
    assert (files_in(elsewhere) or elsewhere.read_bytes()) == before
    assert torch.equal(torch.load(universal / "zero/w/fp32.pt"), torch.ones(4))  # the form of stage 3
