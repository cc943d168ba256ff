"""A small GPT of megatron.core and a training loop over it on CPU. Runs inside the ranks of a pool."""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

VOCABULARY, LENGTH, MICRO_BATCH, NUM_MICRO = 96, 32, 2, 2
NUM_LAYERS, WIDTH = 2, 64


@dataclass
class Layout:
    """How the model lies over ranks, and what of it is FP8: by settings of ours, or by `fp8` in `config`."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    sp: bool = False
    distributed_optimizer: bool = False
    bf16: bool = False
    recipe: str | None = "tensorwise"
    fp8_format: str = "hybrid"
    settings: dict[str, str] = field(default_factory=dict)
    attention: str | None = None
    overlap: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    tied: bool = False


@contextmanager
def megatron(layout: Layout) -> Iterator[None]:
    """Megatron's groups over the pool's ranks, on CPU; gone afterwards, with gloo's three threads for each."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_patches import patches
    from megatron_patches.cpu import on_cpu
    from megatron_patches.norm import SequenceParallelNorm

    groups: Any = dist.distributed_c10d._world.pg_map
    before = set(groups)
    with on_cpu():
        norm = patches.apply(
            {"megatron.core.transformer.transformer_block.LayerNormImpl": lambda original: SequenceParallelNorm}
        )
        parallel_state.initialize_model_parallel(
            layout.tp, layout.pp, expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=1
        )
        try:
            model_parallel_cuda_manual_seed(1)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            norm.remove()
            for group in set(groups) - before:
                dist.destroy_process_group(group)


@contextmanager
def writers() -> Iterator[None]:
    """The processes that write a checkpoint of Megatron's may start, and no more than these do."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # The pool's ranks may have none, as they are to end with the session.
    config: Any = multiprocessing.current_process()._config
    daemon = config.get("daemon", False)
    config["daemon"] = False
    # Where nothing is saved in the background this process alone reads and writes it. Megatron's is served by a process
    # of its own, which takes five seconds to start and would outlive a rank that is killed.
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        config["daemon"] = daemon
        filesystem_async._results_queue = None


def transformer_config(layout: Layout) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = torch.bfloat16 if layout.bf16 else torch.float32
    values: dict[str, Any] = {
        "num_layers": NUM_LAYERS,
        "hidden_size": WIDTH,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 128,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": layout.sp,
        "use_cpu_initialization": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": layout.bf16,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        **layout.config,
    }
    return TransformerConfig(**values)


def build(layout: Layout) -> Any:
    """The GPTModel of this rank's stage."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    from megatron_patches.attention import AttentionSettings
    from megatron_patches.layer_specs import layer_spec
    from megatron_patches.recipes import settings

    config = transformer_config(layout)
    fp8 = None
    if layout.recipe and not config.fp8:
        fp8 = settings(layout.fp8_format, layout.recipe, **layout.settings)
    attention = AttentionSettings(layout.attention) if layout.attention else None
    spec = layer_spec(config, use_transformer_engine=False, fp8=fp8, attention=attention)
    torch.manual_seed(7)
    return GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=layout.tied,
    )


def batches(num_steps: int) -> Iterator[Tensor]:
    """Micro-batches of this data-parallel rank, [MICRO_BATCH, LENGTH + 1]: a sequence that can be learnt."""
    from megatron.core import parallel_state

    rank = parallel_state.get_data_parallel_rank()
    size = parallel_state.get_data_parallel_world_size()
    generator = torch.Generator().manual_seed(3)
    for _ in range(num_steps * NUM_MICRO // size * size):
        start = torch.randint(0, VOCABULARY, (size, MICRO_BATCH, 1), generator=generator)
        stride = torch.randint(1, 5, (size, MICRO_BATCH, 1), generator=generator)
        yield ((start + stride * torch.arange(LENGTH + 1)) % VOCABULARY)[rank]


def _loss(output: Tensor) -> Any:
    loss = output.float().mean()
    return loss, {"lm loss": loss.detach().clone()}


def forward_step(data: Iterator[Tensor], model: Any) -> Any:
    tokens = next(data)
    positions = torch.arange(LENGTH)[None].expand(MICRO_BATCH, -1)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
    return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]), _loss


class Training:
    """Model, DDP and Megatron's optimizer; `step` is one iteration of `megatron.training`."""

    def __init__(self, layout: Layout, lr: float = 3e-3, **optimizer: Any) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        module = build(layout)
        self.config = module.config
        ddp_values: dict[str, Any] = {
            "grad_reduce_in_fp32": True,
            "use_distributed_optimizer": layout.distributed_optimizer,
            "overlap_grad_reduce": layout.overlap,
            "overlap_param_gather": layout.overlap and layout.distributed_optimizer,
            **layout.ddp,
        }
        ddp = DistributedDataParallelConfig(**ddp_values)
        self.module = module.bfloat16() if layout.bf16 else module
        if layout.bf16:
            from megatron.core.transformer.module import Float16Module

            self.module = Float16Module(self.config, module)
        self.model = DistributedDataParallel(self.config, ddp, self.module)
        self.config.finalize_model_grads_func = partial(finalize_model_grads)
        self.config.grad_scale_func = None
        values: dict[str, Any] = {
            "optimizer": "adam",
            "lr": lr,
            "min_lr": lr,
            "weight_decay": 0.1,
            "clip_grad": 1.0,
            "bf16": layout.bf16,
            "params_dtype": self.config.params_dtype,
            "use_distributed_optimizer": layout.distributed_optimizer,
            **optimizer,
        }
        self.optimizer = get_megatron_optimizer(OptimizerConfig(**values), [self.model])

    def step(self, data: Iterator[Tensor]) -> float | None:
        """The mean loss, on the last stage."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self._micro_batches(data, forward_only=False)
        successful, self.grad_norm, _ = self.optimizer.step()
        assert successful
        return sum(float(one["lm loss"]) for one in losses) / len(losses) if losses else None

    @torch.no_grad()
    def evaluate(self, data: Iterator[Tensor]) -> None:
        """As megatron.training's `evaluate`."""
        self.model.eval()
        self._micro_batches(data, forward_only=True)
        self.model.train()

    def _micro_batches(self, data: Iterator[Tensor], forward_only: bool) -> Any:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data,
            model=[self.model],
            num_microbatches=NUM_MICRO,
            seq_length=LENGTH,
            micro_batch_size=MICRO_BATCH,
            forward_only=forward_only,
        )


def train(layout: Layout, num_steps: int = 6, **kwargs: Any) -> dict[str, Any]:
    """Losses (averaged over data parallelism), gradient norms, and what the layers say they are."""
    from megatron.core import parallel_state

    with megatron(layout):
        training = Training(layout, **kwargs)
        data = batches(num_steps)
        losses, norms = [], []
        for _ in range(num_steps):
            loss = training.step(data)
            norms.append(float(training.grad_norm))
            if loss is not None:
                total = torch.tensor(loss)
                torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
                losses.append(float(total) / parallel_state.get_data_parallel_world_size())
        return {"losses": losses, "norms": norms, "text": repr(training.module)}
