"""What the size of its chunks costs Liger's fused cross entropy: time and memory.

    python benchmarks/liger_chunks.py --out benchmarks/results         # one GPU
    python benchmarks/liger_chunks.py --out .out --dry-run             # CPU: names and shapes, nothing runs

Liger makes the logits of as many tokens at once as keep them about as large as the loss's input, times
`chunk_mem_const`: a quarter of the chunks add a quarter as often into the weight's gradient, and their products have
four times as many rows. "plain" is torch's loss of whole logits in bf16. The matrix products alone are 6 x tokens x
hidden x vocabulary operations. Times are of forward and backward by events, the backward with a gradient of 1.

Predicted on an H100 for Llama-3-8B's head and 8,192 tokens (34 ms of products at 750 TFLOP/s): 54 ms with 1, 47 with
2, 43 with 4, 41 with 8 and 40 with 16; peak above the inputs 1.1 GiB with 1 (the weight's gradient), 1.6 with 8. For
Qwen3-0.6B's, 149 chunks of which are 64 tokens each, 60 ms with 1 and 14 with 16.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from results_io import dated_stem, heading
from timing import median_ms
from torch import Tensor

SHAPES = {"Llama-3-8B": (8192, 4096, 128256), "Llama 2.0 B": (8192, 4096, 32000), "Qwen3-0.6B": (8192, 1024, 151936)}
"""(tokens, hidden size, vocabulary)."""
CONSTANTS = (1, 2, 4, 8, 16)
GIB = 1 << 30


def measure(call: Any, x: Tensor, weight: Tensor) -> dict[str, float]:
    """Milliseconds of forward and backward, and the GiB that they take beside inputs."""

    def step() -> None:
        x.grad = weight.grad = None
        call().backward()

    step()
    torch.cuda.synchronize()
    x.grad = weight.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / GIB
    return {"ms": round(median_ms(step), 2), "peak_gib": round(peak, 2)}


def measure_shape(tokens: int, hidden: int, vocabulary: int) -> list[dict[str, Any]]:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    torch.manual_seed(0)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, hidden, device="cuda", dtype=torch.bfloat16).mul_(0.02).requires_grad_()
    target = torch.randint(vocabulary, (tokens,), device="cuda")
    rows: list[dict[str, Any]] = [
        {"arm": f"Liger, {const}"}
        | measure(
            lambda const=const: liger_fused_linear_cross_entropy(x, weight, target, chunk_mem_const=const), x, weight
        )
        for const in CONSTANTS
    ]
    rows.append({"arm": "plain"} | measure(lambda: F.cross_entropy(F.linear(x, weight), target), x, weight))
    products = 6 * tokens * hidden * vocabulary
    return [row | {"tflops": round(products / row["ms"] / 1e9)} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    found = {name: [] if args.dry_run else measure_shape(*shape) for name, shape in SHAPES.items()}
    lines = ["| tokens, hidden, vocabulary | loss | ms | TFLOP/s of the products | peak GiB |", "|---|---|---|---|---|"]
    lines += [
        f"| {shape} | {row['arm']} | {row['ms']:.1f} | {row['tflops']} | {row['peak_gib']:.2f} |"
        for name, rows in found.items()
        for shape in [", ".join(map(str, SHAPES[name]))]
        for row in rows
    ]
    text = "\n".join(lines) + "\n"
    stem = dated_stem(args.out, "liger-chunks")
    stem.with_suffix(".md").write_text(heading(stem.name) + text)
    stem.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
