"""A run in pieces is the run in one: same lines, same steps, state gone at the end."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fp8_ds.errors import NumericsError
from fp8_ds.parity.loop import Length, Ranks, State, train

LENGTH = Length(steps=25, tokens_per_step=100, num_evaluations=5, log_every=10)


class Fake:
    """Loss of a step: the weight, which shrinks; it is all of the state."""

    def __init__(self) -> None:
        self.weight = 4.0
        self.taken: list[int] = []

    def step(self, number: int) -> Tensor:
        self.taken.append(number)
        self.weight *= 0.9
        return torch.tensor(self.weight)

    def evaluate(self) -> float:
        return 2 * self.weight

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "weight").write_text(str(self.weight))

    def load(self, folder: Path) -> None:
        self.weight = float((folder / "weight").read_text())


def columns(log: Path) -> list[list[str]]:
    """All but the seconds."""
    return [[cell for k, cell in enumerate(line.split(",")) if k != 2] for line in log.read_text().splitlines()]


def test_a_run_in_pieces_logs_what_a_run_in_one_does(tmp_path: Path) -> None:
    assert train(Fake(), LENGTH, tmp_path / "whole.csv") is not None
    whole = columns(tmp_path / "whole.csv")
    assert [row[0] for row in whole] == ["step", "0", "5", "10", "15", "20", "25"]
    assert [row[3] for row in whole[1:]] == [f"{8 * 0.9**step:.6f}" for step in range(0, 26, 5)]
    assert float(whole[2][2]) == pytest.approx(sum(4 * 0.9**k for k in range(1, 6)) / 5, abs=1e-6)

    state, taken = State(tmp_path / "state", {"seed": 1}, Ranks()), []
    for piece in range(5):
        fake = Fake()
        seconds = train(fake, LENGTH, tmp_path / "cut.csv", state, deadline=0.0)  # cut at each look at the clock
        taken += fake.taken
        assert (seconds is None) == (piece < 4)
        assert (tmp_path / "cut.csv").exists() == (piece == 4)
        assert len(list((tmp_path / "state").glob("step*"))) == (piece < 4)
    assert taken == list(range(25))
    assert columns(tmp_path / "cut.csv") == whole
    assert not (tmp_path / "state").exists() and not (tmp_path / "cut.part").exists()


def test_a_branch_goes_on_where_it_leaves_its_trunk_and_logs_what_both_have_done(tmp_path: Path) -> None:
    def branch() -> State:
        return State(tmp_path / "branch", {"arm": "branch"}, Ranks())

    trunk = State(tmp_path / "trunk", {"arm": "trunk"}, Ranks(), {15: [branch()]})
    train(Fake(), LENGTH, tmp_path / "trunk.csv", trunk)
    assert not (tmp_path / "trunk").exists()
    fake = Fake()
    train(fake, LENGTH, tmp_path / "branch.csv", branch())
    assert fake.taken == list(range(15, 25)) and columns(tmp_path / "branch.csv") == columns(tmp_path / "trunk.csv")
    assert not (tmp_path / "branch").exists()


def test_the_state_of_another_run_is_not_gone_on_with(tmp_path: Path) -> None:
    train(Fake(), LENGTH, tmp_path / "a.csv", State(tmp_path / "state", {"seed": 1}, Ranks()), deadline=0.0)
    fake = Fake()
    train(fake, LENGTH, tmp_path / "a.csv", State(tmp_path / "state", {"seed": 2}, Ranks()))
    assert fake.taken == list(range(25))


def test_a_save_that_fails_leaves_the_former_state(tmp_path: Path) -> None:
    class Full(Fake):
        def save(self, folder: Path) -> None:
            raise OSError("no space left")

    state = State(tmp_path / "state", {}, Ranks())
    train(Fake(), LENGTH, tmp_path / "a.csv", state, deadline=0.0)
    with pytest.raises(OSError, match="no space"):
        train(Full(), LENGTH, tmp_path / "a.csv", state, deadline=0.0)
    fake = Fake()
    train(fake, LENGTH, tmp_path / "a.csv", state)
    assert fake.taken == list(range(5, 25))


def test_without_a_state_the_deadline_is_not_looked_at(tmp_path: Path) -> None:
    assert train(Fake(), LENGTH, tmp_path / "a.csv", deadline=0.0) is not None


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_log(tmp_path: Path) -> None:
    class Diverges(Fake):
        def step(self, number: int) -> Tensor:
            return torch.tensor(math.nan if number == 7 else 1.0)

    with pytest.raises(NumericsError, match="got nan at step 10"):
        train(Diverges(), LENGTH, tmp_path / "a.csv")
    assert not (tmp_path / "a.csv").exists()
    assert columns(tmp_path / "a.part")[-1][0] == "10"


def test_other_ranks_stop_where_one_does_and_write_nothing(tmp_path: Path) -> None:
    ranks = Ranks(writes=False, mean=lambda value: value + 1, any=lambda flag: True)
    fake, state = Fake(), State(tmp_path / "state", {}, ranks)
    assert train(fake, LENGTH, tmp_path / "a.csv", state, math.inf, ranks) is None
    assert fake.taken == list(range(5))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["weight"]


def test_a_run_can_end_early(tmp_path: Path) -> None:
    assert train(Fake(), LENGTH, tmp_path / "a.csv", after_step=lambda step: step == 12) is not None
    assert columns(tmp_path / "a.csv")[-1][0] == "12"


def test_a_line_of_the_log_takes_no_longer_the_more_there_are_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    whole = Path.write_text

    def write_text(path: Path, text: str) -> int:
        written.append(path.name)
        return whole(path, text)

    monkeypatch.setattr(Path, "write_text", write_text)
    train(Fake(), Length(steps=2000, tokens_per_step=100, log_every=1), tmp_path / "run.csv")
    assert len(columns(tmp_path / "run.csv")) == 2002 and written == ["run.part"]
