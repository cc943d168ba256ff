"""FP8 weights as high parts of their masters under the distributed optimizer.

Transformer Engine's Float8Tensor needs a GPU: here is a stand-in with what Megatron and we use of it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron_training as mt
import pytest
import test_megatron_optimizer as base
import torch
from support.ranks import on_ranks
from torch import Tensor, nn
from torch.utils._pytree import tree_map

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
from fp8_ds.numerics.predicted import pow2_scale_inv

pytestmark = pytest.mark.distributed


class Quantizer:
    def set_usage(self, **usages: bool) -> None:
        """Nothing asks for them here."""


class StandIn(torch.Tensor):
    """Nominally bf16; holds uint8 `_data` and float32 `_scale_inv` [1]. Whatever computes with it gets its value."""

    _data: Tensor
    _scale_inv: Tensor
    _initial: Tensor | None
    _transpose: Tensor | None = None

    @staticmethod
    def __new__(cls, data: Tensor, scale_inv: Tensor, initial: Tensor | None) -> StandIn:
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.bfloat16, device=data.device)
        made._data, made._scale_inv, made._initial = data, scale_inv, initial
        made._quantizer = Quantizer()
        return made

    def update_usage(self, columnwise_usage: bool | None = None) -> None:
        assert columnwise_usage is False, "nobody here reads transposes"
        self._transpose = None

    @classmethod
    def quantize(cls, value: Tensor) -> StandIn:
        scale_inv = (value.abs().max().float() / 448).reshape(1)  # not a power of two, as TE's current scaling
        data = (value.float() / scale_inv).to(torch.float8_e4m3fn).view(torch.uint8)
        return cls(data, scale_inv, value.detach().clone())

    def dequantize(self) -> Tensor:
        return (self._data.view(torch.float8_e4m3fn).float() * self._scale_inv).bfloat16()

    def get_high_precision_init_val(self) -> Tensor | None:
        return self._initial

    def clear_high_precision_init_val(self) -> None:
        self._initial = None

    def _reset_caches(self) -> None:
        self.num_resets = getattr(self, "num_resets", 0) + 1

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0]._data, args[0]._scale_inv, args[0]._initial)
        if func is torch.ops.aten.copy_.default:
            made = cls.quantize(args[1].dequantize() if isinstance(args[1], cls) else args[1])
            args[0]._data.copy_(made._data)
            args[0]._scale_inv.copy_(made._scale_inv)
            return args[0]
        args, kwargs = tree_map(lambda x: x.dequantize() if isinstance(x, cls) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


def build(layout: mt.Layout, make: Callable[[Tensor], nn.Parameter]) -> nn.Module:
    """mt.build's model; the weights of its layers are FP8: what `make` makes of those drawn."""
    module: nn.Module = stock_build(layout).bfloat16()
    for name, layer in module.named_modules():
        if "linear" in name and getattr(layer, "weight", None) is not None and layer.weight.dim() == 2:
            attributes = {k: v for k, v in vars(layer.weight).items() if not k.startswith("_")}
            layer.weight = make(layer.weight.detach())
            for key, value in attributes.items():
                setattr(layer.weight, key, value)
    return module


stock_build = mt.build


def move(tensor: StandIn, data: Tensor) -> None:
    """Transformer Engine's `replace_raw_data`."""
    data.copy_(tensor._data)
    tensor._data = data


def one_by_one(group: Any, **kwargs: Any) -> Any:
    """In the place of torch's _coalescing_manager: gloo coalesces tensors of two dtypes into wrong values."""
    return nullcontext()


STAND_IN = SimpleNamespace(
    make=lambda drawn: nn.Parameter(StandIn.quantize(drawn)),
    tensor=StandIn,
    replace_raw_data=move,
    post_all_gather_processing=None,
)


@contextmanager
def run(layout: mt.Layout, master: str | None, engine: Any = STAND_IN, **states: Any) -> Iterator[mt.Training]:
    """As `base.run`, with a Transformer Engine that knows of FP8 tensors and nothing else.

    Args:
        engine: `STAND_IN`, or what transformer_engine_python.py gives.
    """
    from megatron.core import fp8_utils
    from megatron.core.distributed import param_and_grad_buffer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(param_and_grad_buffer, "_coalescing_manager", one_by_one)
        patch.setattr(fp8_utils, "HAVE_TE_FP8_TENSOR_CLASS", True)
        patch.setattr(fp8_utils, "FP8_TENSOR_CLASS", engine.tensor)
        patch.setattr(fp8_utils, "_modify_underlying_storage_impl", engine.replace_raw_data)
        patch.setattr(fp8_utils, "te_post_all_gather_processing", engine.post_all_gather_processing)
        patch.setattr(fp8_utils, "dequantize_fp8_tensor", lambda tensor: tensor.dequantize())
        patch.setattr(mt, "build", lambda layout: build(layout, engine.make))
        with base.run(layout, master, states, fp8_recipe="tensorwise") as training:
            yield training


