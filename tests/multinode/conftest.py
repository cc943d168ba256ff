"""Two hosts for the whole session, and training on them or on one of them."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from hosts import Finished, Hosts, why_not
from launchers import launch

Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Skipped, and said in the warnings at the end, where no network namespace can be made."""
    if reason := why_not():
        warnings.warn(f"tests/multinode skipped: {reason}", stacklevel=1)
        pytest.skip(reason)
    made = Hosts(tmp_path_factory.mktemp("hosts"))
    try:
        yield made
    finally:
        made.close()


class Trainer:
    """train(cases, ...): each case's results by rank. The same call is run once a session."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.finished: Finished | None = None
        self._known: dict[str, Results] = {}

    def __call__(
        self,
        cases: list[dict[str, Any]],
        launcher: str = "no_ssh",
        anew: bool = False,
        **options: Any,
    ) -> Results:
        options = {"ranks_per_host": 1, "num_hosts": 2, **options}
        key = json.dumps([cases, launcher, options], default=str)
        if anew or key not in self._known:
            self._known[key] = self._train(cases, launcher, **options)
        return self._known[key]

    def _train(self, cases: list[dict[str, Any]], launcher: str, **options: Any) -> Results:
        out = self.hosts.folder / f"out{len(list(self.hosts.folder.glob('out*')))}"
        out.mkdir()
        (out / "cases.json").write_text(json.dumps(cases))
        path = Path(__file__).resolve().with_name("train_cases.py")
        self.finished = launch(self.hosts, launcher, path, "--cases", out / "cases.json", "--out", out, **options)
        world_size = options["ranks_per_host"] * options["num_hosts"]
        return {
            case["name"]: [
                json.loads((out / f"{case['name']}-rank{rank}.json").read_text()) for rank in range(world_size)
            ]
            for case in cases
        }


@pytest.fixture(scope="session")
def train(hosts: Hosts) -> Callable[..., Results]:
    return Trainer(hosts)
