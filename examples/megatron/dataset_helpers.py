"""Megatron's compiled dataset helper is in the clone afterwards: from the wheel of megatron-core of the same Python.

Without it Megatron runs `make`, which needs a compiler and pybind11. Nothing is copied where it is there already, or
where no megatron-core is installed. A run with --on-cpu does this by itself.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
from megatron_patches.dataset_helpers import copy_helper

if __name__ == "__main__":
    copy_helper(Path(sys.argv[1]) / "megatron" / "core" / "datasets")