def fp8_weights(training: mt.Training) -> dict[str, Any]:
    return {name: p for name, p in training.module.named_parameters() if isinstance(p, StandIn)}


def assert_bytes_follow_masters(training: mt.Training, master: str) -> None:
    """On every rank each weight is its master rounded to nearest, by one power of two, and nothing saturates."""
    from fp8_ds.numerics.masters import BY_NAME, encode

    dense = base.masters(training)
    weights = fp8_weights(training)
    assert len(weights) == 4 * mt.NUM_LAYERS
    for name, p in weights.items():
        value = dense[f"{name} param"]
        assert torch.equal(encode(value, BY_NAME[master], p._scale_inv)[0], p._data.flatten()), name
        assert float(torch.frexp(p._scale_inv)[0]) == 0.5, name
        assert float(value.abs().max()) <= 448 * float(p._scale_inv) * (1 + 2**-10), name


def train(layout: mt.Layout, master: str) -> dict[str, Any]:
    with run(layout, master) as training:
        assert_bytes_follow_masters(training, master)
        initial = {name: p.dequantize() for name, p in fp8_weights(training).items()}
        data, losses = mt.batches(base.NUM_STEPS), []
        for _ in range(base.NUM_STEPS):
            losses += base.steps(training, 1, data)
            assert_bytes_follow_masters(training, master)
        weights = fp8_weights(training)
        dtypes = {
            b.param_data.dtype
            for b in training.optimizer.chained_optimizers[0].buffers
            if b.params[0] in set(weights.values())
        }
        return {
            "losses": losses,
            "dtypes": dtypes,
            "bytes": {name: p._data.clone() for name, p in weights.items()},
            "scale_inv": {name: p._scale_inv.clone() for name, p in weights.items()},
            "resets": min(p.num_resets for p in weights.values()),
            "moved": all(not torch.equal(p.dequantize(), initial[name]) for name, p in weights.items()),
        }


def test_bytes_are_high_parts_and_the_loss_follows_stock(ranks: Any) -> None:
    stock = ranks(2).run(base.losses_of, base.bf16(True), (None,))[0][None][0]
    results = ranks(2).run(train, base.bf16(True), "e4m19")
    for result in results:
        base.assert_same(result["bytes"], results[0]["bytes"])
        base.assert_same(result["scale_inv"], results[0]["scale_inv"])
        assert result["dtypes"] == {torch.uint8}, "a byte per weight is gathered"
        assert result["moved"] and result["resets"] >= base.NUM_STEPS  # of what the engine has derived from old bytes
        assert 0 < base.largest_difference(result["losses"], stock) <= base.allowed(ranks, 2), (result["losses"], stock)


