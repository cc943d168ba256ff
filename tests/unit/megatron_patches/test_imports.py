"""Megatron's runs import no DeepSpeed: its import takes seconds, sets an accelerator up and may not be wanted there."""

from __future__ import annotations

import subprocess
import sys

from support import HANG

CODE = """
import importlib, pkgutil, sys
sys.modules["deepspeed"] = None  # whose import fails then
import megatron_patches
for module in pkgutil.iter_modules(megatron_patches.__path__, "megatron_patches."):
    importlib.import_module(module.name)
    print(module.name)
"""


def test_no_module_imports_deepspeed() -> None:
    command = [sys.executable, "-W", "ignore", "-c", CODE]
    run = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert {"megatron_patches.optimizer_adam", "megatron_patches.linear"} <= {*run.stdout.split()}
