"""install() against a stub of deepspeed, each time in a fresh interpreter that sees nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pydantic
import pytest
from support import HANG

ROOT = Path(__file__).parents[3]

STUB = """
import sys
from deepspeed.part import initialize
order = list(sys.modules)
"""
PART = """
def initialize(args=None, model=None, config=None, config_params=None):
    return ("stock", model, config)
"""
FAILING = "import sys\nif not hasattr(sys, 'ready'):\n    raise ImportError('x')\n"
CHECK = """
import deepspeed
assert hasattr(deepspeed.initialize, 'fp8_ds_original') and deepspeed.initialize(model=3) == ('stock', 3, None)
"""
TWICE = """
before = list(sys.meta_path)
fp8_ds.install()
assert sys.meta_path == before
import deepspeed
wrapped = deepspeed.initialize
fp8_ds.install()
assert deepspeed.initialize is wrapped and not hasattr(wrapped.fp8_ds_original, 'fp8_ds_original')
fp8_ds.uninstall()
assert deepspeed.initialize is wrapped.fp8_ds_original and not fp8_ds.is_installed()
fp8_ds.install()
assert deepspeed.initialize.fp8_ds_original is wrapped.fp8_ds_original
fp8_ds.uninstall(); fp8_ds.uninstall()
assert deepspeed.initialize is wrapped.fp8_ds_original
"""
CLAIMS = {
    "importing loads no other package": """
import sys, fp8_ds
assert not {'torch', 'deepspeed', 'pydantic'} & set(sys.modules)
""",
    "imported before deepspeed": "import fp8_ds" + CHECK,
    "imported after deepspeed": "import deepspeed, fp8_ds" + CHECK,
    "imported after a submodule": "import deepspeed.part, fp8_ds" + CHECK,
    "installing twice changes nothing and one uninstall undoes it": "import sys, fp8_ds" + TWICE,
    "the same after deepspeed": "import sys, deepspeed, fp8_ds" + TWICE,
    "uninstalling before deepspeed is imported leaves it stock": """
import sys
before = list(sys.meta_path)
import fp8_ds
assert sys.meta_path != before
fp8_ds.uninstall()
import deepspeed
assert sys.meta_path == before and not hasattr(deepspeed.initialize, 'fp8_ds_original')
""",
    # transformers and accelerate look for it
    "looking for deepspeed does not import it, and importing keeps its own loader": """
import sys
before = list(sys.meta_path)
import importlib.util, fp8_ds
assert importlib.util.find_spec('deepspeed').name == 'deepspeed' and 'deepspeed' not in sys.modules
import deepspeed
assert sys.meta_path == before
assert {type(deepspeed.__loader__).__name__, type(deepspeed.__spec__.loader).__name__} == {'SourceFileLoader'}
""",
    "a failed import of deepspeed can be repeated": """
import sys, fp8_ds
try:
    import deepspeed
except ImportError:
    sys.ready = True
"""
    + CHECK,
}


def run(code: str, *packages: Path) -> None:
    """`code` in a Python that sees this checkout and `packages` only."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    env["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, *packages)))
    command = [sys.executable, "-S", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=HANG)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("claim", CLAIMS)
def test_beside_deepspeed(tmp_path: Path, claim: str) -> None:
    (tmp_path / "deepspeed").mkdir(parents=True)
    (tmp_path / "deepspeed/__init__.py").write_text(FAILING + STUB if "failed" in claim else STUB)
    (tmp_path / "deepspeed/part.py").write_text(PART)
    # A call of initialize needs pydantic; the stub hides the real deepspeed beside it.
    run(CLAIMS[claim], tmp_path, Path(pydantic.__file__).parents[1])


def test_importing_works_where_deepspeed_is_not_installed() -> None:
    run(
        "import fp8_ds\nassert fp8_ds.is_installed()\n"
        "try:\n    import deepspeed\nexcept ModuleNotFoundError:\n    pass\nelse:\n    raise AssertionError\n"
        "fp8_ds.uninstall()\nassert not fp8_ds.is_installed()"
    )
