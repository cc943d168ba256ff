"""pretrain_gpt.py of a clone with Transformer Engine on GPUs: checkpoints to stock and back, pipelines, FP8 weights.

$MEGATRON_LM_PATH names the clone (core_v0.16.1), which must be writable; without it, or without Transformer Engine,
these tests are skipped, and say so. Each launches the script up to five times, half a minute a time; so that they
share a GPU: `pytest -m gpu -n 4 --dist worksteal`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pretrain_arguments import distance, each, losses_in
from processes import ENDED, run_or_end

from megatron_patches.cpu import copy_helper

CLONE = os.environ.get("MEGATRON_LM_PATH")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CLONE, reason="MEGATRON_LM_PATH names no clone of Megatron-LM"),
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"
    ),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ARGUMENTS = shlex.split("""
    --num-layers 2 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --seq-length 256 --max-position-embeddings 256 --micro-batch-size 2 --global-batch-size 4
    --train-iters 4 --lr 1e-3 --min-lr 1e-3 --lr-decay-style constant --bf16 --use-distributed-optimizer --mock-data
    --no-gradient-accumulation-fusion --tokenizer-type NullTokenizer --vocab-size 511 --eval-iters 0
    --eval-interval 100 --num-workers 0 --log-interval 1 --normalization RMSNorm --position-embedding-type rope
    --untie-embeddings-and-output-weights --disable-bias-linear --swiglu --attention-dropout 0 --hidden-dropout 0
""")
FP8 = ("--attention-backend", "fused", "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise")
"""Transformer Engine's; later words have the last say."""
OURS = ("--fp8-attention-backend", "reference")
STATES = ("--fp8-optimizer-states",)
FP8_WEIGHTS = (*STATES, "--fp8-param-gather", "--fp8-master", "e4m19")
TP = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
# More iterations than the checkpoint was planned for.
KEPT = ("--ckpt-format", "torch_dist", "--override-opt-param-scheduler", "--save-interval", "4")
CHECKED = """
from fp8_weight_checks import num_checked
from megatron_patches import pretrain_gpt
from megatron_patches.optimizer_sharded import Fp8DistributedOptimizer

stock_step = Fp8DistributedOptimizer.step_with_ready_grads

def checked_step(optimizer):
    done = stock_step(optimizer)
    print(f"checked {num_checked(optimizer)} FP8 weights", flush=True)
    return done

if __name__ == "__main__":
    Fp8DistributedOptimizer.step_with_ready_grads = checked_step
    pretrain_gpt.main()
"""
"""The wrapper's pretrain_gpt.py; after each step Transformer Engine's FP8 weights are what our masters say."""
LIMIT = 400.0
"""Seconds of one launch."""
CLOSE = 0.03
"""Between losses of about 6: other attention kernels, and updates rounded in another way."""


@pytest.fixture(scope="module", autouse=True)
def helper_of_the_clone() -> None:
    copy_helper(Path(str(CLONE)) / "megatron/core/datasets")


def first_error(stderr: str) -> str:
    """Where the first rank failed, and torchrun's table of exit codes and signals, which is the end."""
    start = stderr.find("Traceback (most recent call last)")
    return stderr[-3000:] if start < 0 else f"{stderr[start : start + 5000]}\n[...]\n{stderr[-2500:]}"


