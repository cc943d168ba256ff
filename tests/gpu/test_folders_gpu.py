"""FP8 folders on GPUs: an engine saves the bytes that it computes with, and what transformers loads of one trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import training
from safetensors.torch import load_file
from support import fp8_folders
from support.models import Llama
from torch import Tensor

from fp8_ds.checkpoint import iter_fp8_tensors
from fp8_ds.nn.linear.payload import per_element

pytest.importorskip("transformers")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "max_position_embeddings": 64}
SPLIT = {"optimizer": {"states": "fp8", "master": "e4m19"}}
FP8 = torch.float8_e4m3fn


def steps(engine: Any, num: int) -> list[float]:
    """Losses of `num` steps on one batch."""
    tokens = fp8_folders.batch()["input_ids"].to(engine.device)
    losses = []
    for _ in range(num):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def export(folder: str, stage: int, fp8: dict[str, Any], is_compiled: bool) -> None:
    torch.manual_seed(0)
    engine = training.start(Llama(**SIZES).model, training.ds_config(stage, fp8))
    if is_compiled:
        engine.compile()
    losses = steps(engine, 2)
    trained = training.fp8_state(engine)
    engine.save_fp8_pretrained(f"{folder}/out")
    saved = load_file(f"{folder}/out/model.safetensors")
    for name, (codes, scale_inv) in trained.items():
        assert torch.equal(saved[name].view(torch.uint8), codes), name
        scales = [saved[key] for key in saved if key.startswith(f"{name}_scale")]
        values = codes.view(FP8).float()
        assert torch.equal(values * per_element(scales[0], codes.shape), values * per_element(scale_inv, codes.shape))
    yielded = dict(iter_fp8_tensors(engine))
    assert yielded.keys() == saved.keys() and all(tensor.is_cuda for tensor in yielded.values())
    for name, tensor in yielded.items():
        assert torch.equal(tensor.cpu().view(torch.uint8), saved[name].view(torch.uint8)), name
    losses += steps(engine, 2)
    assert losses == sorted(losses, reverse=True)
    training.destroy(engine)


@pytest.mark.parametrize(
    ("world_size", "stage", "fp8", "is_compiled"),
    [
        (1, 3, SPLIT, True),
        (1, 2, {"linear": {"recipe": "rowwise"}}, False),
        (1, 1, {"linear": {"recipe": "blockwise"}}, False),
        (2, 3, {"linear": {"recipe": "delayed"}}, False),
    ],
    ids=str,
)
def test_a_folder_and_what_goes_to_a_server_have_the_bytes_of_training(
    gpu_ranks: Any, tmp_path: Any, world_size: int, stage: int, fp8: dict[str, Any], is_compiled: bool
) -> None:
    gpu_ranks(world_size).run(export, str(tmp_path), stage, fp8, is_compiled)


def train_all(folder: str, stage: int, fp8: dict[str, Any]) -> None:
    expected = fp8_folders.values(folder)
    engine = training.start(fp8_folders.load(folder), training.ds_config(stage, fp8))
    masters = training.full_masters(engine)
    for name, value in expected.items():
        assert torch.equal(masters[name], value), name
    losses = steps(engine, 6)
    assert losses[-1] < losses[0]
    training.destroy(engine)


@pytest.mark.parametrize(
    ("world_size", "stage", "kind", "fp8"), [(1, 3, "blocks", SPLIT), (1, 2, "rows", {}), (2, 3, "blocks", {})], ids=str
)
def test_masters_are_codes_times_scales_and_train(
    gpu_ranks: Any, tmp_path: Any, world_size: int, stage: int, kind: str, fp8: dict[str, Any]
) -> None:
    fp8_folders.write(str(tmp_path), kind, fp8_folders.WHOLE, power_of_two=bool(fp8))
    gpu_ranks(world_size).run(train_all, str(tmp_path), stage, fp8)


def train_around_frozen(folder: str, stage: int, is_compiled: bool) -> None:
    """The MLPs are frozen: they keep bytes and scales, and multiply by them whatever the recipe of the rest."""
    expected = fp8_folders.codes_and_scales(folder)
    weight = fp8_folders.values(folder)["model.layers.0.mlp.up_proj.weight"].cuda()
    model = fp8_folders.load(folder)
    for name, p in model.named_parameters():
        p.requires_grad_(".mlp." not in name and "scale" not in name)
    engine = training.start(model, training.ds_config(stage, {"linear": {"frozen": "fp8", "recipe": "tensorwise"}}))
    layer = engine.module.model.layers[0].mlp.up_proj
    x = torch.randint(-7, 8, (64, weight.shape[1]), device="cuda").bfloat16()
    x[:, 0::128] = 7  # the largest of each row and block: by a power of two integers are exact in FP8
    y, exact = layer(x), x.float() @ weight.t()
    assert (y.float() - exact).norm() <= 2**-5 * exact.norm()
    if is_compiled:
        engine.compile()
    losses = steps(engine, 6)
    assert losses[-1] < losses[0]
    found = training.fp8_state(engine)
    assert found.keys() == expected.keys()
    for name in (name for name in expected if ".mlp." in name):
        assert torch.equal(found[name][0], expected[name][0]) and torch.equal(found[name][1], expected[name][1]), name
    training.destroy(engine)


@pytest.mark.parametrize(
    ("stage", "kind", "is_compiled"), [(3, "blocks", True), (2, "rows", True), (2, "blocks", False), (3, "rows", False)]
)
def test_frozen_layers_keep_and_multiply_by_the_folders_own_bytes(
    gpu_ranks: Any, tmp_path: Any, stage: int, kind: str, is_compiled: bool
) -> None:
    fp8_folders.write(str(tmp_path), kind, fp8_folders.WHOLE)
    gpu_ranks(1).run(train_around_frozen, str(tmp_path), stage, is_compiled)


def multiply(layer: Any, gate_up: Tensor, down: Tensor) -> None:
    """Against float32."""
    numbers = torch.arange(3 * len(down), device="cuda") % (len(down) - 1)  # 3 or 4 tokens each; the last has none
    x = torch.randn(len(numbers), down.shape[1], device="cuda").bfloat16().requires_grad_()
    y = layer(x, numbers[:, None], torch.ones(len(numbers), 1, device="cuda").bfloat16())
    y.float().sum().backward()
    own = x.detach().float().requires_grad_()
    gate, up = (gate_up[numbers] @ own[:, :, None]).chunk(2, dim=1)
    exact_y = (down[numbers] @ (F.silu(gate) * up))[:, :, 0]
    exact_y.sum().backward()
    assert x.grad is not None and own.grad is not None
    for found, other in ((y, exact_y), (x.grad, own.grad)):
        assert ((found.detach().float() - other).norm(dim=1) / other.norm(dim=1)).max() <= 0.15


def train_around_frozen_experts(folder: str, stage: int, is_compiled: bool) -> None:
    """More than would train in a loop: they keep bytes and scales, and multiply by them one after another."""
    expected, exact = fp8_folders.stored_in_model(folder), fp8_folders.values(folder)
    names = [name for name in expected if ".experts." in name]
    model = fp8_folders.load(folder)
    for name, p in model.named_parameters():
        p.requires_grad_(".experts." not in name and "scale" not in name)
    engine = training.start(model, training.ds_config(stage, {"linear": {"frozen": "fp8", "recipe": "tensorwise"}}))
    if stage < 3:
        multiply(
            engine.module.model.layers[0].mlp.experts, *(exact[name].cuda() for name in sorted(names, reverse=True))
        )
    if is_compiled:
        engine.compile()
    losses = steps(engine, 6)
    assert losses[-1] < losses[0]
    state = training.fp8_state(engine)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine.save_checkpoint(f"{folder}/ckpt")  # in stages 1 and 2 with one stack at a time in bf16 on the GPU
    assert stage == 3 or torch.cuda.max_memory_allocated() - before < 2 * sum(exact[name].numel() for name in names)
    assert len(names) == 2 and set(names) < state.keys()
    for name in names:
        assert torch.equal(state[name][0], expected[name][0]) and torch.equal(state[name][1], expected[name][1]), name
    training.destroy(engine)


@pytest.mark.parametrize(("world_size", "stage", "is_compiled"), [(1, 2, False), (1, 3, True), (2, 3, False)])
def test_frozen_experts_keep_and_multiply_by_the_folders_own_bytes(
    gpu_ranks: Any, tmp_path: Any, world_size: int, stage: int, is_compiled: bool
) -> None:
    sizes = fp8_folders.EXPERTS["Qwen3Moe"] | {"num_experts": 20, "hidden_size": 256, "moe_intermediate_size": 256}
    fp8_folders.write(str(tmp_path), "blocks", sizes, "Qwen3Moe")
    gpu_ranks(world_size).run(train_around_frozen_experts, str(tmp_path), stage, is_compiled)
