"""A clone's pretrain_gpt.py as it is, without our wrapper, on a machine without a GPU. For dry runs only.

python benchmarks/megatron_stock_on_cpu.py CLONE [arguments of Megatron]
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    script = Path(sys.argv.pop(1), "pretrain_gpt.py")
    sys.path.insert(0, str(script.parent))
    from megatron_patches.cpu import on_cpu

    sys.argv[0] = str(script)
    with on_cpu(training=True):
        runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
