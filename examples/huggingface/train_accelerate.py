"""A loop of your own under Accelerate.

deepspeed examples/huggingface/train_accelerate.py examples/huggingface/ds_zero3_fp8.json OUT_FOLDER [STEPS]
(`accelerate launch --use_deepspeed --deepspeed_config_file ... train_accelerate.py ...` starts it as well. Without a
GPU add `--num_processes 1`, or more: Accelerate counts GPUs, and torch refuses none by a bare AssertionError.)
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
from deepspeed.accelerator import get_accelerator
from transformers import AutoConfig, AutoModelForCausalLM

import fp8_ds  # noqa: F401

sys.path.insert(0, str(Path(__file__).parent))
from text import Windows

MICRO_BATCH = 4


def main() -> None:
    path, out, *rest = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
    num_steps = int(rest[0]) if rest else 100
    config = json.loads(Path(path).read_text())
    config |= {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
    }
    if "fp8" in config:  # whose preset keeps the last steps in bf16: Trainer would tell their number
        config["fp8"].setdefault("schedule", {"total_steps": num_steps})
    # On a CPU Accelerate takes each rank for the only one, unless it is told the backend.
    backend = InitProcessGroupKwargs(backend=get_accelerator().communication_backend_name())
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), kwargs_handlers=[backend])
    shape = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape, **heads))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loader = torch.utils.data.DataLoader(Windows(seq_len=128), batch_size=MICRO_BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for step, batch in enumerate(loader):
        if step == num_steps:
            break
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            accelerator.print(f"step {step}: loss {loss.item():.4f}")
    # With the "fp8" block off `model` is DeepSpeed's own engine, which has no report.
    report = model.fp8_report() if hasattr(model, "fp8_report") else {}
    accelerator.print(report.get("plan", "fp8: off"))
    accelerator.save_state(f"{out}/state")  # load_state goes on from here, bit for bit
    # On all ranks, in every stage: the masters of other ranks are gathered.
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        f"{out}/model", is_main_process=accelerator.is_main_process, state_dict=state
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
