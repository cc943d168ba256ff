"""One run of trainer.py: a user's script for transformers' Trainer or TRL's SFTTrainer. Nothing in it knows of FP8.

deepspeed [--module fp8_ds.run] benchmarks/trainer_run.py SFTTrainer CONFIG.json TEXT.npy SEQ_LEN --output_dir OUT \
    --deepspeed ds.json --max_steps 100 --logging_steps 2
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, TrainerCallback, set_seed


class Clock(TrainerCallback):
    """A row at the start and at each log, for which Trainer has waited for the GPU: step, seconds, peak GiB since the
    row before, mean loss since then."""

    def __init__(self):
        self.rows = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.add(0, None)

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            self.add(state.global_step, logs["loss"])

    def add(self, step, loss):
        gib = 0.0
        if torch.cuda.is_initialized():
            gib = torch.cuda.max_memory_allocated() / 2**30
            torch.cuda.reset_peak_memory_stats()
        self.rows.append((step, time.perf_counter(), gib, loss))


def main():
    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank=")]  # the launcher's
    kind, model_path, text, seq_len, *options = words
    if kind == "SFTTrainer":
        from trl import SFTConfig as Arguments
    else:
        from transformers import TrainingArguments as Arguments
    (arguments,) = HfArgumentParser(Arguments).parse_args_into_dataclasses(options)
    set_seed(arguments.seed)
    with arguments.device:
        config = AutoConfig.for_model(**json.loads(Path(model_path).read_text()))
        model = AutoModelForCausalLM.from_config(config)
    tokens = np.load(text)
    rows = tokens[: len(tokens) // int(seq_len) * int(seq_len)].reshape(-1, int(seq_len)).astype(np.int64)
    clock = Clock()
    if kind == "SFTTrainer":
        from datasets import Dataset
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import PreTrainedTokenizerFast
        from trl import SFTTrainer

        no_words = Tokenizer(WordLevel({"<pad>": 0}, unk_token="<pad>"))  # the text is tokens already
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=no_words, pad_token="<pad>", eos_token="<pad>")
        data = Dataset.from_dict({"input_ids": list(rows)})
        trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer, callbacks=[clock])
    else:
        from transformers import Trainer

        windows = [{"input_ids": row, "labels": row} for row in map(torch.from_numpy, rows)]
        trainer = Trainer(model, arguments, train_dataset=windows, callbacks=[clock])
    trainer.train()
    Path(arguments.output_dir, "clock.json").write_text(json.dumps(clock.rows))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
