"""A Trainer script: `import fp8_ds` and the "fp8" block in ds_zero3_fp8.json are all that is not stock.

deepspeed examples/huggingface/train_trainer.py --output_dir out --deepspeed examples/huggingface/ds_zero3_fp8.json \
    --bf16 true --max_steps 100 --logging_steps 10
"""

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments, set_seed

import fp8_ds  # noqa: F401  (before or after the others: it waits for deepspeed)

sys.path.insert(0, str(Path(__file__).parent))
from text import Windows


def main() -> None:
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    set_seed(arguments.seed)  # Trainer does so itself, but after the model is made
    # Yours: AutoModelForCausalLM.from_pretrained(...). This one is made from numbers, so that nothing is downloaded.
    config = AutoConfig.for_model(
        "llama",
        vocab_size=256,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    train, held_out = Windows(seq_len=128), Windows(seq_len=128, held_out=True)
    trainer = Trainer(model=model, args=arguments, train_dataset=train, eval_dataset=held_out)
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    print({"held-out loss": trainer.evaluate()["eval_loss"]})
    trainer.save_model()  # bf16 of the masters, in safetensors
    if trainer.is_world_process_zero():
        # With the "fp8" block off the engine is DeepSpeed's own, which has no report.
        engine = trainer.model_wrapped
        report = engine.fp8_report() if hasattr(engine, "fp8_report") else {}
        print(report.get("plan", "fp8: off"))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
