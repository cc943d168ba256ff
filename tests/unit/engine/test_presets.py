"""What is known of a run before its engine is built, and the settings of a checkpoint."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.threads import on_threads
from torch import nn

from fp8_ds.config import Fp8Config, LinearConfig
from fp8_ds.config.presets import Facts
from fp8_ds.config.schedule import matching
from fp8_ds.engine.bf16_memory import Bf16Memory, Memory
from fp8_ds.engine.presets import as_trained, ends_of, facts_of, resolved
from fp8_ds.nn.plan.plan import Plan, make_plan

SCHEDULER = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 300}}}


def as_trainer_makes_it(num_training_steps: int) -> Any:
    """A function with the cell that transformers' `deepspeed_optim_sched` closes over."""

    def lr_scheduler_callable(optimizer: Any) -> Any:
        return num_training_steps

    return lr_scheduler_callable


def cosine(num_training_steps: int) -> Any:
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    return transformers.get_cosine_schedule_with_warmup(optimizer, 1, num_training_steps)


def test_the_number_of_steps_is_found_wherever_it_is() -> None:
    assert facts_of({}).num_steps is None
    assert facts_of(SCHEDULER).num_steps == 300
    assert facts_of({**SCHEDULER, "fp8": {"schedule": {"total_steps": 40}}}).num_steps == 40
    assert facts_of({"scheduler": {"params": {"total_num_steps": "auto"}}}).num_steps == "auto"
    for make in (as_trainer_makes_it, cosine):
        assert facts_of({}, lr_scheduler=make(77)).num_steps == 77
    plain = torch.optim.lr_scheduler.LambdaLR(cosine(5).optimizer, lambda step: 1.0)
    for other in (plain, lambda optimizer: plain, None, partial(as_trainer_makes_it, 3)):
        assert facts_of({}, lr_scheduler=other).num_steps is None


def test_trainers_own_function_still_closes_over_that_name() -> None:
    """What `_steps_of` looks for is in the installed transformers."""
    integration = pytest.importorskip("transformers.integrations.deepspeed")
    codes = [code for code in integration.deepspeed_optim_sched.__code__.co_consts if hasattr(code, "co_freevars")]
    assert any("num_training_steps" in code.co_freevars for code in codes)


def layers(num: int) -> nn.ModuleList:
    return nn.ModuleList(nn.ModuleDict({"up": nn.Linear(16, 16)}) for _ in range(num))


def test_ends_are_those_of_each_list_that_has_others() -> None:
    model = nn.ModuleDict({"encoder": layers(3), "decoder": layers(12), "short": layers(2), "head": nn.Linear(16, 16)})
    assert ends_of(model) == ("encoder.0.", "encoder.2.", "decoder.0.", "decoder.11.")
    assert ends_of(nn.Linear(16, 16)) == ()
    assert facts_of({}, model).ends == ends_of(model) and not facts_of({}, model).has_fa3
    assert facts_of({"tensor_parallel": {"autotp_size": 2}}, model).is_parallel


def test_ends_at_the_root_of_a_model_name_nothing_else_in_it() -> None:
    model = nn.ModuleDict({"layers": layers(3), "encoder": nn.ModuleDict({"layers": layers(4)})})
    found = facts_of({}, model).ends
    expected = [f"{name}.up" for name in ("layers.0", "layers.2", "encoder.layers.0", "encoder.layers.3")]
    names = [row.fqn for row in make_plan(model, LinearConfig()).layers]
    assert [name for end in found for name in matching(end, names)] == expected
    rows = make_plan(model, LinearConfig(filter_fqns=found)).layers
    assert [row.fqn for row in rows if not row.converted] == expected