@pytest.fixture
def losses(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """losses(*words, ranks=1, ours=False, checked=False, layers=FP8): of each iteration, by the stock script or the
    wrapper; checked: by CHECKED, which looks into the weights. losses.output: what the last run printed."""

    logs = tmp_path_factory.mktemp("launches")

    def run(
        *words: str, ranks: int = 1, ours: bool = False, checked: bool = False, layers: tuple[str, ...] = FP8
    ) -> list[float]:
        if torch.cuda.device_count() < ranks:
            pytest.skip(f"needs {ranks} GPUs, {torch.cuda.device_count()} here")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        script = str(logs / "checked.py") if checked else f"{CLONE}/pretrain_gpt.py"
        (logs / "checked.py").write_text(CHECKED)
        command += ["-m", "megatron_patches.pretrain_gpt"] if ours else [script]
        env = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1", "MAKEFLAGS": "n"}
        own = [CLONE, os.environ.get("PYTHONPATH")] if checked else [os.environ.get("PYTHONPATH")]
        env["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "tests/distributed"), *filter(None, own)])
        command += [*ARGUMENTS, *layers, *words]
        number = len(list(logs.glob("*.out")))
        out, err = logs / f"{number}.out", logs / f"{number}.err"
        with out.open("w") as stdout, err.open("w") as stderr:
            status = run_or_end(command, LIMIT, grace=40, env=env, stdout=stdout, stderr=stderr)
        printed = out.read_text()
        reason = f"none after {LIMIT:.0f} s" if status == ENDED else status
        assert status == 0, f"status {reason}\n{printed[-3000:]}\n{first_error(err.read_text())}"
        run.output = printed  # type: ignore[attr-defined]
        found = losses_in(printed)
        assert found and all(0 < value < 20 for value in found), printed[-3000:]
        if checked:
            looks = re.findall(r"checked [1-9]\d* FP8 weights", printed)
            assert len(looks) == ranks * len(found), printed[-3000:]
        return found

    return run


RESHARDABLE = ("--dist-ckpt-optim-fully-reshardable",)
"""Between bf16 and FP8 weights nothing else goes over."""


@pytest.mark.parametrize(
    "words", [OURS, (*OURS, *STATES), (*OURS, *FP8_WEIGHTS, *RESHARDABLE)], ids=["layers", "states", "FP8 weights"]
)
def test_checkpoints_of_stocks_te_spec_go_on_in_ours_and_back(losses: Any, tmp_path: Path, words: tuple[str]) -> None:
    first, second = (str(tmp_path / name) for name in ("first", "second"))
    of_stock = (*KEPT, *(word for word in words if word in RESHARDABLE))
    losses(*of_stock, "--save", first)
    stock = losses(*of_stock, "--load", first, "--train-iters", "8")
    ours = losses(*KEPT, *words, "--load", first, "--train-iters", "8", "--save", second, ours=True)
    assert len(stock) == len(ours) == 4 and stock != ours
    assert distance(stock, ours) < CLOSE
    back = losses(*of_stock, "--load", second, "--train-iters", "10")
    again = losses(*KEPT, *words, "--load", second, "--train-iters", "10", ours=True)
    assert len(back) == 2 and distance(back, again) < CLOSE


@pytest.mark.parametrize("words", [STATES, FP8_WEIGHTS], ids=["bf16 weights", "FP8 weights"])
def test_a_resumed_run_is_the_uninterrupted_one(losses: Any, tmp_path: Path, words: tuple[str]) -> None:
    whole = losses(*KEPT, *OURS, *words, "--train-iters", "8", ours=True)
    begun = losses(*KEPT, *OURS, *words, "--save", str(tmp_path), ours=True)
    resumed = losses(*KEPT, *OURS, *words, "--load", str(tmp_path), "--train-iters", "8", ours=True)
    assert distance(each(whole), [*each(begun), *each(resumed)]) < 2e-3  # gradients of attention are sums in any order


@pytest.mark.parametrize(
    ("words", "ranks"), [((), 1), ((), 2), (TP, 2)], ids=["one rank", "data parallel", "tensor parallel"]
)
def test_transformer_engine_reads_the_high_parts_of_masters(losses: Any, words: tuple[str, ...], ranks: int) -> None:
    """After each step: bytes, a scale that is a power of two, and the transpose that backwards read."""
    losses(*OURS, *FP8_WEIGHTS, *words, ranks=ranks, checked=True)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_health_looks_into_transformer_engines_linears(losses: Any, recipe: str) -> None:
    words = ("--fp8-recipe", recipe)
    plain = losses(*words, ours=True)
    assert losses(*words, "--fp8-health-interval", "2", ours=True) == plain, "what is looked at is left as it is"
    shown = re.search(
        r"\[fp8\] iteration +4 \| .*amax: ([0-9.e+-]+) .*saturation: ([0-9.]+) %.*underflow", losses.output
    )
    assert shown is not None, losses.output[-3000:]
    assert 0 < float(shown[1]) < 1000 and (recipe == "delayed" or float(shown[2]) == 0)


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        (("--spec", "megatron_patches.layer_specs", "gpt_reference"), 1),
        (("--num-experts", "4", "--moe-router-topk", "2"), 1),
        ((), 2),
        (TP, 2),
        (("--pipeline-model-parallel-size", "2"), 2),
    ],
    ids=["spec", "experts", "data parallel", "tensor parallel", "pipeline"],
)
def test_losses_follow_stocks(losses: Any, words: tuple[str, ...], ranks: int) -> None:
    by_spec = "--spec" in words
    stock = losses(*(() if by_spec else words), ranks=ranks)
    plain = losses(*words, *(() if by_spec else OURS), ranks=ranks, ours=not by_spec)
    assert len(plain) == 4 and plain != stock and distance(plain, stock) < CLOSE
    if not by_spec:
        states = losses(*words, *OURS, *STATES, ranks=ranks, ours=True)
        assert states != plain and distance(states, stock) < CLOSE
        weights = losses(*words, *OURS, *FP8_WEIGHTS, ranks=ranks, ours=True)
        assert weights not in (plain, states) and distance(weights, stock) < 2 * CLOSE  # its first updates differ
