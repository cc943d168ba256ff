"""The names of docs/api/index.md, by `import fp8_ds` alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, operator, sys
import fp8_ds
assert "torch" not in sys.modules
lacking = []
for name in json.loads(sys.argv[1]):
    try:
        operator.attrgetter(name)(fp8_ds)
    except AttributeError:
        lacking.append(name)
print(json.dumps(lacking))
"""


def test_importing_fp8_ds_is_enough_for_each_name_of_the_api() -> None:
    page = (ROOT / "docs/api/index.md").read_text()
    found = sorted(set(re.findall(r"`fp8_ds\.([\w.]+)`", page)))
    names = [*found, "tp.parallelize", "attention.attention", "__all__"]
    assert {"tp", "attention", "monitor", "tools.estimate", "CheckpointError"} <= set(names)
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps(names)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
