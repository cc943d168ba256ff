"""autoload makes the JSON flag alone enough: Hugging Face's Trainer, an unchanged script, the deepspeed launcher."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


@pytest.mark.slow
@pytest.mark.launcher
@pytest.mark.parametrize("stage", [2, 3])
def test_trainer_trains_in_fp8_by_the_json_flag_alone(
    stage: int, launch: Callable[..., str], tmp_path: Path, cpu_environment: dict[str, str]
) -> None:
    # What `fp8-ds autoload on` writes, in a folder that only these processes read as a site folder.
    (tmp_path / "sitecustomize.py").write_text("import fp8_ds.engine.autoload\n")
    cpu_environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), cpu_environment["PYTHONPATH"]])
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": stage,
            "stage3_gather_16bit_weights_on_model_save": True,
            "stage3_param_persistence_threshold": 0,
        },
        "fp8": {"enabled": True},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    script = Path(__file__).with_name("hf_trainer_script.py")
    output = launch(script, tmp_path / "ds.json", tmp_path / "out")
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert result["fp8"]["enabled"] and result["fp8"]["gathered_fp8_bytes"] > 0, output[-2000:]
    assert result["losses"][-1] < result["losses"][0]
    from safetensors.torch import load_file

    weights = load_file(tmp_path / "out/model.safetensors")
    assert len(weights) > 15 and all(math.isfinite(float(w.float().sum())) for w in weights.values())
