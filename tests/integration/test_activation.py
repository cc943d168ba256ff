"""The ways in with real DeepSpeed: one Python for all claims, since its first `initialize` costs seconds."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import HANG

from fp8_ds.host import free_port

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
FP8 = {**CONFIG, "fp8": {"enabled": True}}
OFF = {**CONFIG, "fp8": {"enabled": False}}


def at_stage(stage: int, config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "zero_optimization": {"stage": stage}}


def train_one_step(initialize: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The engine, after one step; without it there is nothing to see of gathers and patches."""
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.ReLU(), torch.nn.Linear(48, 16))
    engine = initialize(*args, model=net, model_parameters=list(net.parameters()), **kwargs)[0]
    engine.backward(engine(torch.ones(2, 32, dtype=torch.bfloat16, device=engine.device)).float().mean())
    engine.step()
    return engine


# --- what a Python of its own does, in which fp8_ds is loaded by autoload alone ---


def symbols() -> dict[str, Any]:
    """Every seam as it is now, undecorated and unwrapped by nobody."""
    import importlib

    from fp8_ds.engine.seams import SEAMS

    found = {}
    for seam in SEAMS:
        value: Any = importlib.import_module(seam.module)
        for part in seam.name.split("."):
            value = vars(value)[part] if isinstance(value, type) else getattr(value, part)
        found[seam.path] = value
    return found


def changed(stock: dict[str, Any]) -> list[str]:
    return sorted(path for path, value in symbols().items() if value is not stock[path])


def check_untouched() -> None:
    import deepspeed
    from deepspeed import initialize

    # Who knows nothing of fp8_ds: the flag alone decides.
    assert type(train_one_step(initialize, config=FP8)).__name__ == "Fp8DeepSpeedEngine"
    assert type(train_one_step(deepspeed.initialize, config=CONFIG)) is deepspeed.DeepSpeedEngine
    import fp8_ds

    fp8_ds.uninstall()
    stock = symbols()
    gather = "deepspeed.runtime.zero.stage_1_and_2.all_gather_dp_groups"
    fp8_ds.install()
    assert changed(stock) == ["deepspeed.initialize"]
    for config in (CONFIG, OFF, at_stage(3, CONFIG)):
        engine = train_one_step(deepspeed.initialize, config=config)
        assert type(engine) is deepspeed.DeepSpeedEngine
        assert type(engine.optimizer).__module__.startswith("deepspeed.")
        assert changed(stock) == ["deepspeed.initialize"]
    assert isinstance(train_one_step(deepspeed.initialize, config=at_stage(3, FP8)), fp8_ds_engine())
    assert changed(stock) == ["deepspeed.initialize", gather]
    fp8_ds.uninstall()
    assert changed(stock) == []
    assert type(train_one_step(deepspeed.initialize, config=FP8)) is deepspeed.DeepSpeedEngine
    fp8_ds.install()


def fp8_ds_engine() -> type:
    from fp8_ds.engine.engine import Fp8DeepSpeedEngine

    return Fp8DeepSpeedEngine


def check_config_ways() -> None:
    import deepspeed

    path = Path(os.environ["CHILD_FOLDER"]) / "ds.json"
    path.write_text("{  // DeepSpeed reads hjson\n" + json.dumps(FP8)[1:])
    encoded = base64.urlsafe_b64encode(json.dumps(FP8).encode()).decode()
    ways: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), {"config": FP8}),
        ((), {"config": str(path)}),
        ((), {"config": encoded}),
        ((), {"config_params": FP8}),
        ((), {"args": Namespace(deepspeed_config=str(path), local_rank=0)}),
        ((Namespace(deepspeed_config=str(path), local_rank=0),), {}),
    ]
    for args, kwargs in ways:
        assert isinstance(train_one_step(deepspeed.initialize, *args, **kwargs), fp8_ds_engine()), (args, kwargs)


# --- tests ---


def test_the_flag_alone_is_enough_however_it_is_given_off_touches_nothing_and_uninstall_gives_every_seam_back(
    tmp_path: Path, cpu_environment: dict[str, str]
) -> None:
    from fp8_ds.run import turn_autoload_on

    turn_autoload_on(tmp_path)
    env = {**cpu_environment, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env.update(MASTER_PORT=str(free_port()), CHILD_FOLDER=str(tmp_path))
    code = f"""
import site; site.addsitedir({str(tmp_path)!r})
import runpy; names = runpy.run_path({__file__!r}); names["check_untouched"](); names["check_config_ways"]()
from processes import leave; leave()
"""
    result = subprocess.run(
        [sys.executable, "-c", code], stdout=-1, stderr=-2, text=True, env=env, timeout=HANG, check=False
    )
    assert result.returncode == 0, result.stdout[-6000:]


SCRIPT = """
import argparse, deepspeed, torch
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--marker")
args = deepspeed.add_config_arguments(parser).parse_args()
net = torch.nn.Linear(32, 16)
engine = deepspeed.initialize(args=args, model=net, model_parameters=net.parameters())[0]
engine.backward(engine(torch.ones(2, 32, dtype=torch.bfloat16, device=engine.device)).float().mean())
engine.step()
report = engine.fp8_report()
print(f"rank {deepspeed.comm.get_rank()} {args.marker} {type(engine).__name__} {report['gathered_fp8_bytes']} bytes")
torch.distributed.destroy_process_group()
"""


def test_the_module_runs_an_unchanged_script_in_fp8(start_ranks: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "ds.json").write_text(json.dumps(FP8))
    output = start_ranks(
        "fp8_ds.run", tmp_path / "train.py", "--deepspeed_config", tmp_path / "ds.json", "--marker", "m", module=True
    )
    for rank in (0, 1):
        assert f"rank {rank} m Fp8DeepSpeedEngine {32 * 16} bytes" in output, output[-4000:]
