"""One arm of llama_zero.py: a plain DeepSpeed script around Hugging Face's LlamaForCausalLM.

Nothing in it knows FP8 but the import; the "fp8" block is in the configuration or it is not.
"""

from __future__ import annotations

import argparse
import gc
import json
import sysconfig
import time
from pathlib import Path

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from transformers import LlamaConfig, LlamaForCausalLM

import fp8_ds  # noqa: F401


def byte_stream() -> torch.Tensor:
    """Bytes of the standard library's sources, in sorted order, as uint8."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) + sorted(
        Path(sysconfig.get_path("stdlib")).glob("[a-z]*/*.py")
    )
    text = b"\n".join(path.read_bytes() for path in files if "site-packages" not in str(path))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def dither_masters(model: torch.nn.Module) -> None:
    """Move every fp32 master by up to half a bf16 step, the same in all arms; the bf16 weights stay what they are.

    DeepSpeed makes masters from bf16 weights, so they start exactly on the bf16 grid, and the tiny updates of a
    warm-up do not reach bf16 weights until they add up to half a step. FP8 weights have no such dead zone.
    """
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

    generator = torch.Generator(device=get_accelerator().current_device_name()).manual_seed(5)
    for parameter in model.parameters():
        master = safe_get_full_fp32_param(parameter)
        noise = torch.rand(master.shape, generator=generator, device=master.device) - 0.5
        step = torch.exp2(torch.floor(torch.log2(master.abs().clamp_min(1e-30))) - 7)
        safe_set_full_fp32_param(parameter, master + 0.98 * noise * step)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--dither", type=int, default=0, help="1: start masters off the bf16 grid, see dither_masters")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()

    device = torch.device(get_accelerator().device_name(args.local_rank))
    get_accelerator().set_device(args.local_rank)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=32000,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 7 // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 128,
        num_key_value_heads=max(1, args.hidden // 512),
        max_position_embeddings=args.seq,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with device:
        model = LlamaForCausalLM(shape).to(torch.bfloat16)
    model.train()
    config = json.loads(Path(args.deepspeed_config).read_text())
    micro_batch = config["train_micro_batch_size_per_gpu"]
    get_accelerator().reset_peak_memory_stats()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    del model
    gc.collect()
    if args.dither:
        dither_masters(engine.module)
    init_peak = get_accelerator().max_memory_allocated()
    get_accelerator().reset_peak_memory_stats()

    text, rank, world = byte_stream(), dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(17)
    losses, times = [], []
    for _ in range(args.steps):
        starts = torch.randint(0, text.numel() - args.seq, (world * micro_batch,), generator=generator)
        mine = starts[rank * micro_batch : (rank + 1) * micro_batch]
        tokens = torch.stack([text[s : s + args.seq] for s in mine.tolist()]).long().to(device)
        start = time.perf_counter()
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().float()
        dist.all_reduce(total)
        losses.append(float(total) / world)  # waits for the step
        times.append(time.perf_counter() - start)
    settled = sorted(times[len(times) // 3 :])
    median = settled[len(settled) // 2]
    result = {
        "losses": [round(loss, 5) for loss in losses],
        "step_ms": round(1000 * median, 2),
        "tokens_per_second_per_gpu": round(micro_batch * args.seq / median, 1),
        "init_peak_gib": round(init_peak / 2**30, 3),
        "step_peak_gib": round(get_accelerator().max_memory_allocated() / 2**30, 3),
        "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()),
        "fp8": engine.fp8_report() if hasattr(engine, "fp8_report") else None,
    }
    if rank == 0:
        Path(args.out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
