"""One run of `fp8-ds parity`, on every rank: a user's model under DeepSpeed, one seed, one arm.

Started by study.py as `deepspeed --module fp8_ds.parity.worker SPEC.json`, or as a process of its own on one rank.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp8_ds.errors import ConfigError, UnsupportedError
from fp8_ds.parity.folder import write_whole
from fp8_ds.parity.loop import Length, Ranks, State, device_ranks, train
from fp8_ds.parity.text import Windows

WARMUP = 0.05
"""Share of the steps over which the learning rate rises, then linearly to zero; without a scheduler of the user's."""
HELD_OUT_TOKENS = 1_048_576
_TAG = "piece"


def build(spec: dict[str, Any]) -> nn.Module:
    """The model with the weights of its seed, bf16 numbers all, on the CPU.

    Raises:
        ConfigError: it cannot be built.
    """
    from fp8_ds.model_spec import read_spec

    torch.manual_seed(spec["seed"])
    if spec["pretrained"]:
        from transformers import AutoModelForCausalLM

        model: nn.Module = AutoModelForCausalLM.from_pretrained(spec["model"], local_files_only=True)
    else:
        found = read_spec(spec["model"], spec["settings"])
        if found.function is not None:
            model = found.function()
        else:
            from transformers import AutoConfig, AutoModelForCausalLM

            options = dict(found.config or {})
            kind = options.pop("model_type")
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options))
    configuration: Any = getattr(model, "config", None)
    if configuration is not None:
        configuration.use_cache = False
    return model.to(torch.bfloat16).train()


class EngineTrainer:
    """The user's configuration with an arm's block in it.

    Args:
        spec: what study.py wrote.
        device: of this rank, as DeepSpeed's accelerator names it.
    """

    def __init__(self, spec: dict[str, Any], device: torch.device) -> None:
        import deepspeed

        import fp8_ds  # noqa: F401  (installs)

        self.spec, self.device = spec, device
        module = build(spec)
        self.takes_labels = hasattr(module, "config")
        config = dict(spec["config"])
        if device.type == "cpu" and config.get("optimizer", {}).get("type", "").lower() in ("adam", "adamw"):
            params = {**config["optimizer"].get("params", {}), "torch_adam": True}
            config["optimizer"] = {**config["optimizer"], "params": params}
        self.engine, _, _, self.scheduler = deepspeed.initialize(
            model=module, model_parameters=[p for p in module.parameters() if p.requires_grad], config=config
        )
        self.micro_batch = self.engine.train_micro_batch_size_per_gpu()
        self.accumulation = self.engine.gradient_accumulation_steps()
        self.world, self.rank = self.engine.dp_world_size, self.engine.global_rank
        self.base_lrs = [float(group["lr"]) for group in self.engine.optimizer.param_groups]
        self.ranks: Ranks = device_ranks(device)
        text = Path(spec["text"])
        self.windows = Windows(text / "train.npy", spec["seq"], device)
        self.held_out = Windows(text / "held_out.npy", spec["seq"], device)
        count = spec["steps"] * self.accumulation * self.world * self.micro_batch
        shape = spec["steps"], self.accumulation, self.world, self.micro_batch
        self.order = self.windows.order(count, spec["seed"]).view(shape)[:, :, self.rank]

    @property
    def tokens_per_step(self) -> int:
        return self.accumulation * self.world * self.micro_batch * self.spec["seq"]

    def loss(self, tokens: Tensor) -> Tensor:
        """Of int64 tokens [batch, seq + 1], as `fp8-ds estimate` calls a model."""
        if self.takes_labels:
            inputs = tokens[:, :-1].contiguous()
            return self.engine(input_ids=inputs, labels=inputs).loss
        return self.engine(tokens)

    def step(self, number: int) -> Tensor:
        if self.scheduler is None:
            for group, base in zip(self.engine.optimizer.param_groups, self.base_lrs, strict=True):
                lr = base * factor(number, self.spec["steps"])
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(lr)
                else:
                    group["lr"] = lr
        losses = []
        for windows in self.order[number]:
            loss = self.loss(self.windows.batch(windows))
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach().float())
        return torch.stack(losses).mean()

    @torch.no_grad()
    def evaluate(self) -> float:
        """The same windows for all arms, seeds and steps; every rank takes its share, as many batches as the others."""
        per_batch = self.world * self.micro_batch
        wanted = min(self.held_out.num_windows, -(-HELD_OUT_TOKENS // self.spec["seq"]))
        num = wanted // per_batch
        if num == 0:
            raise ConfigError(
                f"--held-out: expected at least {per_batch} windows of {self.spec['seq']} tokens, a micro-batch on "
                f"each rank, got {self.held_out.num_windows}. Name more text."
            )
        self.engine.eval()
        mine = torch.arange(num * per_batch).view(num, self.world, self.micro_batch)[:, self.rank]
        losses = [self.loss(self.held_out.batch(part)).double() for part in mine]
        self.engine.train()
        return self.ranks.mean(float(torch.stack(losses).mean()))

    def evaluated_in_bf16(self) -> dict[str, Any]:
        """`evaluate` again with all layers in bf16, their weights decoded from the masters, as an export would be used.

        The difference to `evaluate` is what FP8 costs where the model computes, the rest what it has learned less.
        Nothing where no layer is in FP8. Collective; the run is at its end.
        """
        if self.engine.fp8_report()["num_fp8_weights"] == 0:
            return {}
        try:
            self.engine.set_layer_precision("", "bf16")
        except (ConfigError, UnsupportedError) as error:  # frozen layers stay in FP8, and the guard's
            return {"not_evaluated_in_bf16": str(error)}
        return {"held_out_loss_bf16": self.evaluate()}

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder), tag=_TAG)
        # Of dropout; DeepSpeed keeps it for pipelines only.
        on_device = torch.cuda.get_rng_state() if self._on_cuda else torch.empty(0, dtype=torch.uint8)
        torch.save([torch.get_rng_state(), on_device], self._rng_file(folder))

    def load(self, folder: Path) -> None:
        self.engine.load_checkpoint(str(folder), tag=_TAG)
        on_host, on_device = torch.load(self._rng_file(folder), weights_only=True)
        torch.set_rng_state(on_host)
        if self._on_cuda:
            torch.cuda.set_rng_state(on_device)

    @property
    def _on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def _rng_file(self, folder: Path) -> Path:
        return folder / f"rng-{self.rank}.pt"

    def about(self) -> dict[str, Any]:
        """What the log has no column for.

        Raises:
            ConfigError: FP8 is wanted and not there.
        """
        wanted = bool((self.spec["config"].get("fp8") or {}).get("enabled"))
        report = self.engine.fp8_report() if hasattr(self.engine, "fp8_report") else {}
        if wanted and not report.get("enabled"):
            raise ConfigError("fp8.enabled: expected an engine with FP8, got a stock one. Is fp8_ds installed?")
        return {
            "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in self.engine.module.parameters()),
            "plan": report.get("plan"),
            "world": self.world,
            "epochs": round(self.order.numel() * self.world / self.windows.num_windows, 2),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if self._on_cuda else None,
        }


