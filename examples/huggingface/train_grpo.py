"""TRL's GRPO, with completions of a second model that gets the trained one's FP8 tensors before each of its turns.

deepspeed examples/huggingface/train_grpo.py examples/huggingface/ds_zero3_fp8.json 40

`Rollout` stands where a server would. vLLM (0.33, by its sources; it has not been run here) takes the same pairs, with
VLLM_ENABLE_V1_MULTIPROCESSING=0 in the environment and `served` a folder of `engine.save_fp8_pretrained`:

    llm = vllm.LLM("served")
    tensors = iter_fp8_tensors(trainer.model_wrapped, "compressed-tensors")
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})

Half the bytes of bf16 go to the server, and nothing is rounded on the way.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, set_seed
from trl import GRPOConfig, GRPOTrainer

import fp8_ds  # noqa: F401  (before or after the others: it waits for deepspeed)
from fp8_ds.checkpoint import iter_fp8_tensors

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 "
NUM_TOKENS = 16
"""Of a completion."""


class Rollout:
    """A copy of the model that generates in bf16, from weights in the form "compressed-tensors".

    Args:
        model: of the trained model's class and sizes, with any weights.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.bfloat16().eval()
        self.num_bytes = 0

    @torch.no_grad()
    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take over `tensors`: FP8 codes wait for their scales, which come next; all else is copied."""
        own, codes = self.model.state_dict(), torch.empty(0)
        for name, tensor in tensors:
            self.num_bytes += tensor.nbytes
            if tensor.dtype == torch.float8_e4m3fn:
                codes = tensor
            elif name.endswith(".weight_scale"):
                own[name.removesuffix("_scale")].copy_(codes.float() * tensor)  # [out, in] x [out, 1]
            else:
                own[name].copy_(tensor)

    @torch.no_grad()
    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        """Generate a completion for each prompt; TRL's `rollout_func`. All ranks call it together."""
        self.load_weights(iter_fp8_tensors(trainer.model_wrapped, "compressed-tensors"))
        self.model.to(trainer.accelerator.device)
        prompt = trainer.processing_class(prompts, return_tensors="pt").to(self.model.device)
        options = {"do_sample": True, "top_k": 0, "max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS}
        made = self.model.generate(**prompt, **options, pad_token_id=0)
        length = prompt["input_ids"].shape[1]
        logits = self.model(made).logits[:, length - 1 : -1].float()
        chosen = logits.log_softmax(-1).gather(-1, made[:, length:, None]).squeeze(-1)
        return {
            "prompt_ids": prompt["input_ids"].tolist(),
            "completion_ids": made[:, length:].tolist(),
            "logprobs": chosen.tolist(),
        }


def share_of_vowels(completions: list[str], **_: Any) -> list[float]:
    """The reward."""
    return [sum(letter in "aeiou" for letter in text) / NUM_TOKENS for text in completions]


def tokenizer() -> PreTrainedTokenizerFast:
    """Letters as tokens, so that nothing is downloaded."""
    words = {letter: number for number, letter in enumerate(["<pad>", "<eos>", *LETTERS])}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def main() -> None:
    config_path, num_steps = sys.argv[-2], int(sys.argv[-1])
    set_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("llama", vocab_size=64, num_key_value_heads=2, **sizes)
    rollout = Rollout(AutoModelForCausalLM.from_config(config))
    arguments = GRPOConfig(
        output_dir="out",
        deepspeed=config_path,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        max_steps=num_steps,
        learning_rate=1e-3,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=NUM_TOKENS,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_config(config),
        args=arguments,
        reward_funcs=share_of_vowels,
        train_dataset=Dataset.from_dict({"prompt": [f"{number:04d} " for number in range(256)]}),
        processing_class=tokenizer(),
        rollout_func=rollout,
    )
    trainer.train()
    if trainer.is_world_process_zero():
        rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
        print({"rewards": [round(reward, 3) for reward in rewards]})
        print({"MB a sync": rollout.num_bytes / num_steps / 1e6, "in bf16": 2e-6 * rollout.model.num_parameters()})
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
