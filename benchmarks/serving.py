"""What serving in FP8 costs: the held-out loss of one training, evaluated as servers compute, and its logits.

    python benchmarks/serving.py --model llama-124m --steps 6144 --text-bytes 0        # one GPU, some ten minutes
    python benchmarks/serving.py --model tiny-llama --steps 40                         # a CPU

transformers' Llama trains with DeepSpeed ZeRO-2, compiled, by the preset "serve", whose weight scales are powers of two
for the whole weight, so that both forms of a folder hold its bytes. At 97 % of the steps the run branches: to its end
in FP8, and with all layers in bf16, as `{"enabled": true}` ends. Each end is saved by `engine.save_fp8_pretrained` in
both forms and evaluated on the same held-out windows:

- by the engine, whose linears are in FP8;
- in bf16: transformers' model with bf16 of the masters;
- FP8 weights: the folder's, de-quantised, in bf16;
- FP8 weights and activations: inputs quantised as servers do, by tokens ("compressed-tensors") or in groups of 128
  ("fp8-block"), products of both in float32. Servers' kernels sum the same products in another order. transformers' own
  FP8 kernels come from a hub, so they are not loaded here.

Logits are compared with the engine's, in dB (signal to difference, of one batch), and a folder's de-quantised weights
with those of transformers' own loader where that is installed, bit by bit.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from end_to_end_arms import MODELS, Arm, Model, ds_config
from end_to_end_trainers import transformers_model
from end_to_end_worker import learning_rate
from results_io import dated_stem, heading
from torch import Tensor, nn
from training_text import Windows, prepare

from fp8_ds.host import free_port, uses_cuda

FORMS = ("compressed-tensors", "fp8-block")
BRANCH = 0.97
FP8_MAX, GROUP = 448.0, 128


class Served(nn.Module):
    """A linear as a server computes it, emulated in float32.

    Args:
        weight: [out, in], de-quantised.
        group: elements of an input that share a scale; None: all of a token's.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, group: int | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        groups = x.float().unflatten(-1, (-1, min(self.group or width, width)))
        scale_inv = groups.abs().amax(-1, keepdim=True).clamp_(min=1e-12) / FP8_MAX
        values = (groups / scale_inv).to(torch.float8_e4m3fn).float().mul_(scale_inv).flatten(-2)
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(values, self.weight.float(), bias).to(x.dtype)


def weights_of(folder: Path) -> tuple[dict[str, Tensor], list[str]]:
    """A folder's tensors, FP8 weights de-quantised to float32, and the names of the linears that are in FP8."""
    from fp8_ds.checkpoint.fp8_folder import format_of, value_readers
    from fp8_ds.checkpoint.model_folder import TensorFiles

    stored = format_of(folder)
    assert stored is not None
    files = TensorFiles(folder)
    in_fp8 = [name.removesuffix(".weight") for name in files.names if files.dtype(name) == torch.float8_e4m3fn]
    readers = value_readers(folder, stored, torch.float32)
    return {name: read() for name, read in readers.items()}, in_fp8


def served_model(make: Callable[[], Any], folder: Path, quantizes_inputs: bool, device: torch.device) -> Any:
    """transformers' model with the folder's weights in bf16; with `quantizes_inputs` its FP8 linears are `Served`."""
    values, in_fp8 = weights_of(folder)
    model = make().to(torch.bfloat16)
    model.load_state_dict(values)
    if quantizes_inputs:
        group = GROUP if any(name.endswith("weight_scale_inv") for name in names_in(folder)) else None
        for name in in_fp8:
            linear = model.get_submodule(name)
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, Served(values[f"{name}.weight"], linear.bias, group))
    return model.to(device).eval()


def names_in(folder: Path) -> list[str]:
    from fp8_ds.checkpoint.model_folder import TensorFiles

    return TensorFiles(folder).names


def agrees_with_transformers(folder: Path, form: str) -> str:
    """Whether transformers' own de-quantising loader reads the same bf16 weights; why it could not, if so."""
    from fp8_ds.checkpoint.verify import makes_plain_models, verify
    from fp8_ds.errors import CheckpointError

    if not makes_plain_models(form):
        return "not by this version"
    try:
        verify(folder)
    except CheckpointError as error:
        return f"**{error}**"
    return "the same bits"


