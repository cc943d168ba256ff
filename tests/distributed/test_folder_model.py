"""Models from FP8 folders train from what is served: masters are codes times scales, frozen layers keep both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import training
from support import fp8_folders
from support.fp8_folders import RAGGED, WHOLE, batch, codes_and_scales, load, values
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8_ds.errors import ConfigError, UnsupportedError

pytest.importorskip("transformers")
pytestmark = pytest.mark.distributed

SPLIT = {"optimizer": {"states": "fp8"}}
FROZEN = {"linear": {"frozen": "fp8", "filter_fqns": ["lm_head", "lora_"]}}


def steps(engine: Any, num: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + num):
        loss = engine(**batch(step)).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def start(
    folder: str,
    stage: int,
    fp8: dict[str, Any],
    lora: bool = False,
    load_as: Any = load,
    lora_on: tuple[str, ...] = ("q_proj", "down_proj"),
) -> Any:
    """An engine whose optimizer is given all Parameters of the model, those of scales as well, some as a group.

    In stage 3 blocks are loaded as by Trainer, where transformers makes a model that is not quantised in `zero.Init`.
    """
    from transformers.integrations import HfDeepSpeedConfig

    config = training.ds_config(stage, fp8)
    told = HfDeepSpeedConfig(config) if stage == 3 and fp8_folders.is_quantized(folder) else None
    model = load_as(folder)
    del told  # it counts as long as it lives
    if lora:
        import peft

        torch.manual_seed(0)
        wanted = peft.LoraConfig(r=4, target_modules=list(lora_on), init_lora_weights=False)
        model = peft.get_peft_model(model, wanted)
    scales = [p for name, p in model.named_parameters() if "scale" in name]
    first = [p for name, p in model.named_parameters() if "scale" not in name] + scales[:1]
    groups = [{"params": group} for group in (first, scales[1:]) if group]
    return training.start(model, config, model_parameters=groups)


def train_all(folder: str, stage: int, fp8: dict[str, Any], in_bf16: tuple[str, ...] = ()) -> None:
    """`in_bf16`: endings of names of weights that are in bf16."""
    expected = values(folder)
    engine = start(folder, stage, fp8)
    first = training.full_masters(engine)
    assert expected.keys() < first.keys() and not any("scale" in name for name in first)
    for name, value in expected.items():
        assert torch.equal(first[name], value), name
    assert engine.fp8.weights.keys() == {name for name in expected if not name.endswith(in_bf16)}
    assert not engine.module.is_quantized and not hasattr(engine.module.config, "quantization_config")
    assert not hasattr(engine.module, "hf_quantizer")
    losses = steps(engine, 2)
    trained = training.full_masters(engine)
    assert all(not torch.equal(trained[name], first[name]) for name in expected)
    engine.save_checkpoint(f"{folder}/ckpt")
    losses += steps(engine, 1, 2)
    training.destroy(engine)
    engine = start(folder, stage, fp8)
    engine.load_checkpoint(f"{folder}/ckpt")
    resumed = training.full_masters(engine)
    assert all(torch.equal(resumed[name], trained[name]) for name in trained)
    assert steps(engine, 1, 2) == losses[2:]
    training.destroy(engine)


@pytest.mark.parametrize(
    ("stage", "num_ranks", "kind", "family"),
    [
        (1, 2, "blocks", "Llama"),
        (2, 2, "rows", "Llama"),
        (3, 2, "blocks", "Qwen3"),
        (3, 1, "rows", "Llama"),
        pytest.param(1, 1, "rows", "Qwen3", marks=pytest.mark.slow),
        pytest.param(1, 2, "rows", "Llama", marks=pytest.mark.slow),
        pytest.param(2, 1, "blocks", "Llama", marks=pytest.mark.slow),
        pytest.param(2, 2, "blocks", "Qwen3", marks=pytest.mark.slow),
        pytest.param(3, 2, "rows", "Llama", marks=pytest.mark.slow),
        pytest.param(3, 4, "blocks", "Llama", marks=pytest.mark.slow),
    ],
)
def test_masters_are_codes_times_scales_and_train(
    ranks: Any, tmp_path: Any, stage: int, num_ranks: int, kind: str, family: str
) -> None:
    """Blocks are cut at the edges, and shards end within them; bf16 would round the products."""
    fp8_folders.write(str(tmp_path), kind, RAGGED, family)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in values(str(tmp_path)).values())
    ranks(num_ranks).run(train_all, str(tmp_path), stage, {})


@pytest.mark.parametrize(
    ("stage", "kind", "master"),
    [(2, "blocks", "e4m19"), (3, "rows", "e4m11"), pytest.param(1, "rows", "e4m19", marks=pytest.mark.slow)],
)
def test_split_masters_are_so_with_powers_of_two(ranks: Any, tmp_path: Any, stage: int, kind: str, master: str) -> None:
    fp8_folders.write(str(tmp_path), kind, RAGGED, power_of_two=True)
    ranks(2).run(train_all, str(tmp_path), stage, {"optimizer": {"states": "fp8", "master": master}})


def is_refused(folder: str, stage: int, fp8: dict[str, Any], said: str, scale: float = 1.0) -> None:
    """With the first scale of a weight multiplied by `scale`."""

    def load_scaled(folder: str) -> Any:
        model = load(folder)
        model.model.layers[0].mlp.up_proj.weight_scale_inv.data.view(-1)[0] *= scale
        return model

    with pytest.raises((ConfigError, UnsupportedError), match=said):
        start(folder, stage, fp8, load_as=load_scaled)


def test_split_masters_that_would_be_rounded_are_refused(ranks: Any, tmp_path: Any) -> None:
    fp8_folders.write(str(tmp_path / "any"), "blocks", RAGGED)
    ranks(1).run(is_refused, str(tmp_path / "any"), 2, SPLIT, r'no powers of two.*"states": "fp32"')
    fp8_folders.write(str(tmp_path / "two"), "blocks", RAGGED, power_of_two=True)
    for stage in (2, 3):
        said = r'optimizer\.master.*(up_proj|other ranks).*"states": "fp32"'
        ranks(2).run(is_refused, str(tmp_path / "two"), stage, SPLIT, said, 2.0**-22)


def test_a_scale_that_is_none_is_refused(ranks: Any, tmp_path: Any) -> None:
    fp8_folders.write(str(tmp_path), "blocks", RAGGED)
    for scale in (float("nan"), -1.0, float("inf")):
        ranks(1).run(is_refused, str(tmp_path), 2, {}, "expected scales of 0 or from .*up_proj", scale)


def losses_of_both(folder: str, fp8: dict[str, Any]) -> tuple[float, float]:
    import transformers

    def dequantized(folder: str) -> Any:
        read = transformers.FineGrainedFP8Config(dequantize=True)
        return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=read, dtype=torch.bfloat16)

    found = []
    for load_as in (load, dequantized):
        engine = start(folder, 2, fp8, load_as=load_as)
        found.append(float(engine(**batch()).loss))
        training.destroy(engine)
    return found[0], found[1]


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_the_first_loss_is_that_of_the_model_transformers_dequantizes(ranks: Any, tmp_path: Any, recipe: str) -> None:
    for name, power_of_two, bound in (("two", True, 0.0), ("any", False, 0.01)):
        fp8_folders.write(str(tmp_path / name), "blocks", WHOLE, "Qwen3", power_of_two)
        own, theirs = ranks(1).run(losses_of_both, str(tmp_path / name), {"linear": {"recipe": recipe}})[0]
        assert abs(own - theirs) <= bound, (name, own, theirs)


class NoCopies(TorchDispatchMode):
    """Raises where a tensor of 16 or more bits has a weight's size; custom ops, such as FP8 products, are not seen."""

    def __init__(self, sizes: set[int]) -> None:
        super().__init__()
        self.sizes = sizes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            is_wide = isinstance(x, Tensor) and x.is_floating_point() and x.element_size() > 1
            if is_wide and x.device.type != "meta" and x.untyped_storage().nbytes() >= x.element_size() * x.numel():
                assert x.numel() not in self.sizes, f"{func} made {x.dtype} {list(x.shape)}"
        return result


