"""Attention backends against each other: how near to float64, how fast, what they keep.

    python benchmarks/attention.py                                   # one H200: everything
    python benchmarks/attention.py --parts accuracy --device cpu     # the FP8 numerics in emulation, minutes on a CPU
    python benchmarks/attention.py --activations FILE ...            # q, k, v of your own model, too

Latency is that of one causal self-attention without dropout, forward and backward apart, medians; FP8's contains the
casts. TFLOP/s are of 4 s^2 d per head, halved for the causal mask, 2.5 times that for the backward, as FlashAttention
counts. Sizes are those of its papers: hidden size 2048, 16384 tokens a batch. Between timed calls 4 GiB are read, about
1 ms: the cache holds nothing of the inputs, and the host is ahead of calls that launch many kernels.
An arm that is not installed, or fails, has a row that says why.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import attention_accuracy as accuracy
import torch
import torch.nn.functional as F
from attention_report import publish
from results_io import command_line, dated_stem, device_name, without_folders
from timing import make_flush, median_ms
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from fp8_ds.attention import attention, describe_backend, heads, require_backend
from fp8_ds.host import uses_cuda

HIDDEN, TOKENS = 2048, 16384
LENGTHS = (2048, 4096, 8192, 16384, 32768)
DIMS = (128, 64)
BACKWARD_FLOPS = 2.5
FLUSH_BYTES = 4 << 30
"""FP8's forward launches more than the host does in a read of 1 GiB."""
Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(backend: Any, **options: Any) -> Forward:
    return partial(attention, backend=backend, causal=True, **options)


