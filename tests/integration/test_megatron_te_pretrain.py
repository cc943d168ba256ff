"""A clone's pretrain_gpt.py over Transformer Engine's layers, on CPU, its classes being those of a stand-in that
multiplies without FP8. $MEGATRON_LM_PATH names the clone; without it these tests are skipped, and say so.

torchrun starts this file; its first argument is "stock", or "ours" for the wrapper.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if __name__ != "__main__":
    from pretrain_arguments import ARGUMENTS, losses_in

    pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron-core==0.16.1")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("MEGATRON_LM_PATH"), reason="MEGATRON_LM_PATH names no clone of Megatron-LM"),
]
ENGINE = ("--transformer-impl", "transformer_engine", "--bf16", "--fp8-format", "hybrid")
NUM_LAYERS, NUM_ITERATIONS, NUM_MICRO = 2, 5, 2
ALL_ATTENTIONS = NUM_LAYERS * NUM_ITERATIONS * NUM_MICRO


@pytest.fixture(scope="module")
def run(root: Path) -> Any:
    """run(which, *words) -> (losses, calls of the stand-in, output); each once."""
    known: dict[tuple[str, ...], Any] = {}

    def of(which: str, *words: str) -> tuple[list[float], dict[str, int], str]:
        key = (which, *words)
        if key not in known:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
            command += [__file__, which, *ARGUMENTS, *ENGINE, *words]
            stand_in, own = str(root / "tests/unit/megatron_patches"), os.environ.get("PYTHONPATH", "")
            paths = os.pathsep.join([str(root), stand_in, own])
            env = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
            env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
            calls = json.loads(done.stdout.rsplit("calls ", 1)[1].splitlines()[0])
            known[key] = (losses_in(done.stdout), calls, done.stdout)
        return known[key]

    return of


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise", "mxfp8"])
def test_every_recipe_of_megatrons_trains_with_our_attention(run: Any, recipe: str) -> None:
    """The stand-in has no FP8, so only attention can differ; that of fp8_ds takes all calls, stock's none."""
    words = ("--fp8-recipe", recipe)
    stock, calls, _ = run("stock", *words)
    assert len(stock) == NUM_ITERATIONS and calls["DotProductAttention"] == ALL_ATTENTIONS
    ours, calls, output = run("ours", *words, "--fp8-attention-backend", "fa3_fp8_emulated")
    assert calls.get("DotProductAttention", 0) == 0 and calls["TELayerNormColumnParallelLinear"] == 2 * ALL_ATTENTIONS
    assert stock != ours and max(abs(a - b) for a, b in zip(stock, ours, strict=True)) < 0.02
    assert f"{4 * NUM_LAYERS} x Transformer Engine {recipe} | attention: {NUM_LAYERS} x " in output


def test_dropout_goes_to_transformer_engines_attention(run: Any) -> None:
    words = ("--fp8-recipe", "tensorwise", "--fp8-attention-backend", "reference", "--attention-dropout", "0.1")
    _, calls, output = run("ours", *words)
    assert calls["DotProductAttention"] == ALL_ATTENTIONS
    assert "stock (attention dropout 0.1)" in output


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_health_looks_into_transformer_engines_linears(run: Any, recipe: str) -> None:
    """Without a backend of attention, with which the wrapper changes nothing; what is looked at is left as it is."""
    words = ("--fp8-recipe", recipe)
    found, _, output = run("ours", *words, "--fp8-health-interval", "2")
    assert found == run("stock", *words)[0]
    lines = re.findall(r"\[fp8\] iteration +(\d+) \| (.*)", output)
    assert [int(number) for number, _ in lines] == [1, 2, 3, 4, 5]
    assert "amax" not in lines[0][1] and all("| gathered" not in line for _, line in lines)
    for number, line in lines[1:]:
        sampled = int(number) // 2 * 2
        assert re.search(r"coverage: 8\d\.\d+ % of GEMM FLOPs \| amax: [0-9.]+ \((input|weight|grad_output) of ", line)
        assert "saturation: 0.000 %" in line and line.endswith(f"sampled in iteration {sampled}")


def main() -> None:
    import transformer_engine_stand_in

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