def initial_values(master: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Masters before any step, and the bf16 weights that were drawn."""
    layout = base.bf16(True)
    with run(layout, master) as training:
        drawn = {f"module.{name} param": p.detach().flatten() for name, p in stock_build(layout).named_parameters()}
        weights = {f"{name} param" for name in fp8_weights(training)}
        found = {name: value for name, value in base.masters(training).items() if name in weights}
        return found, {name: drawn[name].bfloat16() for name in found}


def test_first_masters_are_the_numbers_that_were_drawn(ranks: Any) -> None:
    """Not what FP8 has left of them: all of bf16's bits."""
    masters, drawn = ranks(2).run(initial_values, "e4m11")[0]
    assert len(masters) == 4 * mt.NUM_LAYERS
    base.assert_same({name: value.bfloat16() for name, value in masters.items()}, drawn)


def gathers(master: str | None) -> tuple[Any, int, int]:
    """What health says that an update gathers, what one has gathered, and elements of FP8 weights."""
    from support.collectives import count_collectives

    from megatron_patches.health import weight_gathers

    layout = base.bf16(True)
    with run(layout, master) if master else base.run(layout, None) as training:
        data = mt.batches(1)
        with count_collectives() as moved:
            training.step(data)
        numel = sum(p.numel() for p in fp8_weights(training).values())
        return weight_gathers([training.model]), moved.num_bytes["all_gather"], numel


def test_health_counts_what_an_update_gathers(ranks: Any) -> None:
    for ((said, said_fp8), seen, numel), (stock_said, stock_seen, _) in zip(
        ranks(2).run(gathers, "e4m19"), ranks(2).run(gathers, None), strict=True
    ):
        assert said == seen and stock_said == (stock_seen, 0)
        assert numel <= said_fp8 <= 1.1 * numel < said < 0.7 * stock_said[0]
    assert ranks(1).run(gathers, "e4m19")[0][0] == (0, 0), "nobody has another's shard"


# --- norms, and other layouts ---


def push(training: mt.Training, norm: float, seed: int = 0) -> float:
    """One update by gradients of about this norm, the same in all data parallel ranks; the norm that was found."""
    params = list(training.module.parameters())
    std = norm / sum(p.numel() for p in params) ** 0.5
    for i, p in enumerate(params):
        p.main_grad.copy_(std * torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * seed + i)))
    successful, found, _ = training.optimizer.step()
    assert successful
    return float(found)


def losses_and_norm(layout: mt.Layout, master: str | None) -> tuple[list[float], float]:
    with run(layout, master) if master else base.run(layout, None) as training:
        return base.steps(training, 4), push(training, 0.5)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(base.bf16(True, tp=2, sp=True), id="tp2-sp"),
        pytest.param(base.bf16(True, pp=2), id="pp2"),
    ],
)
def test_losses_and_norms_of_parallel_models_follow_stock(ranks: Any, layout: mt.Layout) -> None:
    """The norm counts what tensor parallel ranks share once, and what stages have all."""
    ours = ranks(2).run(losses_and_norm, layout, "e4m19")
    losses, norm = ranks(2).run(losses_and_norm, layout, None)[-1]
    assert 0 < base.largest_difference(ours[-1][0], losses) <= base.allowed(ranks, 2)
    assert [one[1] for one in ours] == pytest.approx([norm, norm], rel=1e-5)


def losses_and_bytes(layout: mt.Layout, path: str) -> dict[str, Any]:
    """Of a model whose first stage is as --first-last-layers-bf16 leaves it; saved, and loaded again."""
    from megatron.core import parallel_state

    def make(drawn: Tensor) -> nn.Parameter:
        return nn.Parameter(drawn) if parallel_state.is_pipeline_first_stage() else STAND_IN.make(drawn)

    def build(layout: mt.Layout) -> nn.Module:
        module = drawn_build(layout)
        module.config.fp8_param = True  # in the constructor it asks for Transformer Engine
        return module

    engine = SimpleNamespace(**{**vars(STAND_IN), "make": make})
    drawn_build = stock_build
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "stock_build", build)
        with run(layout, "e4m19", engine) as training:
            losses, before = base.steps(training, 4), base.local_bytes(training)
            base.save(training, Path(path), "dp_reshardable")
            num = len(fp8_weights(training))
        with run(layout, "e4m19", engine) as training:
            base.load(training, Path(path), "dp_reshardable")
            base.assert_same(base.local_bytes(training), before)
    return {"losses": losses, "num": num}


def test_a_stage_of_bf16_layers_alone_trains_beside_one_with_fp8_weights(ranks: Any, tmp_path: Path) -> None:
    layout = base.bf16(True, pp=2)
    first, last = ranks(2).run(losses_and_bytes, layout, str(tmp_path))
    stock = ranks(2).run(losses_and_norm, layout, None)[-1][0]
    assert (first["num"], last["num"]) == (0, 4)
    assert 0 < base.largest_difference(last["losses"], stock) <= base.allowed(ranks, 2)


def clipped(master: str | None) -> tuple[list[float], dict[str, Tensor]]:
    """Norms of two updates, the second far above --clip-grad, and by how much that one moves the masters."""
    with run(base.bf16(True), master) if master else base.run(base.bf16(True), None) as training:
        norms = [push(training, 0.9, seed=1)]
        before = base.masters(training)
        norms.append(push(training, 100.0, seed=2))
        after = base.masters(training)
        return norms, {name: after[name] - before[name] for name in after if name.endswith("weight param")}