class Training:
    """One engine on text; its steps follow the learning rate of end_to_end.py."""

    def __init__(self, args: argparse.Namespace, m: Model, cache: Path, device: torch.device) -> None:
        import deepspeed

        import fp8_ds  # noqa: F401 (installs)

        deepspeed.init_distributed()
        made = transformers_model(m, "stock", "sdpa", 1)
        self.make = lambda: type(made()).__base__(made().config)
        fp8 = {"enabled": True, "preset": "serve", "linear": {"min_size": 0}}
        config = ds_config(Arm("serve", "ours", True, fp8=fp8), m, 1.0, not uses_cuda())
        torch.manual_seed(args.seed)
        model = self.make().to(device, torch.bfloat16)
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        self.engine.compile(**({} if uses_cuda() else {"backend": "aot_eager"}))
        self.m, self.steps, self.device = m, args.steps, device
        self.windows, self.held_out = (Windows(cache / f"{name}.npy", m.seq, device) for name in ("train", "held_out"))
        self.order = self.windows.order(args.steps * m.micro_batch, args.seed).view(args.steps, m.micro_batch)

    def train(self, first: int, last: int) -> float:
        """Take the steps from `first` to before `last`; return the last one's loss."""
        for step in range(first, last):
            for group in self.engine.optimizer.param_groups:
                group["lr"] = learning_rate(step, self.steps, True)
            tokens = self.windows.batch(self.order[step])[:, :-1].contiguous()
            loss = self.engine(input_ids=tokens, labels=tokens).loss
            self.engine.backward(loss)
            self.engine.step()
        return float(loss.detach())

    @torch.no_grad()
    def evaluate(self, model: Any, num_tokens: int) -> tuple[float, Tensor]:
        """Held-out loss of `model`, and its logits of the first batch, on the CPU."""
        num = max(1, min(num_tokens // self.m.seq, self.held_out.num_windows) // self.m.micro_batch)
        losses, logits = [], None
        for k in range(num):
            batch = self.held_out.batch(torch.arange(k * self.m.micro_batch, (k + 1) * self.m.micro_batch))
            output = model(input_ids=batch[:, :-1].contiguous(), labels=batch[:, :-1].contiguous())
            losses.append(float(output.loss))
            logits = output.logits[:2].float().cpu() if logits is None else logits
        assert logits is not None
        return sum(losses) / num, logits


def db(signal: Tensor, other: Tensor) -> float:
    """Signal to difference; 999 where there is none."""
    difference = (signal - other).square().mean()
    return 999.0 if difference == 0 else float(10 * torch.log10(signal.square().mean() / difference))


def measure_end(run: Training, name: str, args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Rows of one end of the training: how it was evaluated, loss, and logits beside the engine's."""
    run.engine.eval()
    loss, logits = run.evaluate(run.engine, args.held_out_tokens)
    rows: list[dict[str, Any]] = []

    def keep(text: str, loss: float, db: float | None, loader: str) -> None:
        rows.append({"end": name, "evaluated": text, "loss": loss, "db": db, "loader": loader})
        print(rows[-1], flush=True)  # what is known if the time runs out

    keep("the engine, FP8 linears", loss, None, "")
    run.engine.save_16bit_model(str(folder), "masters.bin")
    model = run.make().to(run.device, torch.bfloat16)
    model.load_state_dict(torch.load(folder / "masters.bin", weights_only=True))

    def add(text: str, served: Any, loader: str = "") -> None:
        its_loss, its_logits = run.evaluate(served, args.held_out_tokens)
        keep(text, its_loss, db(logits, its_logits), loader)

    add("bf16", model.eval())
    for form in FORMS:
        out = folder / f"{name}-{form}"
        run.engine.save_fp8_pretrained(out, form)
        loader = agrees_with_transformers(out, form)
        add(f"{form}: FP8 weights", served_model(run.make, out, False, run.device), loader)
        add(f"{form}: FP8 weights and activations", served_model(run.make, out, True, run.device))
    run.engine.train()
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| end | evaluated | held-out loss | % of bf16's | logits beside the engine's, dB | transformers' loader |"
    ]
    lines += ["|---|---|---|---|---|---|"]
    for row in rows:
        (bf16,) = (r["loss"] for r in rows if r["end"] == row["end"] and r["evaluated"] == "bf16")
        beside = "" if row["db"] is None else f"{row['db']:.1f}"
        percent = f"{100 * (row['loss'] / bf16 - 1):+.3f}"
        lines.append(
            f"| {row['end']} | {row['evaluated']} | {row['loss']:.4f} | {percent} | {beside} | {row['loader']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=list(MODELS), default="llama-124m")
    parser.add_argument("--steps", type=int, default=6144)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out-tokens", type=int, default=1_048_576)
    parser.add_argument("--text-bytes", type=int, default=24_000_000, help="of text that is read; 0: all")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir(), "end_to_end_text"))
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    args = parser.parse_args()
    m = MODELS[args.model]
    port = free_port()
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), **({} if uses_cuda() else {"DS_ACCELERATOR": "cpu"})}
    is_tiny = m.vocab < 32000
    kind, size = ("bytes", 256) if is_tiny else ("bpe", m.vocab)
    most = 400_000 if is_tiny else args.text_bytes or None
    needed = args.steps * m.micro_batch * m.seq // 2
    text, cache = prepare(args.cache / f"{kind}-{size}-{most or 'all'}", kind, size, needed, most)
    device = torch.device("cuda" if uses_cuda() else "cpu")
    run = Training(args, m, cache, device)
    branch = round(BRANCH * args.steps)
    run.train(0, branch)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        run.engine.save_checkpoint(folder, "branch")
        run.train(branch, args.steps)
        rows = measure_end(run, "FP8", args, folder)
        run.engine.load_checkpoint(folder, "branch")
        layers = [name.removesuffix(".weight") for name in run.engine.fp8.weights]
        run.engine.set_layer_precision(layers, "bf16")
        run.train(branch, args.steps)
        run.engine.set_layer_precision(layers, "schedule")
        rows += measure_end(run, "3 % in bf16", args, folder)
    stem = dated_stem(args.out, "serving")
    stem.with_suffix(".json").write_text(json.dumps({"model": args.model, "steps": args.steps, "rows": rows}, indent=1))
    made = f"{m.kind}, {m.layers} layers of {m.hidden}, {args.steps} steps of {m.micro_batch} x {m.seq} tokens"
    body = f'{made}; preset "serve", compiled, ZeRO-2. Text: {text.describe()}.\n\n{table(rows)}'
    stem.with_suffix(".md").write_text(heading(stem.name) + body)
    print(table(rows))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
