"""Ranks of a script that are forked from one process, which has imported what all of them would.

    python forked_ranks.py MODULE,... SCRIPT [ARGUMENTS]     # WORLD_SIZE, MASTER_ADDR and MASTER_PORT: torch's

Ends with 1 as soon as a rank has failed; the others are killed.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import sys
from pathlib import Path


def main() -> None:
    modules, script, *arguments = sys.argv[1:]
    for name in modules.split(","):
        importlib.import_module(name)
    ranks = set()
    for rank in range(int(os.environ["WORLD_SIZE"])):
        child = os.fork()
        if child == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            sys.argv = [script, *arguments]
            sys.path[0] = str(Path(script).parent)
            runpy.run_path(script, run_name="__main__")
            return
        ranks.add(child)
    while ranks:
        child, status = os.wait()
        ranks.discard(child)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            raise SystemExit(1)


if __name__ == "__main__":
    main()