def test_gradients_are_clipped_as_in_stock(ranks: Any) -> None:
    """Without clipping the second gradient would be all of its update, with it half; FP8 moments are a tenth off."""
    norms, moved = ranks(2).run(clipped, "e4m19")[0]
    stock_norms, stock = ranks(2).run(clipped, None)[0]
    assert norms == pytest.approx(stock_norms, rel=1e-5) and norms[0] < 1 < 50 < norms[1]
    assert moved.keys() == stock.keys()
    for name, value in moved.items():
        assert (value - stock[name]).abs().mean() < 0.1 * stock[name].abs().mean(), name


def resident(master: str) -> float:
    """Bytes per parameter beside gradients, of which the FP8 weights are nine tenths."""
    from support.memory import PeakMemory

    class RealMemory(PeakMemory):
        def counts(self, tensor: Tensor) -> bool:
            return not isinstance(tensor, StandIn) and super().counts(tensor)  # its own storage is nominal

    gc.collect()
    with RealMemory() as memory, run(base.bf16(True, ddp={"grad_reduce_in_fp32": False}), master) as training:
        training.step(mt.batches(1))
        gc.collect()
        params = list(training.module.parameters())
        numel = sum(p.numel() for p in params)
        assert sum(p.numel() for p in fp8_weights(training).values()) > 0.8 * numel
        return (memory.live - sum(p.main_grad.nbytes for p in params)) / numel


def test_no_bf16_weight_exists(ranks: Any) -> None:
    assert ranks(1).run(resident, "e4m11")[0] < 4.07 + 0.45


def widen(training: mt.Training) -> None:
    """Every FP8 weight is stored with twice the smallest scale that fits, as after an update far below its bound."""
    one = training.optimizer.chained_optimizers[0]
    weights = one._fp8_weights
    weights.scales.wait()
    weights.saved_scales = dict(zip(weights.names, (2 * pow2_scale_inv(weights.scales.amax)).tolist(), strict=True))
    for model_param, p in one._fp8_pairs():
        if isinstance(model_param, StandIn):
            weights.keep(one.optimizer.shard_of(p), one.optimizer.read(p, None))
    one._fp8_finish_loading()


def saved_then_loaded(form: str, path: str, master: str) -> None:
    """One rank's view: what is loaded is what was saved, scales included, and training goes on alike."""
    with run(base.bf16(True), master) as training:
        data = mt.batches(4)
        base.steps(training, 2, data)
        widen(training)
        before = everything(training)
        base.save(training, Path(path), form)
        losses = base.steps(training, 2, data)
        after = everything(training)
    with run(base.bf16(True), master) as training:
        data = mt.batches(4)
        for _ in range(2 * mt.NUM_MICRO):
            next(data)
        base.load(training, Path(path), form)
        base.assert_same(everything(training), before)
        assert base.steps(training, 2, data) == losses
        base.assert_same(everything(training), after)


def everything(training: mt.Training) -> dict[str, Tensor]:
    found = {key: value for key, value in base.local_bytes(training).items() if not key.startswith("weight")}
    for name, p in training.module.named_parameters():
        found[name] = p._data.clone() if isinstance(p, StandIn) else p.detach().clone()
        if isinstance(p, StandIn):
            found[f"{name} scale_inv"] = p._scale_inv.clone()
    return found


@pytest.mark.parametrize(
    ("form", "master"),
    [
        ("dp_reshardable", "e4m19"),
        ("fully_reshardable", "e4m19"),
        ("dp_zero_gather_scatter", "e4m11"),
        ("legacy", "e4m11"),
    ],
)
def test_resume_is_bit_exact_at_scales_that_are_not_the_smallest(
    ranks: Any, tmp_path: Path, form: str, master: str
) -> None:
    path = str(tmp_path / "ckpt")
    Path(path).mkdir()
    ranks(2).run(saved_then_loaded, form, path, master)


@on_ranks(2)
def test_checkpoints_that_lack_scales_load_the_same_masters(folder: str) -> None:
    """An older version wrote on each rank scales of its own shards only."""
    with run(base.bf16(True), "e4m19") as training:
        base.steps(training, 2)
        widen(training)
        dense = base.masters(training)
        weights = training.optimizer.chained_optimizers[0]._fp8_weights
        scales = dict(list(weights.scale_inv_by_name().items())[:3])
        weights.scale_inv_by_name = lambda: scales
        base.save(training, Path(folder), "legacy")
    with run(base.bf16(True), "e4m19") as training:
        base.load(training, Path(folder), "legacy")
        base.assert_same(base.masters(training), dense)
        assert_bytes_follow_masters(training, "e4m19")


