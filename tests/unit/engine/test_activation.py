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


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    folder = tmp_path / "packages"
    (folder / "deepspeed").mkdir(parents=True)
    (folder / "deepspeed/__init__.py").write_text(STUB)
    (folder / "deepspeed/part.py").write_text(PART)
    return folder


def run(code: str, *packages: Path, site_dir: Path | None = None) -> str:
    """Standard output of `code` in a Python that sees this checkout and `packages` only; fails with its errors."""
    start = f"import site; site.addsitedir({str(site_dir)!r})\n" if site_dir else ""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    if packages:  # a call of initialize needs pydantic; the stub hides the real deepspeed beside it
        packages += (Path(pydantic.__file__).parents[1],)
    env["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, *packages)))
    command = [sys.executable, "-S", "-c", start + code]
    result = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=HANG)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


CHECK = (
    "import deepspeed\nassert hasattr(deepspeed.initialize, 'fp8_ds_original')\nprint(deepspeed.initialize(model=3))\n"
)


def test_importing_loads_neither_torch_nor_deepspeed_nor_any_other_package(stub: Path) -> None:
    code = "import sys, fp8_ds\nprint([name for name in ('torch', 'deepspeed', 'pydantic') if name in sys.modules])"
    assert run(code, stub) == "[]"


def test_importing_works_where_deepspeed_is_not_installed() -> None:
    code = (
        "import fp8_ds\nassert fp8_ds.is_installed()\n"
        "try:\n    import deepspeed\nexcept ModuleNotFoundError as error:\n    print(error)\n"
        "fp8_ds.uninstall()\nassert not fp8_ds.is_installed()"
    )
    assert run(code) == "No module named 'deepspeed'"


@pytest.mark.parametrize(
    "code",
    ["import fp8_ds\n" + CHECK, "import deepspeed, fp8_ds\n" + CHECK, "import deepspeed.part, fp8_ds\n" + CHECK],
    ids=["before", "after", "after a submodule"],
)
def test_the_order_of_imports_does_not_matter(stub: Path, code: str) -> None:
    assert run(code, stub) == "('stock', 3, None)"


@pytest.mark.parametrize("first", ["", "import deepspeed\n"])
def test_installing_twice_changes_nothing_and_one_uninstall_undoes_it(stub: Path, first: str) -> None:
    code = f"""
{first}import sys, fp8_ds
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
print(deepspeed.initialize is wrapped.fp8_ds_original)
"""
    assert run(code, stub) == "True"


def test_uninstalling_before_deepspeed_is_imported_leaves_it_stock(stub: Path) -> None:
    code = """
import sys
before = list(sys.meta_path)
import fp8_ds
assert sys.meta_path != before
fp8_ds.uninstall()
import deepspeed
print(sys.meta_path == before, hasattr(deepspeed.initialize, 'fp8_ds_original'))
"""
    assert run(code, stub) == "True False"


def test_the_import_hook_leaves_no_trace(stub: Path) -> None:
    """Looking for deepspeed does not import it (transformers and accelerate look); importing keeps its own loader."""
    code = """
import sys
before = list(sys.meta_path)
import importlib.util, fp8_ds
assert importlib.util.find_spec('deepspeed').name == 'deepspeed' and 'deepspeed' not in sys.modules
import deepspeed
assert sys.meta_path == before
print(type(deepspeed.__loader__).__name__, type(deepspeed.__spec__.loader).__name__)
"""
    assert run(code, stub) == "SourceFileLoader SourceFileLoader"


def test_a_failed_import_of_deepspeed_can_be_repeated(stub: Path) -> None:
    failing = "import sys\nif not hasattr(sys, 'ready'):\n    raise ImportError('x')\n"
    (stub / "deepspeed/__init__.py").write_text(failing + STUB)
    code = "import sys, fp8_ds\ntry:\n    import deepspeed\nexcept ImportError:\n    sys.ready = True\n" + CHECK
    assert run(code, stub) == "('stock', 3, None)"
