"""The pretrain_gpt.py of a real clone of Megatron-LM, by the wrapper and by --spec alone, on CPU over gloo.

$MEGATRON_LM_PATH names the clone; without it these tests are skipped, and say so.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pretrain_arguments import ARGUMENTS, FP8, SHARDED, TP, distance, each, losses_in, words_of_8b

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron-core==0.16.1")

CLONE = os.environ.get("MEGATRON_LM_PATH")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CLONE, reason="MEGATRON_LM_PATH names no clone of Megatron-LM"),
]

STOCK_SCRIPT = """
import os, runpy, sys
root = os.environ["MEGATRON_LM_PATH"]
sys.path.insert(0, root)
from megatron_patches.cpu import on_cpu
sys.argv[0] = f"{root}/pretrain_gpt.py"
with on_cpu(training=True):
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def python_path(root: Path) -> str:
    return os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])


def launch(root: Path, *words: str, ranks: int = 1, script: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(script)] if script else ["-m", "megatron_patches.pretrain_gpt", "--on-cpu"]
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": python_path(root)}
    return subprocess.run([*command, *words], env=environment, capture_output=True, text=True, timeout=500)


def losses(run: subprocess.CompletedProcess[str]) -> list[float]:
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return losses_in(run.stdout)


@pytest.fixture(scope="module")
def stock(root: Path) -> Any:
    """Losses of Megatron's own layers in a layout, run once."""
    known: dict[tuple[Any, ...], list[float]] = {}

    def of(words: tuple[str, ...], ranks: int) -> list[float]:
        if "--sequence-parallel" in words:  # which Megatron's norms do not take without a spec of ours
            words = (*words, "--fp8-attention-backend", "reference")
        if (words, ranks) not in known:
            known[words, ranks] = losses(launch(root, *ARGUMENTS, *words, ranks=ranks))
        return known[words, ranks]

    return of


def test_the_clone_has_every_row_with_a_body_that_was_tested(root: Path) -> None:
    paths = os.pathsep.join([str(CLONE), python_path(root)])
    command = [sys.executable, "-W", "always", "-m", "megatron_patches.patches"]
    env = {**os.environ, "PYTHONPATH": paths}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    assert str(Path(str(CLONE)).resolve()) in run.stdout
    assert "Their bodies are those of a tested version." in run.stdout, run.stdout


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ((), 1),
        (TP, 2),
        ((*TP, "--sequence-parallel"), 2),
        (("--pipeline-model-parallel-size", "2"), 2),
        ((), 2),
        (SHARDED, 2),
        ((*SHARDED, *TP, "--sequence-parallel"), 2),
        ((*SHARDED, "--overlap-grad-reduce", "--overlap-param-gather"), 2),
    ],
)
def test_fp8_losses_follow_megatrons(root: Path, stock: Any, words: tuple[str, ...], ranks: int) -> None:
    run = launch(root, *ARGUMENTS, *words, *FP8, ranks=ranks)
    found, expected = losses(run), stock(words, ranks)
    assert len(found) == 5 and found != expected
    assert distance(found, expected) < 0.01
    assert len(re.findall(r"\[fp8\] iteration +\d+ \| coverage: (?:8\d)\.\d+ % of GEMM FLOPs", run.stdout)) == 5


def test_the_stock_script_takes_our_spec(root: Path, tmp_path: Path, stock: Any) -> None:
    script = tmp_path / "stock.py"
    script.write_text(STOCK_SCRIPT)
    expected, found = stock((), 1), {}
    for name in ("gpt", "gpt_fa3_fp8_emulated"):
        words = (*FP8, "--spec", "megatron_patches.layer_specs", name)
        found[name] = losses(launch(root, *ARGUMENTS, *words, script=script))
        assert found[name] != expected
        assert distance(found[name], expected) < 0.01
    assert found["gpt"] != found["gpt_fa3_fp8_emulated"], "the end of the name is the backend of attention"


def test_a_named_spec_takes_sequence_parallelism_by_the_wrapper_alone(root: Path, tmp_path: Path, stock: Any) -> None:
    script = tmp_path / "stock.py"
    script.write_text(STOCK_SCRIPT)
    parallel = (*TP, "--sequence-parallel")
    words = (*ARGUMENTS, *parallel, "--spec", "megatron_patches.layer_specs", "gpt_sdpa")
    assert losses(launch(root, *words, ranks=2)) == stock(parallel, 2)
    refused = launch(root, *words, ranks=2, script=script)
    assert refused.returncode != 0 and "--sequence-parallel: expected off with --spec" in refused.stderr


MOE = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-router-load-balancing-type", "none")


@pytest.mark.parametrize("freq", ["1", "([0,1])"], ids=["every layer", "alternating"])
def test_experts_follow_megatrons(root: Path, stock: Any, freq: str) -> None:
    minor = re.search(r"^MINOR = (\d+)", (Path(str(CLONE)) / "megatron/core/package_info.py").read_text(), re.MULTILINE)
    if int(minor[1]) < 19:  # type: ignore[index]
        pytest.skip("the router of core 0.16 does not run without Transformer Engine")
    words = (*MOE, "--moe-layer-freq", freq, "--qk-layernorm")
    run = launch(root, *ARGUMENTS, *words, *FP8)
    found, expected = losses(run), stock(words, 1)
    assert len(found) == 5 and found != expected
    assert distance(found, expected) < 0.02


