"""Only data leaves a checkpoint: no pickle in it is executed."""

from __future__ import annotations

import argparse
import datetime
import enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.hostile import Hostile
from torch.serialization import safe_globals

from fp8_ds.checkpoint.contents import read_structure, unknown_names
from fp8_ds.errors import CheckpointError


class Mine:
    def __init__(self) -> None:
        self.value = 7


@pytest.mark.parametrize("new_format", [True, False])
def test_a_hostile_pickle_is_named_and_not_executed(tmp_path: Path, new_format: bool) -> None:
    mark, path = tmp_path / "mark", tmp_path / "file.pt"
    torch.save({"weight": torch.ones(3), "client": Hostile(mark)}, path, _use_new_zipfile_serialization=new_format)
    with pytest.raises(CheckpointError, match="makedirs" if new_format else r"file\.pt: expected tensors"):
        read_structure(path)
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists()  # it is hostile


def test_what_client_states_hold_is_read(tmp_path: Path) -> None:
    state = {
        "rng": np.random.RandomState(3).get_state(),
        "mean": np.float64(0.5),
        "objects": np.array([1, "two"], dtype=object),
        "args": argparse.Namespace(lr=1e-3, betas=(0.9, 0.95), path=Path("data")),
        "when": datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc),
        "rng_torch": torch.get_rng_state(),
    }
    torch.save(state, tmp_path / "file.pt")
    assert unknown_names(tmp_path / "file.pt") == []
    found = read_structure(tmp_path / "file.pt")
    assert found["args"] == state["args"]
    assert found["rng_torch"].device.type == "meta"


def test_a_class_of_the_user_is_named_and_can_be_allowed(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"mine": Mine()}, path)
    name = f"{Mine.__module__}.Mine"
    assert unknown_names(path) == [name]
    with pytest.raises(CheckpointError, match=name):
        read_structure(path)
    with safe_globals([Mine]):
        assert read_structure(path)["mine"].value == 7
        assert unknown_names(path) == []


class Stage(enum.IntEnum):
    weights = 3


class ByName:
    """Pickled as Python 3.11.0 to 3.11.3 pickle the member of an enumeration."""

    def __init__(self, owner: Any, name: str) -> None:
        self.of = owner, name

    def __reduce__(self) -> Any:
        return getattr, self.of


def test_of_getattr_members_of_enumerations_alone_may_be_pickled(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"zero_stage": ByName(Stage, "weights")}, path)
    assert unknown_names(path) == [f"{Stage.__module__}.Stage"]
    with safe_globals([Stage, Mine]):
        assert read_structure(path) == {"zero_stage": Stage.weights} and unknown_names(path) == []
        for owner, name in ((Stage, "__init_subclass__"), (Mine, "__init__"), (Stage, "gradients")):
            torch.save({"found": ByName(owner, name)}, path)
            with pytest.raises(CheckpointError, match="expected a member of an enumeration"):
                read_structure(path)


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"PK\x03\x04 cut off"])
def test_what_is_no_checkpoint_is_an_error_with_its_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"file\.pt: expected tensors and plain data"):
        read_structure(tmp_path / "file.pt")