def factor(number: int, steps: int) -> float:
    """Of the learning rate at step 0, 1, ...: up over WARMUP of the steps, then linearly to zero."""
    warm = max(1, round(WARMUP * steps))
    return (number + 1) / warm if number < warm else (steps - number) / (steps - warm)


def run(spec: dict[str, Any], local_rank: int) -> bool:
    """The run is at its end, with its log and a JSON beside it; false if the deadline has cut it.

    Computes where DeepSpeed's accelerator does: DS_ACCELERATOR=cpu means the CPU on a machine with GPUs, too.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    end = time.monotonic() + spec["seconds"] if spec["seconds"] is not None else math.inf
    get_accelerator().set_device(local_rank)
    deepspeed.init_distributed(get_accelerator().communication_backend_name())
    device = torch.device(get_accelerator().current_device_name())
    trainer = EngineTrainer(spec, device)
    about = trainer.about()
    if spec["compile"]:
        trainer.engine.compile()
    log = Path(spec["log"])
    length = Length(spec["steps"], trainer.tokens_per_step)
    state = State(Path(spec["state"]), spec["identity"], trainer.ranks)
    seconds = train(trainer, length, log, state, end, trainer.ranks)
    if seconds is None:
        return False
    if about["plan"] is not None:
        about |= trainer.evaluated_in_bf16()
    if trainer.ranks.writes:
        about["tokens_per_second"] = round(spec["steps"] * trainer.tokens_per_step / max(seconds, 1e-9))
        write_whole(log.with_suffix(".json"), json.dumps(about))
    return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("spec", type=Path)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    args = parser.parse_args()
    finished = run(json.loads(args.spec.read_text()), args.local_rank)
    if int(os.environ.get("RANK", "0")) == 0:
        print("finished" if finished else "paused", flush=True)
    torch.distributed.destroy_process_group()  # else gloo's threads may outlive Python, which aborts then


if __name__ == "__main__":
    main()
