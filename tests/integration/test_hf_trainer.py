"""Trainer, Accelerate, PEFT and TRL on FP8 ZeRO, on two ranks: hf_cases.py says what each case claims."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


QUICK = ("trainer_resumes:2:fp8", "lora_resumes:3", "pretrained:3")
QUICK += ("accelerate:3", "generation:3", "models:3:mixtral", "reference:3")
QUICK += ("one_key:2:optimizer", *(("sft:2",) if find_spec("trl") else ()))
SLOW = ("trainer_resumes:2", "trainer_resumes:3", "trainer_resumes:3:fp8", "lora_resumes:2", "accelerate:2")
SLOW += ("reference:2",)
SLOW += ("lora_experts:2", "lora_experts:3")
SLOW += ("models:2", "models:3", "generation:2", "pretrained:2")
SLOW += ("one_key:2", "one_key:3", "one_key:2:lora", "one_key:2:compiled", "one_key:3:mixtral")


@pytest.mark.parametrize("cases", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["quick", "slow"])
def test_hugging_face_on_fp8_zero(start_ranks: Callable[..., str], tmp_path: Path, cases: tuple[str, ...]) -> None:
    pytest.importorskip("peft")
    start_ranks(Path(__file__).with_name("hf_cases.py"), tmp_path, *cases, forks=True)
    folders = [tmp_path / case.replace(":", "-") / "model" for case in cases if case.startswith("trainer_resumes")]
    for folder in (*folders, *(path.parent for path in tmp_path.glob("models*/*/masters.pt"))):
        assert_reloads(folder)


def assert_reloads(folder: Path) -> None:
    """Stock transformers reads the saved model, all in bf16, and has the masters of the run or what is in the file."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    saved = load_file(folder / "model.safetensors")
    assert {weight.dtype for weight in saved.values()} == {torch.bfloat16}
    expected = torch.load(folder / "masters.pt") if (folder / "masters.pt").exists() else saved
    assert expected.keys() == dict(model.named_parameters()).keys()
    for name, p in model.named_parameters():
        assert torch.equal(p.bfloat16(), expected[name]), name
