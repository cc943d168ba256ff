"""Models of another kind than LLAMA's, copies, and DeepSpeed's groups: what works, and what is an error because numbers
would be wrong without a word."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import tensor_parallel as tpar
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.models import MIXER_PLAN as PLAN
from support.ranks import on_ranks
from test_tp_llama import destroy, engine_config, llama, message, to_fp8, whole
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8_ds.errors import ConfigError
from fp8_ds.testing import sqnr_db
from fp8_ds.tp import LLAMA, parallelize

pytestmark = pytest.mark.distributed

WIDTH, HIDDEN, LENGTH = 32, 64, 8


class Mixer(nn.Module):
    """Tokens of a sequence read each other, causally, by features; `turned` calls its linears by other dims first."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned = turned
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        h = self.up(x.transpose(0, 1)).transpose(0, 1) if self.turned else self.up(x)
        h = F.silu(h.cumsum(1) / torch.arange(1, h.shape[1] + 1)[:, None])
        return self.down(h if scale is None else h * scale)


class Layer(nn.Module):
    def __init__(self, turned: bool, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.norm, self.mixer = nn.LayerNorm(WIDTH), Mixer(turned)

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes:
            return x + checkpoint(self.mixer, self.norm(x), use_reentrant=False)
        return x + self.mixer(scale=torch.ones(()), x=self.norm(x))


class Model(nn.Module):
    def __init__(self, turned: bool = False, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(turned, recomputes) for _ in range(2))
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.last(x)).square().mean()


def group() -> Any:
    return tpar.groups(dist.get_world_size()).tp_group


