"""A Hugging Face Trainer script that knows nothing of fp8_ds: what the autoload test launches.

deepspeed hf_trainer_script.py CONFIG.json OUT_FOLDER
"""

import json
import sys
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Sequences(torch.utils.data.Dataset):
    """Arithmetic sequences modulo the vocabulary."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (index + 3 * torch.arange(33)) % 97
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    config, out = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
    arguments = TrainingArguments(
        output_dir=out,
        deepspeed=config,
        use_cpu=get_accelerator().device_name() == "cpu",
        bf16=True,
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    shape = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=2
    )
    trainer = Trainer(model=LlamaForCausalLM(shape), args=arguments, train_dataset=Sequences())
    trainer.train()
    trainer.save_model(out)
    if trainer.is_world_process_zero():
        engine = trainer.deepspeed
        report = engine.fp8_report() if hasattr(engine, "fp8_report") else None
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        Path(out, "result.json").write_text(json.dumps({"losses": losses, "fp8": report}))


if __name__ == "__main__":
    main()
