"""What pretrain_gpt.py of a clone of Megatron-LM is given on a CPU, and what it answers."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

ARGUMENTS = shlex.split("""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 2 --global-batch-size 4 --train-iters 5 --lr 1e-3 --min-lr 1e-3 --lr-decay-style constant
    --transformer-impl local --use-cpu-initialization --distributed-backend gloo
    --no-gradient-accumulation-fusion --no-rope-fusion --no-persist-layer-norm --no-masked-softmax-fusion
    --mock-data --tokenizer-type NullTokenizer --vocab-size 96 --eval-iters 0 --eval-interval 100
    --num-workers 0 --log-interval 1 --normalization RMSNorm --position-embedding-type rope
    --untie-embeddings-and-output-weights --disable-bias-linear --swiglu --attention-dropout 0
    --hidden-dropout 0 --no-bias-swiglu-fusion --no-bias-dropout-fusion
""")
FP8 = ("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise")
TP = ("--tensor-model-parallel-size", "2")
PP = ("--pipeline-model-parallel-size", "2")
SHARDED = ("--bf16", "--use-distributed-optimizer")


def losses_in(output: str) -> list[float]:
    """Of each iteration that is logged; the last rank logs."""
    return [float(value) for value in re.findall(r"iteration +\d+/.*?lm loss: ([0-9.E+-]+)", output)]


def each(found: list[float]) -> list[float]:
    """Of each iteration: Megatron's second line of a run is the mean of two, it starts anew after that one."""
    return [found[0], 2 * found[1] - found[0], *found[2:]]


def distance(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def words_of_8b(root: Path, tmp_path: Path, has_apex: bool, **env: str) -> list[str]:
    """What the script passes on, where Apex's kernel for gradient accumulation imports or not."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" != -c ] || exit {int(not has_apex)}\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    given = dict.fromkeys(("MEGATRON_LM_PATH", "TOKENIZER", "DATA", "OUTPUT"), str(tmp_path))
    run = subprocess.run(
        [root / "examples/megatron/llama3_8b_8gpus.sh", "--last", "1"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(python), **given, **env},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split("\n")[:-1]