def batch(num: int, length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randn(num, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def trained(fp8: bool, recomputes: bool, shares_norm: bool = False) -> dict[str, float]:
    """SQNR of the loss and all gradients to those of the whole model, both in FP8 if `fp8`."""
    reference, model = Model(recomputes=recomputes), Model(recomputes=recomputes)
    if shares_norm:
        for one in (reference, model):
            one.layers[1].norm.weight = one.layers[0].norm.weight
    tp = parallelize(model, PLAN, group())
    if fp8:
        to_fp8(reference)
        to_fp8(model)
    losses = [one(batch(3)) for one in (reference, model)]
    for loss in losses:
        loss.backward()
    found = {"loss": sqnr_db(losses[0], losses[1])}
    for name, p in reference.named_parameters():
        found[name] = sqnr_db(p.grad, whole(model, name, model.get_parameter(name).grad, tp))
    return found


@pytest.mark.parametrize("recomputes", [False, True])
def test_sequences_of_a_batch_stay_apart_in_a_model_of_ones_own(ranks: Any, recomputes: bool) -> None:
    for found in ranks(2).run(trained, False, recomputes):
        assert min(found.values()) > 85, found


def test_a_parameter_of_two_modules_in_shards_is_summed_once(ranks: Any) -> None:
    for found in ranks(2).run(trained, False, False, True):
        assert min(found.values()) > 85, found


def test_in_fp8_they_do_too(ranks: Any) -> None:
    for found in ranks(2).run(trained, True, False):
        assert found["loss"] > 40 and min(found.values()) > 14, found  # two roundings of everything


@on_ranks(2)
def test_a_block_that_is_computed_again_knows_its_sequences_or_raises() -> None:
    """After forwards of other shapes."""
    model = Model(recomputes=True)
    parallelize(model, PLAN, group())
    loss = model(batch(2))
    for num, length in ((3, LENGTH), (2, 2 * LENGTH)):
        model(batch(num, length))
    loss.backward()
    loss = model(batch(2))
    model(batch(1, 2 * LENGTH))  # as many tokens
    with pytest.raises((ValueError, RuntimeError), match=r"got 16 tokens of \[\(1, 16\), \(2, 8\)\]"):
        loss.backward()


@on_ranks(2)
def test_a_view_with_tokens_in_other_places_is_an_error() -> None:
    model = Model(turned=True)
    parallelize(model, PLAN, group())
    to_fp8(model)
    with pytest.raises(ValueError, match=r"\(2, 8, 32\), got a view \(8, 2, 32\)"):
        model(batch(2))


def partitioned(sequence_parallel: bool) -> tuple[str, list[float]]:
    """(error of the forward, SQNR of gradients to torch's checkpointing) where DeepSpeed's divides activations."""
    from deepspeed.runtime.activation_checkpointing import checkpointing

    gradients = []
    for is_deepspeeds in (False, True):
        model = Model(recomputes=not is_deepspeeds)
        parallelize(model, PLAN, group(), sequence_parallel=sequence_parallel)
        if is_deepspeeds:
            checkpointing.configure(tpar.groups(2), partition_activations=True)
            for layer in model.layers:
                layer.forward = partial(checkpointing.checkpoint, layer.forward)
        try:
            if error := message(lambda model=model: model(batch(2).requires_grad_()).backward()):
                return error, []
        finally:
            checkpointing.PARTITION_ACTIVATIONS, checkpointing.mpu = False, None
        gradients.append([p.grad for p in model.parameters()])
    return "", [sqnr_db(*pair) for pair in zip(*gradients, strict=True)]


def test_deepspeeds_checkpointing_divides_what_all_ranks_have_and_nothing_else(ranks: Any) -> None:
    for error, found in ranks(2).run(partitioned, False):
        assert not error and min(found) > 85, (error, found)
    for error, _ in ranks(2).run(partitioned, True):
        assert "activation_checkpointing.partition_activations: expected false with sequence parallelism" in error


def dropped(where: str, sequence_parallel: bool, seeds_differ: bool) -> tuple[str, list[str]]:
    """(error of two steps, whole parameters that train apart) with dropout on what `where` gives."""
    model = Model()
    model.before = nn.Linear(WIDTH, WIDTH)
    model.register_forward_pre_hook(lambda model, args: (model.before(*args),))
    mixer = model.layers[0].mixer
    places = {"before": model.before, "features": mixer.up, "block": mixer, "last": model.last}
    parallelize(model, PLAN, group(), sequence_parallel=sequence_parallel)
    places[where].register_forward_hook(lambda module, args, output: F.dropout(output, 0.3))
    to_fp8(model.layers)
    torch.manual_seed(dist.get_rank() if seeds_differ else 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps() -> None:
        for step in range(2):
            model(batch(2, seed=step)).backward()
            optimizer.step()

    error, apart = message(steps), []
    for name, p in model.named_parameters():
        if not getattr(p, "tensor_model_parallel", False):
            rows = [torch.empty_like(p) for _ in range(2)]
            dist.all_gather(rows, p.detach().contiguous())
            apart += [] if torch.equal(*rows) else [name]
    return error, apart


@pytest.mark.parametrize(
    ("where", "sequence_parallel", "is_error", "apart"),
    [
        ("before", True, True, []),
        ("before", False, True, []),
        ("features", True, False, []),
        ("block", True, False, []),
        ("block", False, True, None),
        ("last", True, False, ["head.bias", "head.weight"]),
    ],
)
def test_dropout_that_all_ranks_compute_needs_one_seed(
    ranks: Any, where: str, sequence_parallel: bool, is_error: bool, apart: list[str] | None
) -> None:
    """As the table of docs/tensor-parallel.md says; `apart`: what trains apart where seeds differ, if that matters."""
    assert ranks(2).run(dropped, where, sequence_parallel, False) == [("", [])] * 2
    for error, found in ranks(2).run(dropped, where, sequence_parallel, True):
        assert bool(error) == is_error and ("the same seed where" in error or not error), error
        assert apart is None or sorted(found) == apart, found


def wrong_mpu(sharded_over: int, mpu_size: int, stage: int) -> str:
    import deepspeed

    import fp8_ds  # noqa: F401

    model = llama()
    parallelize(model, LLAMA, tpar.groups(sharded_over).tp_group)
    mpu = tpar.groups(mpu_size) if mpu_size else None
    config = engine_config(stage, {}, max(mpu_size, 1))

    def start() -> None:
        engine = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters(), mpu=mpu)[0]
        destroy(engine)

    return message(start)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("sharded_over", "mpu_size", "stage"), [(2, 0, 3), (4, 2, 2)])
def test_groups_that_are_not_those_of_the_model_are_an_error(
    ranks: Any, sharded_over: int, mpu_size: int, stage: int
) -> None:
    for found in ranks(4).run(wrong_mpu, sharded_over, mpu_size, stage):
        assert found.startswith("ConfigError: mpu: "), found


class Adapter(nn.Module):
    """As PEFT's LoRA around a linear."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Linear(base_layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


@on_ranks(2)
def test_what_came_into_a_block_after_it_was_sharded_is_an_error() -> None:
    import deepspeed

    import fp8_ds  # noqa: F401

    model = llama()
    groups = tpar.groups(2)
    parallelize(model, LLAMA, groups.tp_group, sequence_parallel=False)
    mlp = model.model.model.layers[0].mlp
    mlp.down_proj = Adapter(mlp.down_proj)
    with pytest.raises(ConfigError, match=r"down_proj\.down\.weight and 1 more"):
        deepspeed.initialize(model=model, config=engine_config(2, {}, 2), mpu=groups)


@pytest.mark.parametrize("is_sharded", [True, False])
@on_ranks(2)
def test_groups_that_share_sequences_are_an_error_with_sharded_weights(is_sharded: bool) -> None:
    import deepspeed

    import fp8_ds  # noqa: F401

    model = llama()
    config = engine_config(2, {}, 2)
    if is_sharded:
        parallelize(model, LLAMA, tpar.groups(2).tp_group)
    else:
        config["tensor_parallel"] = {"autotp_size": 2}
    with pytest.raises(ConfigError, match="Ulysses"):
        deepspeed.initialize(model=model, config=config, mpu=tpar.sequence_parallel_mpu())


@pytest.mark.parametrize("by_call", [False, True])
@on_ranks(2)
def test_a_sharded_model_is_not_sharded_by_autotp_too(by_call: bool) -> None:
    import deepspeed
    from deepspeed.runtime.tensor_parallel import init_utils

    import fp8_ds  # noqa: F401

    model = llama()
    parallelize(model, LLAMA, tpar.groups(2).tp_group)
    config = engine_config(2, {}, 2)
    if by_call:
        deepspeed.tp_model_init(model, tp_size=2, dtype=torch.bfloat16)
    else:
        config["tensor_parallel"] = {"autotp_size": 2}
    try:
        with pytest.raises(ConfigError, match="tp_model_init: tp_size" if by_call else r"tensor_parallel\.autotp_size"):
            deepspeed.initialize(model=model, config=config, mpu=tpar.groups(2))
    finally:
        init_utils._TP_MODEL_INIT_ARGS = None
        deepspeed.set_autotp_mode(training=False)


def test_the_groups_of_the_model_are_taken(ranks: Any) -> None:
    assert ranks(4).run(wrong_mpu, 2, 2, 2) == [""] * 4