def test_ends_of_a_model_of_stages_are_its_first_and_last_block() -> None:
    transformers = pytest.importorskip("transformers")

    def ends(name: str, **sizes: Any) -> tuple[str, ...]:
        config = getattr(transformers, f"{name}Config")(**sizes)
        with torch.device("meta"):
            return ends_of(getattr(transformers, f"{name}Model")(config))

    swin = {"image_size": 64, "embed_dim": 12, "num_heads": [1, 1, 1], "window_size": 4}
    assert ends("Swin", depths=[1, 2, 3], **swin) == ("encoder.layers.0.blocks.0.", "encoder.layers.2.blocks.2.")
    assert ends("Swin", depths=[1, 2, 1], **swin)[1] == "encoder.layers.2.blocks.0."
    assert ends("Funnel", block_sizes=[1, 2], num_decoder_layers=1, d_model=16, n_head=2, d_head=8, d_inner=8) == (
        "encoder.blocks.0.0.",
        "encoder.blocks.1.1.",
    )
    t5 = ends("T5", num_layers=3, d_model=16, d_kv=8, num_heads=2, d_ff=16, vocab_size=8)  # a block is a list, too
    assert t5 == ("encoder.block.0.", "encoder.block.2.", "decoder.block.0.", "decoder.block.2.")
    experts = {"num_local_experts": 3, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    assert ends("Mixtral", num_hidden_layers=3, num_key_value_heads=1, **experts) == ("layers.0.", "layers.2.")


def test_a_head_is_found_whatever_it_is_called() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 32, "num_attention_heads": 1}

    def model(name: str) -> nn.Module:
        with torch.device("meta"):
            made: nn.Module = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.for_model(name, **sizes)
            )
        return made

    rwkv = model("rwkv")
    assert facts_of({}, rwkv).head == "head."
    block = {"enabled": True, "preset": "auto"}
    linear = Fp8Config.from_block(block, facts_of({}, rwkv)).linear
    assert [row.fqn for row in make_plan(rwkv, linear).layers if not row.converted] == ["head"]
    assert facts_of({}, model("llama")).head == "" == facts_of({}, layers(3)).head == facts_of({}).head


SAVED = {
    "linear": {"recipe": "tensorwise", "grad_dtype": "e5m2", "fast_accumulation": "output"},
    "schedule": {"bf16_last_fraction": 0.0, "total_steps": None, "layers": {}},
}
ENDS = ("l.0.", "l.9.")


def trained(
    block: dict[str, Any], facts: Facts, saved: dict[str, Any], rows: Any = (), step: int = 10
) -> dict[str, Any]:
    written = {"enabled": True, **block}
    state = {"config": saved, "plan": Plan(rows).to_state()}
    return resolved(as_trained(Fp8Config.from_block(written, facts), written, state, step))


def test_a_run_goes_on_as_its_checkpoint_was_trained() -> None:
    for facts in (Facts(None, ENDS), Facts(1000, ENDS)):
        found = trained({}, facts, SAVED)
        assert "linear" not in found and "schedule" not in found  # the defaults of the version without presets
        assert found["activations"] == {"fused": True}
    assert trained({"preset": "auto"}, Facts(1000), SAVED)["linear"]["recipe"] == "delayed"
    assert trained({"linear": {"recipe": "delayed"}}, Facts(1000), SAVED)["linear"] == {"recipe": "delayed"}
    assert trained({"preset": None}, Facts(1000), SAVED) == {"enabled": True, "preset": None}


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp", "blockwise"])
def test_a_run_with_another_recipe_goes_on_so_too_and_one_that_takes_it_up_has_its_preset(recipe: str) -> None:
    written, facts = {"linear": {"recipe": recipe}}, Facts(1000, ENDS)
    without = Fp8Config.from_block({"enabled": True, "preset": None, **written})
    found = trained(written, facts, without.to_state())
    assert (found["linear"], "schedule" in found) == (resolved(without)["linear"], False)
    changed = trained({"linear": {"recipe": "delayed"}}, facts, without.to_state())["linear"]
    assert changed.get("grad_dtype") == resolved(without)["linear"].get("grad_dtype")
    assert trained(written, facts, SAVED) == resolved(Fp8Config.from_block({"enabled": True, **written}, facts))


def test_the_number_of_steps_is_that_of_this_run() -> None:
    saved = {"linear": {}, "schedule": {"bf16_last_fraction": 0.03, "total_steps": 100, "layers": {}}}
    expected = {"bf16_last_fraction": 0.03, "total_steps": 500}
    assert trained({}, Facts(500, ENDS), saved)["schedule"] == expected
    assert trained({}, Facts(None, ENDS), saved)["schedule"] == {**expected, "total_steps": 100}
    past = trained({}, Facts(None, ENDS), saved, step=100)["schedule"]
    assert past == {"layers": dict.fromkeys(ENDS, "bf16")}  # and not in bf16 for ever
    ends = {"linear": {}, "schedule": {"bf16_last_fraction": 0.0, "layers": {"l.0.": "bf16"}}}
    assert trained({}, Facts(500, ENDS), ends)["schedule"] == {"layers": {"l.0.": "bf16"}}