def by_sdpa(kernel: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's SDPA with this kernel or, on CUDA, not at all."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel([kernel]) if q.is_cuda else nullcontext():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


@functools.cache
def causal_blocks(length: int, device: str) -> BlockMask:
    return create_block_mask(lambda batch, head, i, j: j <= i, None, None, length, length, device=device)


@functools.cache
def compiled_flex() -> Callable[..., Any]:
    """FlexAttention, compiled for each shape; by default torch stops after eight."""
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = causal_blocks(q.shape[1], str(q.device))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out: Tensor = compiled_flex()(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def cudnn_fp8(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Transformer Engine's attention in FP8, which is cuDNN's; on Hopper with delayed scales and head dim 128 only."""
    from transformer_engine import pytorch as te
    from transformer_engine.common import recipe

    module = _TE_MODULES.get(q.shape)
    if module is None:
        module = te.DotProductAttention(
            q.shape[2], q.shape[3], num_gqa_groups=k.shape[2], attention_dropout=0.0, qkv_format="bshd",
            attn_mask_type="causal",
        )  # fmt: skip
        _TE_MODULES[q.shape] = module
    scaling = recipe.DelayedScaling(fp8_format=recipe.Format.HYBRID, fp8_dpa=True)
    has_new_name = hasattr(te, "autocast")  # since 2.9
    fp8 = te.autocast(recipe=scaling) if has_new_name else te.fp8_autocast(fp8_recipe=scaling)
    with fp8:
        return module(q, k, v).view(q.shape)


_TE_MODULES: dict[torch.Size, Any] = {}
"""By shape: their amax histories are filled by the calls that warm up."""

ARMS: dict[str, Forward] = {
    "FA3 bf16": ours("fa3"),
    "FA3 FP8": ours("fa3_fp8"),
    "cuDNN bf16": partial(by_sdpa, SDPBackend.CUDNN_ATTENTION),
    "FA3 FP8 rotated": ours("fa3_fp8", hadamard=True),
    "SDPA flash (FA2)": partial(by_sdpa, SDPBackend.FLASH_ATTENTION),
    "cuDNN FP8 (TE)": cudnn_fp8,
    "FlexAttention": flex,
}
EMULATED: dict[str, accuracy.Compute] = {
    "bf16, plain": accuracy.through_autograd(ours("reference")),
    "FP8 emulated": accuracy.through_autograd(ours("fa3_fp8_emulated")),
    "FP8 emulated, rotated": accuracy.through_autograd(ours("fa3_fp8_emulated", hadamard=True)),
    "FP8 emulated, backward on bf16 q, k, v": accuracy.inconsistent,
}
BACKENDS = {"FA3 bf16": "fa3", "FA3 FP8": "fa3_fp8", "FA3 FP8 rotated": "fa3_fp8"}
CALLS_BEFORE = {"cuDNN FP8 (TE)": 3}
"""Of an accuracy: delayed scales are those of earlier calls' amaxes."""


class Run:
    """The result so far, in a file after each row."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device: str = args.device
        self.path = dated_stem(args.out, args.name).with_suffix(".json")
        self.result: dict[str, Any] = {
            "command": command_line(), "device": device_name() if args.device == "cuda" else "cpu",
            "torch": torch.__version__, "arms": {}, "accuracy": [], "latency": [], "casts": [],
        }  # fmt: skip

    def add(self, part: str, row: dict[str, Any]) -> None:
        self.result[part].append(row)
        print(part, json.dumps(row), flush=True)
        self.path.write_text(json.dumps(self.result, indent=1) + "\n")


def available(run: Run, only: list[str] | None) -> list[str]:
    """Arms that can run here; the others are printed and recorded with the reason."""
    found = []
    for arm in only or ARMS:
        try:
            if arm in BACKENDS:
                require_backend(BACKENDS[arm], torch.device(run.device))
                run.result["arms"][arm] = describe_backend(BACKENDS[arm])
            elif arm == "cuDNN FP8 (TE)":
                import transformer_engine
                import transformer_engine.pytorch

                run.result["arms"][arm] = f"Transformer Engine {transformer_engine.__version__}"
            elif run.device == "cpu" and arm != "SDPA flash (FA2)":
                raise RuntimeError("it needs a CUDA device")
            found.append(arm)
        except Exception as error:  # of a broken installation, whatever its import raises
            run.result["arms"][arm] = without_folders(f"SKIPPED: {error}")
            print(f"{arm}: {run.result['arms'][arm]}", flush=True)
    return found


def first_line(error: Exception) -> str:
    """Class and beginning of an arm's error. Arms are other people's kernels and compilers, which raise anything: those
    that measure one catch all, write this into its row, and the others are measured all the same."""
    return without_folders(f"{type(error).__name__}: {error}".splitlines()[0])[:300]


def measure_latency(run: Run, arm: str, length: int, dim: int, num_heads: int, batch: int) -> None:
    row: dict[str, Any] = {"arm": arm, "length": length, "dim": dim, "heads": num_heads, "batch": batch}
    flops = 4 * batch * length**2 * num_heads * dim / 2
    try:
        torch.manual_seed(0)
        shape = (batch, length, num_heads, dim)
        q, k, v, grad_out = (torch.randn(shape, device=run.device, dtype=torch.bfloat16) for _ in range(4))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        row["kept_mib"] = kept_bytes(lambda: ARMS[arm](*leaves)) / 2**20
        out = ARMS[arm](*leaves)
        backward = partial(torch.autograd.grad, out, leaves, grad_out, retain_graph=True)
        backward()
        if run.device == "cuda":
            flush = make_flush(FLUSH_BYTES)
            row["forward_ms"] = median_ms(lambda: ARMS[arm](*leaves), flush)
            row["backward_ms"] = median_ms(backward, flush)
            row["forward_tflops"] = flops / row["forward_ms"] / 1e9
            row["backward_tflops"] = BACKWARD_FLOPS * flops / row["backward_ms"] / 1e9
    except Exception as error:
        row["error"] = first_line(error)
    run.add("latency", row)


def kept_bytes(forward: Callable[[], Tensor]) -> int:
    """Bytes of the storages that autograd keeps, each once."""
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        for part in with_storage(x):
            kept[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        forward()
    return sum(kept.values())


def with_storage(x: Tensor) -> list[Tensor]:
    """The tensor itself, or those inside of Transformer Engine's Float8Tensor: a wrapper's own storage cannot be read
    ("Attempted to access the data pointer on an invalid python storage")."""
    if hasattr(x, "get_metadata"):  # since 2.0: data, its transpose if there is one, scale_inv
        return [part for part in x.get_metadata().values() if isinstance(part, Tensor)]
    return [x]


def measure_casts(run: Run, length: int, dim: int, num_heads: int, batch: int) -> None:
    """The quantisation of q, k and v alone, and their way back."""
    q, k, v = (torch.randn(batch, length, num_heads, dim, device=run.device).bfloat16() for _ in range(3))
    row: dict[str, Any] = {"length": length, "dim": dim, "batch": batch}
    codes = heads.quantize(q, k, v, None, hadamard=False)
    calls: dict[str, Callable[[], object]] = {
        "quantize_ms": lambda: heads.quantize(q, k, v, None, hadamard=False),
        "quantize_rotated_ms": lambda: heads.quantize(q, k, v, None, hadamard=True),
        "dequantize_ms": lambda: [heads.dequantize(codes[i], codes[3][i], None, 0) for i in range(3)],
    }
    for name, call in calls.items():
        try:
            call()
            if run.device == "cuda":
                row[name] = median_ms(call, make_flush(FLUSH_BYTES))
        except Exception as error:
            row[f"{name} failed"] = first_line(error)
    run.add("casts", row)


def accuracy_inputs(args: argparse.Namespace) -> Iterator[accuracy.Inputs]:
    for dim in args.dims:
        plain = accuracy.normal(args.accuracy_length, args.accuracy_heads, max(args.accuracy_heads // 2, 1), dim)
        yield from (plain, accuracy.outlier_channels(plain), accuracy.rare_outliers(plain))
        if args.train_steps:
            yield from accuracy.trained(dim, args.train_steps, min(args.accuracy_length, 1024), args.device)
    if args.activations is not None:
        yield from accuracy.from_file(args.activations)


def measure_accuracy(run: Run, args: argparse.Namespace, arms: list[str]) -> None:
    computes = dict(EMULATED)
    if run.device == "cuda":
        computes |= {arm: accuracy.through_autograd(ARMS[arm]) for arm in arms}
    for inputs in accuracy_inputs(args):
        on_device = inputs.to(run.device)
        exact = accuracy.truth(on_device)
        _TE_MODULES.clear()  # scales are those of these inputs
        for arm, compute in computes.items():
            row: dict[str, Any] = {"inputs": inputs.name, "dim": inputs.q.shape[-1], "length": inputs.q.shape[1],
                                   "arm": arm}  # fmt: skip
            try:
                tensors = (on_device.q, on_device.k, on_device.v, on_device.grad_out)
                for _ in range(CALLS_BEFORE.get(arm, 0)):
                    compute(*tensors)
                row |= accuracy.errors(exact, compute(*tensors))
            except Exception as error:
                row["error"] = first_line(error)
            run.add("accuracy", row)


def measure(run: Run, args: argparse.Namespace) -> None:
    arms = available(run, args.arms)
    shapes = [
        (length, dim, HIDDEN // dim, max(args.tokens // length, 1)) for dim in args.dims for length in args.lengths
    ]
    if "latency" in args.parts:
        for shape in shapes:
            for arm in arms:
                measure_latency(run, arm, *shape)
            measure_casts(run, *shape)
    if "accuracy" in args.parts:
        measure_accuracy(run, args, arms)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=("latency", "accuracy"), default=["latency", "accuracy"])
    parser.add_argument(
        "--arms", nargs="+", choices=tuple(ARMS), help="of latency and, on CUDA, accuracy; default: all"
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--dims", nargs="+", type=int, default=list(DIMS))
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a batch, where a sequence is not longer")
    parser.add_argument("--accuracy-length", type=int, default=2048)
    parser.add_argument("--accuracy-heads", type=int, default=4)
    parser.add_argument("--train-steps", type=int, default=200, help="of the model whose activations are used; 0: none")
    parser.add_argument("--activations", type=Path, help="torch.save of name -> (q, k, v, grad_out)")
    parser.add_argument("--device", default="cuda" if uses_cuda() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--name", default="attention")
    args = parser.parse_args()
    os.environ["NVTE_FLASH_ATTN"] = "0"  # Transformer Engine's arm is cuDNN's
    run = Run(args)
    measure(run, args)
    run.path.write_text(json.dumps(run.result, indent=1) + "\n")
    print(publish(run.path))


if __name__ == "__main__":
    main()