def saved(form: str, path: str) -> dict[str, Tensor]:
    with run(base.bf16(True), "e4m19") as training:
        base.steps(training, 2)
        base.save(training, Path(path), form)
        return base.masters(training)


def loaded(form: str, path: str) -> dict[str, Tensor]:
    with run(base.bf16(True), "e4m19") as training:
        base.load(training, Path(path), form)
        assert_bytes_follow_masters(training, "e4m19")
        dense = base.masters(training)
        base.steps(training, 1)
        assert_bytes_follow_masters(training, "e4m19")
        return dense


def test_another_number_of_ranks_loads_the_same_masters(ranks: Any, tmp_path: Path) -> None:
    """And moments, but where a shard's edge cuts a group of 128: two scales become one."""
    wanted = ranks(1).run(saved, "fully_reshardable", str(tmp_path))[0]
    found = ranks(2).run(loaded, "fully_reshardable", str(tmp_path))[0]
    base.assert_same(*({k: v for k, v in one.items() if k.endswith(" param")} for one in (wanted, found)))
    num_other = sum(int((value != found[name]).sum()) for name, value in wanted.items())
    assert num_other <= 128 * 2 * 2, num_other


def test_bf16_weights_load_fully_reshardable(ranks: Any, tmp_path: Path) -> None:
    """Of ours, which read it as stock does; stock without FusedAdam cannot load this format, not its own either."""
    wanted = ranks(2).run(saved, "fully_reshardable", str(tmp_path))[0]
    found = ranks(2).run(base.load_and_go_on, True, "fully_reshardable", str(tmp_path), base.SPLIT)[0]["dense"]
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=2**-16 if name.endswith(" param") else 0.13, atol=1e-9), name


@on_ranks(2)
def test_weights_loaded_without_states_are_their_own_masters() -> None:
    """Weights are overwritten, as by a checkpoint without states; Transformer Engine chooses a scale of its own."""
    with run(base.bf16(True), "e4m19") as training:
        base.steps(training, 2)
        with torch.no_grad():
            for p in training.module.parameters():
                p.copy_(torch.full(p.shape, 0.3, dtype=torch.bfloat16))
        training.optimizer.reload_model_params()
        assert_bytes_follow_masters(training, "e4m19")
        assert all((value - 0.3).abs().max() < 0.01 for key, value in base.masters(training).items() if "param" in key)


@on_ranks(2)
def test_main_params_from_a_checkpoint_are_rounded_once() -> None:
    """bf16 weights go into FP8 ones as they are loaded; then masters are made of these, or of the checkpoint."""
    with run(base.bf16(True), "e4m19") as training:
        values = {}
        for i, (name, p) in enumerate(training.module.named_parameters()):
            generator = torch.Generator().manual_seed(i)
            values[name] = (0.02 * torch.randn(p.shape, generator=generator)).bfloat16()
            with torch.no_grad():
                p.copy_(values[name])
        training.optimizer.reload_model_params()
        rounded = base.masters(training)
        training.optimizer.reload_model_params({name.removeprefix("module."): v for name, v in values.items()})
        dense = base.masters(training)
        for name, value in values.items():
            assert torch.equal(dense[f"{name} param"].bfloat16(), value.flatten()), name
        for name in fp8_weights(training):
            assert not torch.equal(rounded[f"{name} param"].bfloat16(), values[name].flatten()), name
        assert_bytes_follow_masters(training, "e4m19")


@pytest.mark.parametrize("name", ["_data", "_scale_inv", "_reset_caches"])
def test_a_transformer_engine_that_keeps_fp8_elsewhere_is_refused(name: str) -> None:
    from fp8_ds.errors import SeamError
    from fp8_ds.numerics.masters import E4M19
    from megatron_patches.optimizer_fp8 import Fp8Weights

    names = {"_data", "_scale_inv", "_reset_caches"} - {name}
    weight = SimpleNamespace(**dict.fromkeys(names, torch.zeros(1)))
    with pytest.raises(SeamError, match=rf"SimpleNamespace\.{name}"):
        Fp8Weights({"layer.weight": weight}, E4M19, None, torch.device("cpu"))
