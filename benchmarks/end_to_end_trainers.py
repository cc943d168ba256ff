"""Models and trainers of end_to_end.py: DeepSpeed's engine, and plain torch, torchao or FSDP2."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from end_to_end_arms import BETAS, EPS, LR, WEIGHT_DECAY, Arm, Model
from sdpa import demand_cudnn
from step_profile import MARK
from torch import Tensor, nn
from torch.profiler import record_function


def need(package: str) -> None:
    """Raises: SystemExit: the package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise SystemExit(f"NOT INSTALLED: {package}. This arm needs it.")


# --- models ---


def transformers_model(m: Model, cross_entropy: str, attention: str, chunk_mem_const: int) -> Callable[[], nn.Module]:
    """Makes `model(input_ids, labels).loss`: Hugging Face's, or with Liger's loss fused into the head.

    "stock" hands out the loss alone; "patched" is transformers' own class with Liger's loss by Liger's own option;
    "liger" predicts the same tokens, and its logits are never whole in memory: a chunk's are `chunk_mem_const` times as
    large as the head's input. Attention is "sdpa", as the library has it, or "causal": the same, but never given a
    mask, which compiled graphs of stock DeepSpeed otherwise get (docs/compile.md).
    """
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_outputs import CausalLMOutputWithPast

    AttentionInterface.register("causal", sdpa_attention_forward)

    Config, CausalLM = (LlamaConfig, LlamaForCausalLM) if m.kind == "llama" else (Qwen3Config, Qwen3ForCausalLM)
    config = Config(
        vocab_size=m.vocab,
        hidden_size=m.hidden,
        intermediate_size=m.ffn,
        num_hidden_layers=m.layers,
        num_attention_heads=m.heads,
        num_key_value_heads=m.kv_heads,
        head_dim=m.head_dim,
        max_position_embeddings=m.seq,
        attn_implementation=attention,
        use_cache=False,
        tie_word_embeddings=False,
    )
    if cross_entropy == "stock":

        class LossAlone(CausalLM):  # type: ignore[misc]
            """Hands out no logits, of which a compiled graph would take a gradient of zeros (docs/compile.md)."""

            def forward(self, input_ids: Tensor, labels: Tensor) -> CausalLMOutputWithPast:
                return CausalLMOutputWithPast(loss=super().forward(input_ids=input_ids, labels=labels).loss)

        return lambda: LossAlone(config)

    need("liger_kernel")
    if cross_entropy == "patched":
        return lambda: with_ligers_forward(CausalLM(config))
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    chunks = {"chunk_mem_const": chunk_mem_const} if chunk_mem_const != 1 else {}  # 0.7 has no such argument

    class FusedHead(nn.Linear):
        @torch.compiler.disable
        def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
            device = hidden.device.type
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
            return liger_fused_linear_cross_entropy(hidden.to(dtype), self.weight.to(dtype), targets, **chunks)

    class WithFusedLoss(CausalLM):  # type: ignore[misc,valid-type]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.lm_head.__class__ = FusedHead

        def forward(self, input_ids: Tensor, labels: Tensor) -> CausalLMOutputWithPast:
            hidden = self.model(input_ids=input_ids).last_hidden_state
            targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
            return CausalLMOutputWithPast(loss=self.lm_head(hidden.flatten(0, 1), targets.flatten()))

    return lambda: WithFusedLoss(config)


def with_ligers_forward(model: Any) -> Any:
    """The model, whose forward is Liger's; of its other modules nothing is."""
    from liger_kernel.transformers import monkey_patch

    apply = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type]
    apply(model=model, fused_linear_cross_entropy=True, rope=False, rms_norm=False, swiglu=False)
    return model


def factory(m: Model, cross_entropy: str, attention: str, chunk_mem_const: int = 1) -> Callable[[], nn.Module]:
    """Imports what the model needs (not possible under zero.Init) and returns what makes it.

    Args:
        cross_entropy: see `transformers_model`, as for `chunk_mem_const`.
        attention: see there; "cudnn": as "causal", by cuDNN or not at all, whatever SDPA would pick; "fa3":
            FlashAttention-3 or not at all.
    """
    if attention == "fa3":
        from fp8_ds.attention import require_backend
        from fp8_ds.attention.huggingface import use_backend
        from fp8_ds.host import uses_cuda

        require_backend("fa3", torch.device("cuda" if uses_cuda() else "cpu"))
        made = transformers_model(m, cross_entropy, "causal", chunk_mem_const)

        def with_fa3() -> nn.Module:
            model = made()
            use_backend(model, "fa3", hadamard=False)
            return model

        return with_fa3
    if attention == "cudnn":
        demand_cudnn()
        attention = "causal"
    return transformers_model(m, cross_entropy, attention, chunk_mem_const)


def loss_of_model(arm: Arm, spec: dict[str, Any]) -> str:
    """Which loss the model is made with: Liger's own forward where the fp8 block says how large its chunks are."""
    by_key = "cross_entropy_chunk_mem_const" in (arm.fp8 or {}).get("activations", {})
    return "patched" if by_key else str(spec["cross_entropy"])


def loss_of(module: Callable[..., Any], tokens: Tensor) -> Tensor:
    """Mean cross entropy of the first seq of int64 tokens [batch, seq + 1], of which seq - 1 are predicted."""
    inputs = tokens[:, :-1].contiguous()
    return module(input_ids=inputs, labels=inputs).loss


def factory_of(arm: Arm, m: Model, spec: dict[str, Any]) -> Callable[[], nn.Module]:
    """What makes the arm's model, as the worker's specification has it; with the weights of a file if it names one."""
    attention = "fa3" if arm.fa3 else spec["attention"]
    make = factory(m, loss_of_model(arm, spec), attention, spec["chunk_mem_const"])
    if spec["weights"] is None:
        return make

    def with_weights() -> nn.Module:
        model = make()
        model.load_state_dict(torch.load(spec["weights"], weights_only=True))
        return model

    return with_weights


