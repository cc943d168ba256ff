"""Hugging Face's libraries on FP8 ZeRO, run by test_hf_trainer.py: several cases in one start of the ranks, which
assert what each of them claims.

deepspeed hf_cases.py OUT_FOLDER CASE:STAGE[:STATES, MODEL or KIND] [CASE:STAGE[:STATES, MODEL or KIND] ...]
"""

from __future__ import annotations

import copy
import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from deepspeed.accelerator import get_accelerator
from processes import leave
from torch.utils.data import Subset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from fp8_ds.nn.plan.convert import fp8_layers

EXAMPLE_CONFIG = Path(__file__).resolve().parents[2] / "examples/huggingface/ds_zero3_fp8.json"
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class Sequences(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Arithmetic sequences modulo the vocabulary."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (index + 3 * torch.arange(33)) % 97
        return {"input_ids": tokens, "labels": tokens}


def llama(**more: Any) -> Any:
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **more))


def ds_config(stage: int, **fp8: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(EXAMPLE_CONFIG.read_text())
    config["zero_optimization"] |= {"stage": stage, "stage3_param_persistence_threshold": 0}
    config["fp8"] |= fp8
    return config


def arguments(out: Path, stage: int, fp8: dict[str, Any] | None = None, **more: Any) -> TrainingArguments:
    """Args: fp8: keys of the "fp8" block."""
    options: dict[str, Any] = {
        "deepspeed": ds_config(stage, **(fp8 or {})),
        "use_cpu": get_accelerator().device_name() == "cpu",
        "bf16": True,
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 0,
    }
    return TrainingArguments(output_dir=str(out), **{**options, **more})


def losses(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def masters(engine: Any) -> dict[str, torch.Tensor]:
    """bf16 of the trainable parameters' fp32 masters, by name. Collective."""
    from deepspeed.utils import safe_get_full_fp32_param

    named = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
    return {name: safe_get_full_fp32_param(p).bfloat16().cpu() for name, p in named}


def computed_with(engine: Any) -> dict[str, torch.Tensor]:
    """As `masters`, but where a split master's upper part is the bf16 weight, outside FP8, ties are away from zero."""
    from deepspeed.utils import safe_get_full_fp32_param

    found = masters(engine)
    in_fp8 = {name + layer.weight_suffix for name, layer in fp8_layers(engine.module).items()}
    for name, p in engine.module.named_parameters():
        if name in found and name not in in_fp8:
            bits = safe_get_full_fp32_param(p).float().cpu().view(torch.int32)
            found[name] = ((bits + 0x8000) & -0x10000).view(torch.float32).bfloat16()
    return found


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], num: int | None = None) -> None:
    """What both have is equal, bit for bit, and is `num` tensors, or all that are expected."""
    both = got.keys() & expected.keys()
    assert len(both) == (len(expected) if num is None else num)
    assert [name for name in both if not torch.equal(got[name], expected[name])] == []


def assert_learned(trainer: Any) -> None:
    assert losses(trainer)[-1] < losses(trainer)[0] - 0.1, losses(trainer)


def saved_weights(folder: Path) -> dict[str, torch.Tensor]:
    """By names of parameters; an adapter's without its own name are those of the adapter "default"."""
    from safetensors.torch import load_file

    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    saved = load_file(folder / "adapter_model.safetensors")
    return {name.replace(".weight", ".default.weight"): tensor for name, tensor in saved.items()}


NUM_FP8_WEIGHTS = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 160)


def trainer_resumes(out: Path, stage: int, states: str = "fp32") -> None:
    """A whole model, with states of the optimizer in fp32 or FP8."""
    resumes(out, stage, llama, {"optimizer": {"states": states}}, num=21)


def lora_resumes(out: Path, stage: int) -> None:
    """Adapters alone: neither checkpoint nor saved model has the frozen weights, which are the same in each start. They
    were trained on FP8 weights; on the bf16 ones, and merged into them, they do the same."""
    from peft import PeftModel

    # Two matrices for each of three linears in two layers.
    trained = resumes(out, stage, lambda: with_lora(llama()), LORA_BLOCK, num=12, learning_rate=3e-2)
    torch.manual_seed(0)
    plain = llama().bfloat16().to(get_accelerator().current_device_name())
    batch = torch.stack([Sequences()[i]["input_ids"] for i in range(12)]).to(plain.device)
    with torch.no_grad():
        untrained = float(plain(input_ids=batch, labels=batch).loss)
        loaded = PeftModel.from_pretrained(plain, str(out / "model"))
        in_bf16 = float(loaded(input_ids=batch, labels=batch).loss)
        merged = float(loaded.merge_and_unload()(input_ids=batch, labels=batch).loss)
    assert abs(in_bf16 - trained) < 0.02 and abs(merged - in_bf16) < 0.01 and untrained - in_bf16 > 0.1
    assert (out / "model/adapter_model.safetensors").exists() and not (out / "model/model.safetensors").exists()


def resumes(out: Path, stage: int, make: Callable[[], Any], fp8: dict[str, Any], num: int, **more: Any) -> float:
    """Four steps with evaluation and gradient checkpointing, saved after two; the last two again from there, which
    repeat every bit. What is saved is bf16 of the masters.

    Returns:
        The last loss of evaluation.
    """
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    options |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}

    def trainer() -> Any:
        torch.manual_seed(0)
        args = arguments(out, stage, fp8, **options, **more)
        return Trainer(model=make(), args=args, train_dataset=Sequences(), eval_dataset=Subset(Sequences(), range(12)))

    first = trainer()
    first.train()
    first.save_model(str(out / "model"))
    engine = first.deepspeed
    expected = masters(engine)
    exported = computed_with(engine) if fp8.get("optimizer") == {"states": "fp8"} else expected
    report, evaluated = engine.fp8_report(), [row["eval_loss"] for row in first.state.log_history if "eval_loss" in row]
    assert report["num_fp8_weights"] == NUM_FP8_WEIGHTS and (num < 21 or report["gathered_fp8_bytes"] > 0)
    assert engine.module.is_gradient_checkpointing and len(evaluated) == 2 and evaluated[1] < evaluated[0]
    assert_learned(first)
    end(engine)
    second = trainer()
    second.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    assert losses(second) == losses(first)[-len(losses(second)) :]
    assert_same(masters(second.deepspeed), expected)
    end(second.deepspeed)
    assert len(expected) == num
    assert_same(saved_weights(out / "model"), exported)
    return evaluated[-1]


def pretrained(out: Path, stage: int) -> None:
    """How fine-tuning starts: weights are read, in ZeRO-3 into shards; two steps at lr 0 and a save give them back."""
    torch.manual_seed(3)
    before = out / "before"
    if dist.get_rank() == 0:
        llama().bfloat16().save_pretrained(before)
    dist.barrier()
    args = arguments(out, stage, max_steps=2, learning_rate=0.0)  # before from_pretrained, which asks it for the stage
    model = LlamaForCausalLM.from_pretrained(before)
    assert hasattr(next(model.parameters()), "ds_id") == (stage == 3)
    trainer = Trainer(model=model, args=args, train_dataset=Sequences())
    trainer.train()
    trainer.save_model(str(out / "after"))
    assert trainer.deepspeed.fp8_report()["plan"].startswith("fp8: 14 of 15 linears")
    end(trainer.deepspeed)
    assert_same(saved_weights(out / "after"), saved_weights(before))