def test_layers_that_an_older_version_left_out_at_the_ends_stay_in_bf16() -> None:
    from fp8_ds.nn.plan.plan import LayerPlan

    reasons = {"l.0.up": "num_layers_at_start_in_bf16", "l.1.up": "eligible", "lm_head": "filter_fqns"}
    rows = tuple(LayerPlan(name, 8, 8, why == "eligible", why) for name, why in reasons.items())
    saved = {**SAVED, "linear": {**SAVED["linear"], "num_layers_at_start_in_bf16": 1}}
    assert trained({}, Facts(None, ENDS), saved, rows)["schedule"] == {"layers": {"l.0.up": "bf16"}}


def judged(memories: list[list[Memory]], extra: int) -> list[bool | None]:
    """What one rank hears after each step; every rank has its own memories, one for each time it is asked."""
    import torch.distributed as dist

    mine = iter(memories[dist.get_rank()])
    judge = Bf16Memory(extra, lambda: next(mine), lambda: None)
    return [judge.after_step() for _ in range(7)]


ROOMY, TIGHT = Memory(40, 60, 100), Memory(40, 85, 100)


@pytest.mark.parametrize(
    ("memories", "expected"),
    [
        ([[ROOMY], [ROOMY]], [None, None, True, None, None, None, None]),  # 60 + 10 + 20 of 100
        ([[ROOMY, ROOMY], [TIGHT, ROOMY]], [None, None, None, None, True, None, None]),
        ([[ROOMY, ROOMY], [TIGHT, TIGHT]], [None, None, None, None, False, None, None]),
    ],
)
def test_last_steps_that_might_not_fit_on_one_rank_are_refused_on_all(memories: Any, expected: Any) -> None:
    assert on_threads(2, judged, memories, 10) == [expected, expected]


class Allocator:
    """A GPU of 100 bytes, of which training holds 40 between steps, and 60 in them; building the engine has had 95."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.reserved = 95
        answers = {
            "mem_get_info": lambda device: (100 - self.reserved, 100),
            "memory_reserved": lambda device: self.reserved,
            "memory_allocated": lambda device: 40,
            "max_memory_allocated": lambda device: 95,
            "empty_cache": lambda: setattr(self, "reserved", 40),
        }
        for name in [name for name in dir(torch.cuda) if "memory" in name or name in answers]:
            patch.setattr(torch.cuda, name, answers.get(name))


def judge_of(allocator: Allocator, num_weights: int) -> list[bool | None]:
    weights = {"w": nn.Parameter(torch.empty(num_weights, device="meta"))}
    context = SimpleNamespace(trainable=weights, precision=SimpleNamespace(schedule=SimpleNamespace(last=50)))
    engine = SimpleNamespace(device=torch.device("cuda"), fp8=context, global_steps=0)
    engine._config = SimpleNamespace(_param_dict={"fp8": {}})
    engine.zero_optimization_partition_weights = lambda: False
    judge, answers = Bf16Memory.of(engine), []
    assert judge is not None
    for _ in range(6):
        allocator.reserved = max(allocator.reserved, 60)
        answers.append(judge.after_step())
    return answers


@pytest.mark.parametrize(("num_weights", "fits"), [(7, True), (8, False)])  # 60 + 2 * 7 + 20 of 95
def test_a_peak_of_before_training_does_not_count_and_nobodys_statistics_are_reset(
    monkeypatch: pytest.MonkeyPatch, num_weights: int, fits: bool
) -> None:
    allocator = Allocator(monkeypatch)
    assert on_threads(1, judge_of, allocator, num_weights) == [[None, None, None, None, fits, None]]


def test_fast_takes_flash_attention_3_only_with_all_that_a_batch_may_need(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    from fp8_ds.attention import huggingface, packages

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=32)
    installed: list[packages.FlashAttention3] = []
    monkeypatch.setattr(huggingface, "refuse_backend", lambda backend, device: None)
    monkeypatch.setattr(packages, "find_fa3", lambda: installed[-1])

    def takes(attention: str = "sdpa", backward: Any = print, **flags: bool) -> bool:
        installed.append(packages.FlashAttention3("fa3", print, backward, flags))
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=attention)
        return facts_of({}, model, torch.device("cpu")).has_fa3

    assert takes() and takes(FLASHATTENTION_DISABLE_VARLEN=False)
    assert not (takes(backward=None) or takes("eager") or takes(FLASHATTENTION_DISABLE_VARLEN=True))
    assert not takes(FLASHATTENTION_DISABLE_LOCAL=True)