# --- trainers ---


class Trainer:
    """A step in three parts, which the profiler sees as ranges."""

    model: nn.Module

    def __init__(self, m: Model) -> None:
        self.m = m

    def step(self, tokens: Tensor) -> Tensor:
        with record_function(MARK + "forward"):
            loss = self.forward(tokens)
        with record_function(MARK + "backward"):
            self.backward(loss)
        with record_function(MARK + "update"):
            self.update()
        return loss.detach()

    def forward(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError

    def backward(self, loss: Tensor) -> None:
        raise NotImplementedError

    def update(self) -> None:
        raise NotImplementedError

    def set_lr(self, lr: float) -> None:
        for group in self.param_groups():
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def param_groups(self) -> list[dict[str, Any]]:
        raise NotImplementedError

    def report(self) -> dict[str, Any] | None:
        return None


class EngineTrainer(Trainer):
    """DeepSpeed, stock or ours: the configuration decides."""

    def __init__(self, arm: Arm, m: Model, spec: dict[str, Any], device: torch.device) -> None:
        import deepspeed

        if arm.system == "ours":
            import fp8_ds  # noqa: F401 (installs)

        super().__init__(m)
        config = spec["ds_config"]
        make = factory_of(arm, m, spec)
        if m.stage == 3:
            # The weights are torch's initial ones: Hugging Face's initialisation does not see partitioned tensors.
            with deepspeed.zero.Init(config_dict_or_path=config):
                model = make()
        else:
            with device:
                model = make()
            model = model.to(device, torch.bfloat16)
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        self.model = self.engine.module
        if arm.compiled and arm.releases:
            for layer in self.model.model.layers:  # a graph of the whole model hands over all gradients at its end
                layer.compile()
            self.model.model.norm.compile()  # in eager it holds float32 copies where the step's memory peaks
        elif arm.compiled:
            self.engine.compile(compile_kwargs={"mode": "reduce-overhead"} if arm.cuda_graphs else {})

    def forward(self, tokens: Tensor) -> Tensor:
        return loss_of(self.engine, tokens)

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def update(self) -> None:
        self.engine.step()

    def param_groups(self) -> list[dict[str, Any]]:
        return self.engine.optimizer.param_groups

    def report(self) -> dict[str, Any] | None:
        return self.engine.fp8_report() if hasattr(self.engine, "fp8_report") else None


class PlainTrainer(Trainer):
    """No DeepSpeed. Several GPUs: FSDP2 by decoder layer, bf16 over fp32 shards.

    One GPU: fp32 weights under bf16 autocast and fused AdamW, or bf16 weights and torchao's AdamWFp8 with stochastic
    rounding.
    """

    def __init__(self, arm: Arm, m: Model, spec: dict[str, Any], device: torch.device) -> None:
        super().__init__(m)
        if arm.system == "torchao":
            need("torchao")
        self.clip, self.device, self.num_ranks = spec["clip"], device, dist.get_world_size() if m.gpus > 1 else 1
        self.low_bit = arm.optimizer == "adamwfp8"
        self.autocast = self.num_ranks == 1 and not self.low_bit
        self.gathers_fp8 = self.num_ranks > 1 and arm.recipe == "tensorwise"
        self.model = (self._sharded if self.num_ranks > 1 else self._whole)(arm, spec)
        if self.low_bit:
            from torchao.optim import AdamWFp8

            self.optimizer: Any = AdamWFp8(
                self.model.parameters(), LR, BETAS, EPS, WEIGHT_DECAY, bf16_stochastic_round=True
            )
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), LR, BETAS, EPS, WEIGHT_DECAY, fused=True)

    def _whole(self, arm: Arm, spec: dict[str, Any]) -> nn.Module:
        make = factory_of(arm, self.m, spec)
        with self.device:
            model = make()
        # Through bf16, so that all arms start from the same numbers.
        model = model.to(self.device, torch.bfloat16)
        if not self.low_bit:
            model = model.float()
            # Autocast leaves embeddings alone, and the residual stream would be fp32.
            model.model.embed_tokens.register_forward_hook(lambda module, args, output: output.bfloat16())
        self._convert(model, arm)
        if arm.compiled:
            model.compile()
        return model

    def _sharded(self, arm: Arm, spec: dict[str, Any]) -> nn.Module:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        make = factory_of(arm, self.m, spec)
        with torch.device("meta"):
            model: Any = make()
        self._convert(model, arm)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        layers = model.model.layers
        for number, layer in enumerate(layers):
            if arm.compiled:
                layers[number] = torch.compile(layer)  # FSDP's hooks stay outside of the graph
            fully_shard(layers[number], mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        if arm.compiled and spec["cross_entropy"] == "stock":
            model.loss_function = torch.compile(model.loss_function)
        model.to_empty(device=self.device)
        model.model.rotary_emb = LlamaRotaryEmbedding(model.config).to(self.device)
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(0, 0.02) if p.ndim > 1 else p.fill_(1)
        return model

    def _convert(self, model: nn.Module, arm: Arm) -> None:
        if arm.recipe is None:
            return
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        if self.gathers_fp8:
            config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        else:
            config = Float8LinearConfig.from_recipe_name(arm.recipe)
        if self.device.type == "cpu":
            object.__setattr__(config, "emulate", True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda module, fqn: "lm_head" not in fqn)

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            return loss_of(self.model, tokens)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.gathers_fp8:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(self.model)

    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups
