"""What a step of Llama 2.0 B with gradient release holds at its peak, counted on a CPU at a sixteenth of its widths.

    python benchmarks/peak_on_cpu.py                      # half a minute a case; a dated result file
    python benchmarks/peak_on_cpu.py --layers 1 --out DIR

The model of end_to_end's piece "release": layers compiled one by one, inputs of norms and SwiGLUs in FP8, delayed
scales, masters of 12 bits. Every op of fp8_ds gives empty outputs (its fake), and Adam and norms compute nothing, so
that nothing is allocated but what a GPU would hold; Liger's loss is stood for by what it allocates. Tokens and widths
are a sixteenth, so bytes a 256th, and are shown times 256.

`fp8-ds estimate --compile` counts the same run at its full size without a kernel or an engine (12.74 GiB, where 12.87
were measured). This one has real kernels of inductor's and a real engine, and names what is there at the peak.

Left out: what the step begins with (weights and states: `fp8-ds estimate`), and what lives inside of one kernel. Values
mean nothing. Checked against an H200 on 2026-11-23: 5,253 MiB there with the final norm in eager (13.04 GiB, 7.91 of
them before the step, 43 MiB of buckets in it), 5,256 here (8 of buckets).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from ranks import run_on_ranks
from results_io import dated_stem, heading

DIVISOR = 16
TOKENS, WIDTH, FEATURES, VOCABULARY, LAYERS = 8192 // DIVISOR, 4096 // DIVISOR, 14336 // DIVISOR, 32000 // DIVISOR, 8
MIB = DIVISOR**2 / 2**20
"""A byte here, in MiB of the model."""
CASES = {"the final norm in eager": False, "the final norm compiled": True}


def compute_nothing() -> None:
    """Ops of fp8_ds give what their fakes do, its Adam and norms nothing. To be called before any op is imported."""
    from fp8_ds.ops import _register

    stock = _register.register
    _register.register = lambda schema, kernel, fake: stock(schema, fake, fake)
    from fp8_ds.ops.adamw import reference

    reference.adamw_step = lambda shards, grads, inputs: None
    torch._foreach_norm = lambda tensors, *args, **kwargs: [torch.zeros(()) for _ in tensors]  # type: ignore[assignment]


def _engine(num_layers: int, compiles_norm: bool) -> Any:
    import deepspeed
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    import fp8_ds  # noqa: F401
    from fp8_ds.liger_stand_in import LossOfLiger

    AttentionInterface.register("causal", sdpa_attention_forward)
    shape = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=FEATURES, num_hidden_layers=num_layers,
        num_attention_heads=8, num_key_value_heads=2, attn_implementation="causal", use_cache=False,
    )  # fmt: skip

    model = LossOfLiger(LlamaForCausalLM(shape))
    optimizer = {"states": "fp8", "master": "e4m11", "release": True, "release_clipping": "delayed_norm"}
    optimizer["outstanding_update_bytes"] = 1 << 16  # the least that there is
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
        "fp8": {
            "enabled": True,
            "activations": {"fused": True, "nonlinear": "fp8"},
            "linear": {"recipe": "delayed"},
            "optimizer": optimizer,
        },
    }
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    for layer in model.lm.model.layers:
        layer.compile()
    if compiles_norm:
        model.lm.model.norm.compile()
    return engine


def live_at_peak(trace: Path) -> tuple[float, str, list[tuple[float, int, str]]]:
    """Of a profile with memory: (MiB at the peak, what reached it, what is there: MiB each, number, by which operator).

    An operator is named with the one that called it.
    """
    events = json.loads(trace.read_text())["traceEvents"]
    memory = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    ops = [event for event in events if event.get("cat") == "cpu_op"]

    def op_at(time: float) -> str:
        inside = sorted((op["dur"], op["name"]) for op in ops if op["ts"] <= time <= op["ts"] + op["dur"])
        return " < ".join(re.sub(r" f\w{40,}", "", name) for _, name in inside[:2])

    size, peak, last = 0, 0, 0
    for number, event in enumerate(memory):
        size += event["args"]["Bytes"]
        if size > peak:
            peak, last = size, number
    live: dict[int, tuple[int, str]] = {}
    for event in memory[: last + 1]:
        if event["args"]["Bytes"] > 0:
            live[event["args"]["Addr"]] = event["args"]["Bytes"], op_at(event["ts"])
        else:
            live.pop(event["args"]["Addr"], None)
    counts = Counter(live.values())
    rows = [(size * MIB, number, name) for (size, name), number in counts.items()]
    return peak * MIB, op_at(memory[last]["ts"]), sorted(rows, key=lambda row: -row[0] * row[1])


def _measure(device: torch.device, num_layers: int, compiles_norm: bool, trace: Path) -> None:
    os.environ["LOCAL_RANK"] = "0"
    compute_nothing()
    engine = _engine(num_layers, compiles_norm)
    tokens = torch.randint(0, VOCABULARY, (1, TOKENS))

    def step() -> None:
        engine.backward(engine(tokens))
        engine.step()

    step()
    step()  # delayed scales make another graph
    gc.collect()
    gc.disable()
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    profile.export_chrome_trace(str(trace))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    stem = dated_stem(args.out, "peak-on-cpu")
    lines = [f"{args.layers} layers; MiB of Llama 2.0 B, 8192 tokens, without what the step begins with.", ""]
    with tempfile.TemporaryDirectory() as folder:
        for case, compiles_norm in CASES.items():
            trace = Path(folder, "trace.json")
            run_on_ranks(_measure, 1, args.layers, compiles_norm, trace)
            peak, reached, rows = live_at_peak(trace)
            lines += [
                f"**{case}: {peak:,.0f} MiB**, reached in `{reached}`",
                "",
                "| MiB each | number | by |",
                "|---|---|---|",
            ]
            lines += [f"| {mib:.1f} | {number} | `{name}` |" for mib, number, name in rows if mib * number >= 8]
            lines.append("")
    stem.with_suffix(".md").write_text(heading(stem.name) + "\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