def saved_by_stock(out: Path, stage: int, model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What Trainer writes without FP8 from the same weights: they are put into `model` and trained at rate 0."""
    named = dict(model.named_parameters())
    assert named.keys() == weights.keys()
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(weights[name])
    args = arguments(out, stage, {"enabled": False}, max_steps=1, learning_rate=0.0)
    trainer = Trainer(model=model, args=args, train_dataset=Sequences())
    trainer.train()
    assert not hasattr(trainer.deepspeed, "fp8_report")
    trainer.save_model(str(out))
    end(trainer.deepspeed)
    return saved_weights(out)


def models(out: Path, stage: int, only: str | None = None) -> None:
    """Families of models, or one, each trained a few steps and saved, under the names and with the bits that stock code
    gives the same weights: tied ones once or twice, experts one by one or together, as this transformers does it."""
    small = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16}
    gpt2 = {"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
    made: dict[str, tuple[Callable[[], Any], str]] = {
        "qwen2": (lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)), "14 of 15 linears"),
        "qwen3_tied": (
            lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True)),
            "14 of 15 linears",
        ),
        "mixtral": (mixtral, EXPERTS),
        "qwen3_moe_fp8_states": (lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **small)), EXPERTS),
        "gpt2": (lambda: GPT2LMHeadModel(GPT2Config(**gpt2)), "8 of 9 linears"),
        "gpt2_fp8_states": (lambda: GPT2LMHeadModel(GPT2Config(**gpt2)), "8 of 9 linears"),
    }
    for name, (make, plan) in made.items():
        if only not in (None, name):
            continue
        torch.manual_seed(0)
        fp8 = {"optimizer": {"states": "fp8"}} if name.endswith("fp8_states") else {}
        trainer = Trainer(model=make(), args=arguments(out / name, stage, fp8), train_dataset=Sequences())
        trainer.train()
        trainer.save_model(str(out / name))
        expected = computed_with(trainer.deepspeed) if fp8 else masters(trainer.deepspeed)
        assert_learned(trainer)
        assert trainer.deepspeed.fp8_report()["plan"].startswith(f"fp8: {plan}")
        end(trainer.deepspeed)
        if dist.get_rank() == 0:
            torch.save(expected, out / name / "masters.pt")
        saved, stock = saved_weights(out / name), saved_by_stock(out / f"{name}-stock", stage, make(), expected)
        assert saved.keys() == stock.keys()
        assert_same(saved, stock)
        assert_same(saved, expected, len(saved.keys() & expected.keys()))
        assert sum(p.numel() for p in saved.values()) >= sum(p.numel() for p in expected.values())


def generation(out: Path, stage: int) -> None:
    """generate() on the trained engine's module: with ZeRO's hooks, without them as in TRL, and with them again."""
    torch.manual_seed(0)
    args = arguments(out, stage, max_steps=40, learning_rate=1e-2)
    trainer = Trainer(model=llama(), args=args, train_dataset=Sequences())
    trainer.train()
    engine = trainer.deepspeed
    model = engine.module.eval()
    prompt = ((3 * torch.arange(12))[None] % 97).to(engine.device)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    with torch.no_grad():
        hooked = model.generate(prompt, synced_gpus=stage == 3, **options)
        with unwrapped(engine) as plain:
            removed = plain.generate(prompt, **options)
        again = model.generate(prompt, synced_gpus=stage == 3, **options)
    model.train()
    after = float(engine(input_ids=prompt, labels=prompt).loss)
    end(engine)
    expected = (3 * torch.arange(12, 18) % 97).tolist()
    assert [found[0, 12:].tolist() for found in (hooked, removed, again)] == [expected] * 3
    assert after < 0.1, "training goes on"


@contextmanager
def unwrapped(engine: Any) -> Iterator[Any]:
    """The model with whole weights and without ZeRO-3's hooks, by the calls of TRL's unwrap_model_for_generation.

    Source: huggingface/trl 1.16 trl/models/utils.py, remove_hooks and add_hooks.
    """
    if engine.zero_optimization_stage() < 3:
        yield engine.module
        return
    offload = engine.optimizer.parameter_offload
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        for p in engine.module.parameters():
            p.ds_active_sub_modules.clear()
        for hook in (*offload.forward_hooks, *offload.backward_hooks):
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        yield engine.module
        coordinator = offload.get_param_coordinator()
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()
        offload._register_deepspeed_module(offload.module)


def reference(out: Path, stage: int) -> None:
    """A reference model in bf16 beside a policy in FP8, as TRL has one for DPO, KTO, GRPO and RLOO, and TR-DPO's sync,
    which reads FP8's values of the policy in stages 1 and 2, and bf16's in stage 3.

    Source: huggingface/trl 1.16 trl/models/utils.py, prepare_deepspeed; trl/trainer/callbacks.py, SyncRefModelCallback.
    """
    torch.manual_seed(0)
    args = arguments(out, stage)
    policy, model = llama(), llama()
    model.load_state_dict(policy.state_dict())
    trainer = Trainer(model=policy, args=args, train_dataset=Sequences())
    config = copy.deepcopy(trainer.accelerator.state.deepspeed_plugin.deepspeed_config)
    config.pop("optimizer", None)
    config["zero_optimization"]["stage"] = 3 if stage == 3 else 0
    beside = deepspeed.initialize(model=model, config=config | {"train_micro_batch_size_per_gpu": 4})[0]
    beside.eval()
    before = gathered(beside.module)
    trainer.train()
    trained = masters(trainer.deepspeed)
    assert trainer.deepspeed.fp8_report()["enabled"] and not beside.fp8_report()["enabled"]
    assert losses(trainer)[-1] < losses(trainer)[0]
    assert_same(gathered(beside.module), before)
    parameters = [*trainer.deepspeed.module.parameters(), *beside.module.parameters()]
    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0, enabled=stage == 3):
        if stage != 3 or dist.get_rank() == 0:
            for p, q in zip(beside.module.parameters(), trainer.deepspeed.module.parameters(), strict=True):
                p.data.mul_(0.5).add_(q.data, alpha=0.5)
    mixed = gathered(beside.module)
    errors = [float((mixed[n] - (before[n] + trained[n]) / 2).norm() / mixed[n].norm()) for n in mixed]
    assert max(errors) < (0.004 if stage == 3 else 0.02)
    assert_same(masters(trainer.deepspeed), trained)
    beside.destroy()
    end(trainer.deepspeed)


def gathered(module: Any) -> dict[str, torch.Tensor]:
    """Weights as bf16, by name. Collective in stage 3."""
    with deepspeed.zero.GatheredParameters(
        list(module.parameters()), enabled=hasattr(next(module.parameters()), "ds_id")
    ):
        return {name: p.detach().bfloat16().cpu().clone() for name, p in module.named_parameters()}


LORA_BLOCK = {"linear": {"frozen": "fp8", "filter_fqns": ["lm_head", "lora_"]}}


def with_lora(model: Any, **more: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    options: dict[str, Any] = {"target_modules": ["q_proj", "v_proj", "up_proj"], **more}
    return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, task_type="CAUSAL_LM", **options))


def mixtral() -> Any:
    return MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2))


EXPERTS = "12 of 13 linears and weights of experts, "


def lora_experts(out: Path, stage: int) -> None:
    """LoRA beside frozen experts in FP8; and on the parameters of experts, or of linears, which PEFT computes in each
    forward: all learn as without FP8."""

    def trained(more: dict[str, Any], fp8: dict[str, Any]) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        args = arguments(out, stage, fp8, max_steps=8, learning_rate=1e-2)
        trainer = Trainer(model=with_lora(mixtral(), **more), args=args, train_dataset=Sequences())
        trainer.train()
        return losses(trainer), trainer.deepspeed

    last = []
    for num_linears, num_adapters, more in (
        (21, 4, {"target_modules": ["q_proj", "v_proj"]}),
        (25, 6, {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}),
        (21, 4, {"target_modules": ["q_proj"], "target_parameters": ["v_proj.weight"]}),
    ):
        found, engine = trained(more, LORA_BLOCK)
        plan = engine.fp8_report()["plan"]
        assert plan.startswith(f"fp8: 12 of {num_linears} linears and weights of experts, ")
        assert sum("lora_B" in name and bool(p.any()) for name, p in masters(engine).items()) == num_adapters
        end(engine)
        in_bf16, engine = trained(more, {"enabled": False})
        end(engine)
        assert max(abs(a - b) for a, b in zip(found, in_bf16, strict=True)) < 0.02
        last.append(found[-1])
    assert last[1] < last[0] - 0.1


def accelerate(out: Path, stage: int) -> None:
    """A loop of the user's own under Accelerate: state saved, loaded, and the model exported."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs

    config = ds_config(stage) | {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    config["gradient_clipping"] = 1.0

    def prepared() -> tuple[Any, Any, Any, Any]:
        torch.manual_seed(0)
        backend = InitProcessGroupKwargs(backend=dist.get_backend())
        plugin = DeepSpeedPlugin(hf_ds_config=config)
        accelerator = Accelerator(mixed_precision="bf16", deepspeed_plugin=plugin, kwargs_handlers=[backend])
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        loader = torch.utils.data.DataLoader(Sequences(), batch_size=4)
        return accelerator, *accelerator.prepare(model, optimizer, loader)

    def steps(accelerator: Any, model: Any, optimizer: Any, batches: list[Any]) -> list[float]:
        found = []
        for batch in batches:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found

    accelerator, model, optimizer, loader = prepared()
    batches = [batch for _, batch in zip(range(4), loader, strict=False)]
    whole = steps(accelerator, model, optimizer, batches[:2])
    accelerator.save_state(str(out / "state"))
    whole += steps(accelerator, model, optimizer, batches[2:])
    expected, report = masters(model), model.fp8_report()
    assert report["num_fp8_weights"] == NUM_FP8_WEIGHTS and report["gathered_fp8_bytes"] > 0
    assert whole[-1] < whole[0] - 0.1 and accelerator.num_processes == 2 and len(expected) == 21
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        str(out / "model"), is_main_process=accelerator.is_main_process, state_dict=state
    )
    accelerator.wait_for_everyone()
    assert_same(saved_weights(out / "model"), expected)
    end(model)
    accelerator, model, optimizer, loader = prepared()
    accelerator.load_state(str(out / "state"))
    assert steps(accelerator, model, optimizer, batches[2:]) == whole[2:]
    assert_same(masters(model), expected)
    end(model)


class InBf16(TrainerCallback):
    """Numbers of layers that compute in bf16 when each step begins."""

    def __init__(self) -> None:
        self.nums: list[int] = []
        self.trainer: Any = None

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.nums.append(self.trainer.deepspeed.fp8_report()["num_layers_in_bf16"])


def one_key(out: Path, stage: int, kind: str = "whole") -> None:
    """`{"enabled": true}` in a script that says nothing of FP8: Trainer's number of steps, by epochs or `max_steps`,
    ends the run in bf16; with accumulation, evaluation, gradient checkpointing and a resume, which repeats every bit.

    Args:
        kind: "whole", "compiled", "lora", "mixtral", or "optimizer" (DeepSpeed's, by the configuration).
    """
    make = {"lora": lambda: with_lora(llama()), "mixtral": mixtral}.get(kind, llama)
    options: dict[str, Any] = {"max_steps": 24} if kind == "whole" else {"max_steps": -1, "num_train_epochs": 6}
    options |= {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 18}
    options |= {"eval_strategy": "steps", "eval_steps": 18, "learning_rate": 1e-2 if kind == "lora" else 3e-3}
    if kind == "compiled":
        options |= {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    else:
        options |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}

    def trainer() -> Any:
        torch.manual_seed(0)
        args = arguments(out, stage, **options)
        if kind == "optimizer":
            numbers = {"lr": "auto", "weight_decay": "auto", "torch_adam": True}
            args.hf_deepspeed_config.config["optimizer"] = {"type": "AdamW", "params": numbers}
        counts = InBf16()
        data = {"train_dataset": Sequences(), "eval_dataset": Subset(Sequences(), range(8))}
        counts.trainer = Trainer(model=make(), args=args, callbacks=[counts], **data)
        return counts.trainer, counts.nums

    first, nums = trainer()
    first.train()
    engine = first.deepspeed
    block = engine.fp8.config
    assert (block.preset, block.linear.recipe, block.activations.fused) == ("auto", "delayed", True)
    assert (block.schedule.bf16_last_fraction, block.schedule.total_steps) == (0.03, 24)
    assert engine.is_compiled == (kind == "compiled")
    num_layers = len(engine.fp8.precision.names)
    assert nums == [0] * 23 + [num_layers] and num_layers > 0
    expected = masters(engine)
    assert_learned(first)
    end(engine)
    second, nums = trainer()
    second.train(resume_from_checkpoint=str(out / "checkpoint-18"))
    assert nums == [0] * 5 + [num_layers]
    assert losses(second) == losses(first), (losses(second), losses(first))
    assert_same(masters(second.deepspeed), expected)
    end(second.deepspeed)


def sft(out: Path, stage: int) -> None:
    """TRL's SFTTrainer with one key: FP8 linears, and the end in bf16 at the step that its own arguments name."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {str(i): i for i in range(95)} | {"<pad>": 95, "<eos>": 96}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    processing = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    rows = [{"input_ids": ((i + 3 * torch.arange(9 + i % 24)) % 95).tolist()} for i in range(64)]
    options = arguments(out, stage, max_steps=20).to_dict()
    args = SFTConfig(
        **{
            key: value
            for key, value in options.items()
            if key in ("output_dir", "bf16", "use_cpu", "max_steps", "seed")
        },
        deepspeed=ds_config(stage),
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        max_length=32,
    )
    torch.manual_seed(0)
    counts = InBf16()
    data = Dataset.from_list(rows)
    trainer = SFTTrainer(llama(), args, train_dataset=data, processing_class=processing, callbacks=[counts])
    counts.trainer = trainer
    trainer.train()
    assert trainer.deepspeed.fp8.config.linear.recipe == "delayed"
    assert counts.nums == [0] * 19 + [14]
    assert_learned(trainer)
    end(trainer.deepspeed)


def end(engine: Any) -> None:
    """The next case starts as a fresh script would."""
    engine.destroy()
    AcceleratorState._reset_state()
    GradientState._reset_state()
    gc.collect()


CASES: dict[str, Callable[..., None]] = {
    one.__name__: one
    for one in (
        *(trainer_resumes, lora_resumes, pretrained, models, generation, lora_experts, accelerate, reference),
        *(one_key, sft),
    )
}


def main() -> None:
    out, *cases = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
    deepspeed.init_distributed()
    for case in cases:
        name, stage, *more = case.split(":")
        folder = Path(out, case.replace(":", "-"))
        folder.mkdir(parents=True, exist_ok=True)
        print(f"case {case}", flush=True)
        CASES[name](folder, int(stage), *more)
        dist.barrier()


if __name__ == "__main__":
    main()
    leave()
