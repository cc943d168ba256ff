"""Run by test_megatron_te_pretrain.py under torchrun: the clone's pretrain_gpt.py on CPU, Transformer Engine's classes
being those of a stand-in that multiplies without FP8. First argument: "stock", or "ours" for the wrapper.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "megatron_patches"))

import transformer_engine_stand_in


def main() -> None:
    transformer_engine_stand_in.install()
    import transformer_engine  # noqa: F401

    clone = os.environ["MEGATRON_LM_PATH"]
    sys.path.insert(0, clone)
    which, arguments = sys.argv[1], sys.argv[2:]
    from megatron_patches.cpu import on_cpu

    with on_cpu(training=True):
        import megatron.core.transformer.attention

        megatron.core.transformer.attention.SplitAlongDim = None  # a kernel of Transformer Engine's
    if which == "ours":
        from megatron_patches import pretrain_gpt

        sys.argv = ["pretrain_gpt", "--on-cpu", *arguments]
        pretrain_gpt.main()
    else:
        sys.argv = [f"{clone}/pretrain_gpt.py", *arguments]
        with on_cpu(training=True):
            runpy.run_path(sys.argv[0], run_name="__main__")
    print("calls", json.dumps(transformer_engine_stand_in.CALLS), flush=True)


if __name__ == "__main__":
    main()