@contextmanager
def no_copies(of: dict[str, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Guard the weights of MLPs, whose size no activation has."""
    with NoCopies({codes.numel() for name, (codes, _) in of.items() if ".mlp." in name}):
        yield


def plain(name: str) -> str:
    return name.replace("base_model.model.", "").replace(".base_layer", "")


def train_adapters(folder: str, stage: int, fp8: dict[str, Any], kind: str) -> list[float]:
    expected = codes_and_scales(folder)
    with no_copies(expected):
        engine = start(folder, stage, fp8, lora=True)
        losses = steps(engine, 2)
    found = {plain(name): state for name, state in training.fp8_state(engine).items()}
    training.assert_fp8_equals(found, expected)
    recipe = {"blocks": "blockwise", "rows": "rowwise"}[kind]
    layers = engine.module.base_model.model.model.layers
    assert layers[0].mlp.up_proj.fp8_recipe.name == layers[0].self_attn.q_proj.base_layer.fp8_recipe.name == recipe
    assert engine.fp8_report()["num_fp8_weights"] == sum(codes.numel() for codes, _ in expected.values())
    engine.save_checkpoint(f"{folder}/ckpt")
    losses += steps(engine, 1, 2)
    training.destroy(engine)
    engine = start(folder, stage, fp8, lora=True)
    engine.load_checkpoint(f"{folder}/ckpt")
    training.assert_fp8_equals({plain(n): state for n, state in training.fp8_state(engine).items()}, expected)
    assert steps(engine, 1, 2) == losses[2:]
    written(engine, expected)
    training.destroy(engine)
    return losses


def written(engine: Any, expected: dict[str, tuple[Tensor, Tensor]]) -> None:
    """A write of what was read changes no byte, another one is read in FP8."""
    import deepspeed

    p = next(p for name, p in engine.module.named_parameters() if "up_proj" in name)
    for factor in (1.0, 2.0):
        with deepspeed.zero.GatheredParameters([p], modifier_rank=0), torch.no_grad():
            before = p.data.clone()
            if torch.distributed.get_rank() == 0 or not hasattr(p, "ds_id"):
                p.copy_(before * factor)
        after, scale = next(s for name, s in training.fp8_state(engine).items() if "up_proj" in name)
        codes, own = next(s for name, s in expected.items() if "up_proj" in name)
        assert (torch.equal(after, codes) and torch.equal(scale, own)) == (factor == 1.0)
        with deepspeed.zero.GatheredParameters([p]):
            assert ((p.data - before * factor).abs() <= (before * factor).abs() / 16 + 1e-4).all()


@pytest.mark.parametrize(
    ("stage", "num_ranks", "kind", "fp8"),
    [
        (2, 2, "blocks", {}),
        (3, 2, "rows", SPLIT),
        (3, 1, "blocks", {}),
        pytest.param(1, 2, "rows", {"linear": {"recipe": "delayed"}}, marks=pytest.mark.slow),
        pytest.param(3, 2, "blocks", {"linear": {"recipe": "rowwise"}}, marks=pytest.mark.slow),
        pytest.param(2, 1, "rows", SPLIT, marks=pytest.mark.slow),
    ],
)
def test_frozen_layers_under_adapters_keep_bytes_and_scales(
    ranks: Any, tmp_path: Any, stage: int, num_ranks: int, kind: str, fp8: dict[str, Any]
) -> None:
    """No bf16 of a weight is made from `deepspeed.initialize` to the last step; a resume and a write of the same values
    leave the bytes as they are."""
    pytest.importorskip("peft")
    fp8_folders.write(str(tmp_path), kind, RAGGED)
    fp8 = {**fp8, "linear": FROZEN["linear"] | fp8.get("linear", {})}
    ranks(num_ranks).run(train_adapters, str(tmp_path), stage, fp8, kind)


def save_in_fp8_load_in_bf16(folder: str, stage: int) -> None:
    """What is frozen has bf16 of the folder's bytes, and adapters go on."""
    fp8 = {"linear": {**FROZEN["linear"], "recipe": "tensorwise"}}
    engine = start(folder, stage, fp8, lora=True)
    steps(engine, 1)
    engine.save_checkpoint(f"{folder}/ckpt")
    adapters = {name: master for name, master in training.full_masters(engine).items() if "lora_" in name}
    training.destroy(engine)
    fp8["linear"]["filter_fqns"] = [*FROZEN["linear"]["filter_fqns"], "up_proj"]
    engine = start(folder, stage, fp8, lora=True)
    engine.load_checkpoint(f"{folder}/ckpt")
    loaded = training.full_masters(engine)
    assert adapters and all(torch.equal(loaded[name], master) for name, master in adapters.items())
    import deepspeed

    p = next(p for name, p in engine.module.named_parameters() if "up_proj" in name)
    expected = next(value for name, value in values(folder).items() if "up_proj" in name)
    with deepspeed.zero.GatheredParameters([p]):
        assert not hasattr(p, "_fp8") and torch.equal(p.data, expected.bfloat16())
    steps(engine, 1, 1)
    training.destroy(engine)


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_frozen_layers_that_are_in_bf16_now_load_what_was_saved_in_fp8(ranks: Any, tmp_path: Any, stage: int) -> None:
    pytest.importorskip("peft")
    fp8_folders.write(str(tmp_path), "blocks", RAGGED)
    ranks(1).run(save_in_fp8_load_in_bf16, str(tmp_path), stage)


def compute(folder: str, stage: int, kind: str) -> None:
    engine = start(folder, stage, {"linear": {**FROZEN["linear"], "recipe": "tensorwise"}}, lora=True)
    weight = values(folder)["model.layers.0.mlp.up_proj.weight"]
    layer = engine.module.base_model.model.model.layers[0].mlp.up_proj
    x = torch.randint(-7, 8, (32, weight.shape[1]), generator=torch.Generator().manual_seed(0)).bfloat16()
    x[:, 0::128] = 7  # the largest of each row and block: by a power of two integers are exact in FP8
    x.requires_grad_()
    y = layer(x)
    expected = x.detach().float() @ weight.t()
    assert (y.float() - expected).norm() <= 2**-8 * expected.norm() * (1 if kind == "blocks" else 8)
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    expected = torch.ones_like(y).float() @ weight
    assert (x.grad.float() - expected).norm() <= (2**-8 if kind == "blocks" else 2**-4) * expected.norm()
    training.destroy(engine)


@pytest.mark.parametrize("kind", ["blocks", "rows"])
def test_frozen_layers_multiply_by_the_folders_own_scales(ranks: Any, tmp_path: Any, kind: str) -> None:
    pytest.importorskip("peft")
    fp8_folders.write(str(tmp_path), kind, RAGGED)
    ranks(1).run(compute, str(tmp_path), 2, kind)


def copies_are_found(folder: str) -> None:
    with (
        pytest.raises(AssertionError, match=r"made torch\.(bfloat16|float32) \[300, 128\]"),
        no_copies(codes_and_scales(folder)),
    ):
        start(folder, 2, {"linear": {"filter_fqns": ["lm_head", "lora_"]}, "optimizer": {"states": "fp8"}}, lora=True)


def test_frozen_weights_in_bf16_are_found_by_the_guard_of_these_tests(ranks: Any, tmp_path: Any) -> None:
    pytest.importorskip("peft")
    fp8_folders.write(str(tmp_path), "blocks", RAGGED)
    ranks(1).run(copies_are_found, str(tmp_path))
