"""Hugging Face's Trainer, Accelerate and PEFT on FP8 ZeRO, on two ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


QUICK = ("trainer_resumes:2", "trainer_resumes:2:fp8", "lora_resumes:3", "pretrained:3")
QUICK += ("accelerate:3", "generation:3", "models:3:mixtral", "reference:2", "reference:3")
SLOW = ("trainer_resumes:3", "trainer_resumes:3:fp8", "lora_resumes:2", "accelerate:2")
SLOW += ("lora_experts:2", "lora_experts:3")
SLOW += ("models:2", "models:3", "generation:2", "pretrained:2")


@pytest.fixture
def run_cases(start_ranks: Callable[..., str], tmp_path: Path) -> Callable[..., dict[str, list[dict[str, Any]]]]:
    """run_cases(case, ...): what each of hf_cases.py's cases found, on all ranks; one start of them."""

    def run(*cases: str, ranks: int = 2) -> dict[str, list[dict[str, Any]]]:
        start_ranks(Path(__file__).with_name("hf_cases.py"), tmp_path, *cases, ranks=ranks)
        names = {case: case.replace(":", "-") for case in cases}
        return {
            case: [json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]
            for case, name in names.items()
        }

    return run


@pytest.mark.parametrize("cases", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["quick", "slow"])
def test_hugging_face_on_fp8_zero(run_cases: Callable[..., Any], tmp_path: Path, cases: tuple[str, ...]) -> None:
    pytest.importorskip("peft")
    checks = {"models": check_models, "generation": check_generation, "reference": check_reference}
    checks |= {"lora_experts": check_lora_experts, "lora_resumes": check_lora_resume, "pretrained": check_pretrained}
    for case, ranks in run_cases(*cases).items():
        name, stage, *_ = case.split(":")
        for found in ranks:
            checks.get(name, check_full_resume)({"stage": int(stage)} | found)
        if case.startswith("trainer_resumes"):
            check_reloaded(tmp_path / case.replace(":", "-") / "model")


NUM_FP8_WEIGHTS = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 160)


def check_resume(found: dict[str, Any], num_trained: int = 21) -> None:
    """Trainer, and Accelerate: FP8 is on, a resumed run repeats every bit, and what is saved is bf16 of the masters."""
    assert found["fp8"]["num_fp8_weights"] == NUM_FP8_WEIGHTS
    assert found["losses"][-1] < found["losses"][0] - 0.1
    assert found["resumed"] == found["losses"][-len(found["resumed"]) :]
    assert found["masters_differ"] == found["saved_differ"] == []
    assert found["num_saved"] == found["num_masters"] == num_trained
    evaluated = found.get("eval_losses", [2.0, 1.0])
    assert len(evaluated) == 2 and evaluated[1] < evaluated[0]
    assert found.get("checkpoints_activations", True)
    assert found.get("num_processes", 2) == 2  # as Accelerate counts them, where it was asked


def check_full_resume(found: dict[str, Any]) -> None:
    assert found["fp8"]["gathered_fp8_bytes"] > 0
    check_resume(found)


def check_lora_resume(found: dict[str, Any]) -> None:
    """Two matrices of an adapter for each of three linears in two layers are all that trains."""
    assert found["fp8"]["plan"].startswith("fp8: 14 of 27 linears")
    check_resume(found, num_trained=12)
    assert "adapter_model.safetensors" in found["files"] and "model.safetensors" not in found["files"]
    # On bf16 weights, and merged into them, it does the same.
    assert found["in_bf16"] == pytest.approx(found["eval_losses"][-1], abs=0.02)
    assert found["merged"] == pytest.approx(found["in_bf16"], abs=0.01)
    assert found["untrained"] - found["in_bf16"] > 0.1


def check_pretrained(found: dict[str, Any]) -> None:
    assert found["is_sharded"] == (found["stage"] == 3)
    assert found["plan"].startswith("fp8: 14 of 15 linears")
    assert found["differ"] == [] and found["num"] > 15


def check_reloaded(folder: Path, masters: Path | None = None) -> None:
    """Stock transformers reads the saved model, all in bf16, and has the masters of the run or what is in the file."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    saved = load_file(folder / "model.safetensors")
    assert {weight.dtype for weight in saved.values()} == {torch.bfloat16}
    expected = torch.load(masters) if masters else saved
    assert expected.keys() == dict(model.named_parameters()).keys()
    for name, p in model.named_parameters():
        assert torch.equal(p.bfloat16(), expected[name]), name


FAMILIES = {"qwen2", "qwen3_tied", "mixtral", "qwen3_moe_fp8_states", "gpt2", "gpt2_fp8_states"}


def check_models(found: dict[str, Any]) -> None:
    """What is saved has the names and the bits that stock code gives the same weights: tied ones once or twice, experts
    one by one or together, as this transformers does it."""
    tested = found.keys() - {"stage"}
    assert tested in (FAMILIES, {"mixtral"})
    for name in tested:
        assert found[name]["losses"][-1] < found[name]["losses"][0] - 0.1, name
        assert found[name]["names"] == found[name]["stock_names"], name
        assert found[name]["saved_differ"] == [], name
        assert found[name]["num_weights_saved"] >= found[name]["num_weights"], name
    for name in tested & {"mixtral", "qwen3_moe_fp8_states"}:
        assert found[name]["plan"].startswith("fp8: 12 of 13 linears and weights of experts, ")
        folder = Path(found[name]["folder"])
        check_reloaded(folder, folder.with_name(f"{name}-masters.pt"))
    for name in tested & {"gpt2", "gpt2_fp8_states"}:
        assert found[name]["plan"].startswith("fp8: 8 of 9 linears"), name
    assert any("experts" in name for name in found["mixtral"]["names"])


def check_lora_experts(found: dict[str, Any]) -> None:
    """Experts are in FP8 with adapters beside them and on them, or on linears, all of which learn; as without FP8."""
    for name, num_linears, num_adapters in (("beside", 21, 4), ("on", 25, 6), ("on_linears", 21, 4)):
        assert found[name]["plan"].startswith(f"fp8: 12 of {num_linears} linears and weights of experts, ")
        assert found[name]["num_moved"] == num_adapters
        assert found[name]["losses"] == pytest.approx(found[name]["in_bf16"], abs=0.02)
    assert found["on"]["losses"][-1] < found["beside"]["losses"][-1] - 0.1


def check_generation(found: dict[str, Any]) -> None:
    """With ZeRO's hooks, without them, and with them again; and training goes on."""
    assert found["tokens"] == [found["expected"]] * 3
    assert found["after"] < 0.1


def check_reference(found: dict[str, Any]) -> None:
    """In bf16 beside a policy in FP8. In stages 1 and 2 a sync reads FP8's values of the policy, in stage 3 bf16's."""
    assert found["is_fp8"] == [True, False] and found["losses"][-1] < found["losses"][0]
    assert found["moved_in_training"] == [] and found["policy_moved"] == []
    assert found["error_of_mixture"] < (0.004 if found["stage"] == 3 else 0.02)
