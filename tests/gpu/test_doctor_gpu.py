"""`fp8-ds doctor` on a GPU: what it finds there, and the speed of a product by each recipe."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fp8_ds.cli.app import app

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
CONFIG = Path(__file__).parents[2] / "configs/ds_zero2_fp8_states.json"


def test_doctor_knows_the_gpu_and_times_every_recipe() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json", "--config", str(CONFIG)])
    found = json.loads(result.stdout)
    by_name = {check["name"]: check for check in found["checks"]}
    for name in ("torch", "CUDA", "GPU 0", "cuDNN", "NCCL", "seams", "triton"):
        assert by_name[name]["status"] == "ok", by_name[name]
    assert torch.cuda.get_device_name(0) in by_name["GPU 0"]["found"]
    assert "9.0" in by_name["GPU 0"]["found"] or torch.cuda.get_device_capability(0) != (9, 0)
    assert found["can_train"] and found["config"]["on"] == "if"  # the script is not known
    products = {name: check for name, check in by_name.items() if name.startswith("product, ")}
    assert {"product, tensorwise", "product, blockwise"} < set(products) and len(products) == 5
    for product in products.values():
        fp8, bf16 = re.search(r"; (\d+) TFLOP/s, bf16 (\d+)", product["found"]).groups()
        assert product["status"] == "ok" and int(fp8) > 50 and int(bf16) > 50, product