PARSE = """
import contextlib, json, os, sys
sys.path.insert(0, os.environ["MEGATRON_LM_PATH"])
os.environ.update(WORLD_SIZE="8", RANK="0")
from megatron_patches import arguments as ours
from megatron_patches import compat
from megatron_patches.cpu import on_cpu
with on_cpu(training=True):
    import megatron.training.arguments as theirs
    compat.transformer_engine = lambda: compat.TransformerEngine(True, "2.11.0")
    theirs.is_te_min_version = lambda *args, **kwargs: True
    theirs.add_megatron_arguments = ours.wrap_add_arguments(theirs.add_megatron_arguments)
    sys.argv = ["pretrain_gpt.py", *json.load(sys.stdin)]
    found = theirs.validate_args(ours.digest_arguments(theirs.parse_args()))
print("taken", found.num_layers, found.hidden_size, found.data_parallel_size)
"""


@pytest.mark.parametrize(
    ("engine", "states", "attention"), [("te", "0", "none"), ("te", "1", "fa3"), ("fp8_ds", "0", "fa3")]
)
def test_megatron_takes_what_the_8b_example_passes(
    root: Path, tmp_path: Path, engine: str, states: str, attention: str
) -> None:
    words = words_of_8b(root, tmp_path, False, ENGINE=engine, STATES=states, ATTENTION=attention)
    words = words[words.index("megatron_patches.pretrain_gpt") + 1 : -2]
    environment = {**os.environ, "PYTHONPATH": python_path(root), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", PARSE], env=environment, input=json.dumps(words), capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert "taken 32 4096 " in run.stdout


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("--fp8-format", "hybrid"), "--fp8-recipe: "),
        ((*FP8, "--fp8-param-gather"), "--fp8-param-gather"),
        ((*FP8, "--first-last-layers-bf16"), "--first-last-layers-bf16: "),
    ],
)
def test_what_is_missing_stops_the_run(root: Path, words: tuple[str, ...], flag: str) -> None:
    """All that is refused: tests/unit/megatron_patches/test_arguments.py."""
    run = launch(root, *ARGUMENTS, *words)
    assert run.returncode != 0 and flag in run.stderr + run.stdout


def test_checkpoints_go_to_stock_and_back(root: Path, tmp_path: Path) -> None:
    """bf16 weights and optimizer of an FP8 run continue in Megatron's own layers, and the other way."""
    # More iterations than the checkpoint was planned for. Stock's distributed optimizer over torch's AdamW cannot load:
    # it asserts that there has been a step.
    words = ("--bf16", "--ckpt-format", "torch_dist", "--save-interval", "5", "--override-opt-param-scheduler")
    first, second = (("--save", str(tmp_path / name)) for name in ("first", "second"))
    begun = losses(launch(root, *ARGUMENTS, *words, *FP8, *first))
    load = ("--load", str(tmp_path / "first"), "--train-iters", "10")
    other = losses(launch(root, *ARGUMENTS, *words, *load, *second))
    again = losses(launch(root, *ARGUMENTS, *words, *load, *FP8))
    assert len(other) == len(again) == 5
    assert distance(other, again) < 0.01
    assert other[0] < begun[0]
    back = losses(launch(root, *ARGUMENTS, *words, *FP8, "--load", str(tmp_path / "second"), "--train-iters", "12"))
    assert len(back) == 2 and back[0] < other[0]


def test_fp8_states_follow_stock_and_resume_where_they_stopped(root: Path, tmp_path: Path, stock: Any) -> None:
    words = (*ARGUMENTS, *SHARDED, *FP8, "--fp8-optimizer-states", "--ckpt-format", "torch_dist")
    words = (*words, "--override-opt-param-scheduler", "--save-interval", "5")
    whole = losses(launch(root, *words, "--train-iters", "8", ranks=2))
    begun = losses(launch(root, *words, "--save", str(tmp_path), ranks=2))
    resumed = losses(launch(root, *words, "--load", str(tmp_path), "--train-iters", "8", ranks=2))
    assert len(whole) == 8 and each(whole) == pytest.approx([*each(begun), *each(resumed)], abs=3e-6)  # six decimals
    plain, expected = losses(launch(root, *ARGUMENTS, *SHARDED, *FP8, ranks=2)), stock(SHARDED, 2)
    assert begun[1:] != plain[1:], "the optimizer is another"
    assert distance(begun, expected) < 0.01


def test_the_cpu_trial_learns(root: Path, tmp_path: Path) -> None:
    environment = os.environ | {"OUTPUT": str(tmp_path), "STEPS": "20"}
    environment |= {"PYTHON": sys.executable, "PYTHONPATH": python_path(root)}
    command = [str(root / "examples/megatron/cpu_trial.sh"), "--log-interval", "1"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    found = losses(run)
    assert len(found) == 20 and found[-1] < 3.5 < 5.3 < found[0]
