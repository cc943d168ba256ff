"""Fp8AdamW alone: it is torch's Adam and AdamW but for rounding, and its states come and go without loss."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.adamw import group_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fp8_ds import Fp8AdamW, UnsupportedError
from fp8_ds.numerics.masters import encode

SHAPES = ((48, 40), (7,), (128,), (3, 100))
"""Groups of 128 that are whole, ragged, alone and too few."""


def parameters(dtype: torch.dtype, shapes: Any = SHAPES, seed: int = 0) -> list[nn.Parameter]:
    """Weights with a range of their own per row."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    scales = [torch.exp2(torch.randint(-5, 1, (shape[0],), generator=generator).float()) for shape in shapes]
    return [
        nn.Parameter((value * scale.view(-1, *[1] * (value.dim() - 1))).to(dtype))
        for value, scale in zip(values, scales, strict=True)
    ]


def set_gradients(params: list[Any], step: int, chosen: Any = None) -> None:
    """A mean per element and noise, several magnitudes within a row; the same for any dtype of parameters."""
    for index, p in enumerate(params):
        generator = torch.Generator().manual_seed(index)
        mean = torch.randn(p.shape, generator=generator)
        mean *= torch.exp2(torch.randint(-12, 0, p.shape, generator=generator).float())
        generator.manual_seed(1000 * (step + 1) + index)
        noise = torch.randn(p.shape, generator=generator)
        p.grad = (mean * (1 + 0.5 * noise)).to(p.dtype) if chosen is None or index in chosen else None


def run(optimizer: torch.optim.Optimizer, num_steps: int, first_step: int = 0, chosen: Any = None) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(first_step, first_step + num_steps):
        set_gradients(params, step, chosen)
        optimizer.step()


def masters(optimizer: Fp8AdamW) -> list[Tensor]:
    """float32 masters in order of the parameters."""
    from fp8_ds.optim.core import dense_flat

    core = optimizer.core
    shapes = [p.shape for p in optimizer.flat_params()]
    return [dense_flat(f, None, core.scales.scale_inv, "cpu").view(s) for f, s in zip(core.flats, shapes, strict=True)]


def every_byte(optimizer: Fp8AdamW) -> list[Tensor]:
    core = optimizer.core
    core.scales.wait()
    tensors = [core.step_count, core.scales.scale_inv, core.scales.amax]
    for shard in core.shards:
        lo = [] if shard.lo is None else [shard.lo]
        tensors += [shard.hi.view(torch.uint8), *lo, shard.m, shard.v, shard.m_scale_inv, shard.v_scale_inv]
    return [tensor.clone() for tensor in tensors]


def assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right)
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


DTYPES = {"fp32": torch.float32, "bf16_8": torch.bfloat16, "e4m19": torch.bfloat16, "e4m11": torch.bfloat16}


def build(master: str, seed: int = 0, **options: Any) -> Fp8AdamW:
    """An optimizer whose parameters all have this master."""
    params = parameters(DTYPES[master], seed=seed)
    return Fp8AdamW([{"params": params, "master": None if master == "bf16_8" else master}], **options)


# --- against torch ---

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "steps": lambda o: torch.optim.lr_scheduler.StepLR(o, 20, gamma=0.5),
    "warm-up": lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 30),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 80),
}


@pytest.mark.parametrize(
    ("decoupled", "master", "schedule", "lr", "betas"),
    [
        (True, "fp32", "steps", 3e-3, (0.9, 0.95)),
        (False, "bf16_8", "warm-up", torch.tensor(3e-3), (0.9, 0.95)),
        (False, "e4m19", "cosine", torch.tensor([3e-3]), (torch.tensor([[0.9]]), torch.tensor([0.95]))),
        (True, "e4m11", None, 3e-3, (0.9, 0.95)),
    ],
)
def test_it_travels_where_torch_travels(decoupled: bool, master: str, schedule: Any, lr: Any, betas: Any) -> None:
    options = {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": 0.1}
    ours = build(master, decoupled=decoupled, **copy.deepcopy(options))
    start = [p.detach().float().clone() for p in parameters(DTYPES[master])]
    theirs = [nn.Parameter(value.clone()) for value in start]
    stock = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, **copy.deepcopy(options))
    for optimizer in (ours, stock):
        scheduler = None if schedule is None else SCHEDULERS[schedule](optimizer)
        for step in range(60):
            run(optimizer, 1, step)
            if scheduler is not None:
                scheduler.step()
    for value, expected, first in zip(masters(ours), theirs, start, strict=True):
        # What differs is the rounding of moments: 6.6 % of an update (docs/numerics.md, beta2 = .95).
        error = (value - expected.detach()).norm() / (expected.detach() - first).norm()
        assert 1e-4 < error < 0.066, float(error)
    reads = [p.detach().float() for p in ours.flat_params()]
    for value, master_value in zip(reads, masters(ours), strict=True):
        precision = {"fp32": 0.0, "bf16_8": 2.0**-8}.get(master, 2.0**-4)
        floor = 2.0**-9 * master_value.abs().max() * (precision > 0)
        assert bool(((value - master_value).abs() <= precision * master_value.abs() + floor).all())


@pytest.mark.parametrize("master", ["fp32", "bf16_8", "e4m19"])
def test_gradients_are_never_written_and_those_of_zero_move_nothing(master: str) -> None:
    optimizer = build(master, weight_decay=0.0)
    before = [p.detach().clone() for p in optimizer.flat_params()]
    for _ in range(3):
        for p in optimizer.flat_params():
            p.grad = torch.zeros(p.shape, dtype=p.dtype)
        versions = [p.grad._version for p in optimizer.flat_params()]
        optimizer.step()
        assert [p.grad._version for p in optimizer.flat_params()] == versions
    assert_same([p.detach() for p in optimizer.flat_params()], before)
    for p in optimizer.flat_params():
        p.grad.fill_(0.5)
    optimizer.step()
    assert all(bool((p.grad == 0.5).all()) for p in optimizer.flat_params())


@pytest.mark.parametrize("shape", [(0,), (4, 0), (), (1,)], ids=str)
@pytest.mark.parametrize("master", ["fp32", "bf16_8", "e4m19"])
def test_parameters_without_elements_or_dims_step_and_come_back(shape: tuple[int, ...], master: str) -> None:
    groups = [group_of([nn.Parameter(torch.ones(shape, dtype=DTYPES[master]))], master) for _ in range(2)]
    optimizer, other = (Fp8AdamW([group]) for group in groups)
    (p,) = optimizer.flat_params()
    for _ in range(100):
        p.grad = torch.ones(shape, dtype=p.dtype)
        optimizer.step()
    assert p.shape == shape and bool(((p - 0.9).abs() < 0.04).all())
    with torch.no_grad():
        p.fill_(0.5)
    assert p.shape == shape and bool((p == 0.5).all())
    state = optimizer.state_dict()
    assert state["state"][0]["exp_avg"].shape == shape
    other.load_state_dict(state)
    assert other.state_dict()["state"][0].keys() == state["state"][0].keys()


# --- options ---


def test_every_group_has_its_own_numbers() -> None:
    own: list[dict[str, Any]] = [
        {"lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.0},
        {"lr": 2e-2, "betas": (0.0, 0.5), "eps": 1e-8, "weight_decay": 0.5},
    ]
    groups = [{"params": parameters(torch.float32, seed=seed), **options} for seed, options in enumerate(own)]
    run(Fp8AdamW(groups), 5)
    for index, options in enumerate(own):
        alike = [parameters(torch.float32, seed=seed) for seed in (0, 1)]  # the same numbers of parameters
        run(Fp8AdamW([*alike[0], *alike[1]], **options), 5)
        assert_same([p.detach() for p in groups[index]["params"]], [p.detach() for p in alike[index]])


def test_a_closure_and_the_hooks_of_saving_and_stepping_are_called() -> None:
    params, called = parameters(torch.float32), list[str]()
    optimizer = Fp8AdamW(params, lr=1e-2)
    start = [p.detach().clone() for p in params]
    optimizer.register_state_dict_pre_hook(lambda self: called.append("before state_dict"))
    optimizer.register_state_dict_post_hook(lambda self, state: {**state, "extra": 1})
    optimizer.register_step_pre_hook(lambda self, args, kwargs: called.append("before step"))
    optimizer.register_step_post_hook(lambda self, args, kwargs: called.append("after step"))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum((p.square().sum() for p in params), torch.zeros(()))
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == pytest.approx(float(sum(p.square().sum() for p in start)))
    assert all(not torch.equal(p, first) for p, first in zip(params, start, strict=True))
    assert optimizer.state_dict()["extra"] == 1
    assert called == ["before step", "after step", "before state_dict"]


# --- what is refused ---


def of_fsdp2() -> Any:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        return Fp8AdamW([nn.Parameter(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)]))])
    finally:
        dist.destroy_process_group()


def sparse() -> Any:
    optimizer = build("fp32")
    optimizer.flat_params()[0].grad = torch.zeros(48, 40).to_sparse()
    optimizer.step()


def grouped(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return Fp8AdamW([{"params": parameters(dtype), **options}])


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "betas": (lambda: build("fp32", betas=(0.99, 0.9)), ValueError, r"beta1\*\*2 < beta2, got \(0.99, 0.9\)"),
    "betas equal to the bound": (lambda: build("fp32", betas=(0.5, 0.25)), ValueError, "no bound"),
    **{
        f"{name} {value}": (lambda name=name, value=value: build("fp32", **{name: value}), ValueError, f"{name}: ")
        for name, value in (("lr", -1.0), ("eps", float("nan")), ("weight_decay", float("inf")))
    },
    "lr of two elements": (lambda: build("fp32", lr=torch.tensor([0.1, 0.1])), ValueError, r"lr: .* got \[2\]"),
    "amsgrad": (lambda: grouped(amsgrad=True), UnsupportedError, "amsgrad: expected false"),
    "maximize": (lambda: grouped(maximize=True), UnsupportedError, "maximize: expected false"),
    "master": (lambda: grouped(torch.bfloat16, master="e5m2"), ValueError, "master: .* got 'e5m2'"),
    "float32 with a split master": (lambda: grouped(master="e4m11"), ValueError, "master: .* got 'e4m11'"),
    "dtype": (lambda: Fp8AdamW(parameters(torch.float16)), ValueError, "got torch.float16"),
    "no parameters": (lambda: Fp8AdamW([]), ValueError, "empty parameter list"),
    "groups without parameters": (lambda: Fp8AdamW([{"params": []}]), ValueError, "at least one parameter"),
    "a late group": (
        lambda: build("fp32").add_param_group({"params": parameters(torch.float32)}),
        UnsupportedError,
        "all groups at construction",
    ),
    "a sparse gradient": (sparse, UnsupportedError, "sparse"),
    "parameters of FSDP2": (of_fsdp2, UnsupportedError, r"params: .* got a DTensor"),
    "a copy": (lambda: copy.deepcopy(build("e4m11")), UnsupportedError, "state_dict"),
    "a pickle": (lambda: pickle.dumps(build("e4m11")), UnsupportedError, "state_dict"),
}


@pytest.mark.filterwarnings("ignore:.*duplicate parameters")
def test_one_parameter_twice_in_a_group_is_an_error() -> None:
    """torch warns and updates it twice with one state; here it would have two masters."""
    with pytest.raises(ValueError, match="got one twice"):
        Fp8AdamW(2 * parameters(torch.float32)[:1])


@pytest.mark.parametrize(("make", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_what_it_cannot_do_is_refused(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


def test_betas_that_a_scheduler_moves_beyond_the_bound_are_refused_at_the_step() -> None:
    optimizer = build("e4m11")
    run(optimizer, 1)
    before = every_byte(optimizer)
    optimizer.param_groups[0]["betas"] = (0.99, 0.9)
    with pytest.raises(ValueError, match="betas"):
        run(optimizer, 1)
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    assert_same(every_byte(optimizer), before)


# --- gradients that are not there or not finite ---


@pytest.mark.parametrize(("master", "value"), zip(DTYPES, [float("inf"), float("nan")] * 2, strict=True))
def test_a_step_with_one_gradient_that_is_not_finite_changes_no_byte(master: str, value: float) -> None:
    broken, whole = build(master), build(master)
    run(broken, 2)
    run(whole, 2)
    before = every_byte(broken)
    set_gradients(broken.flat_params(), 2)
    broken.flat_params()[2].grad[-1] = value
    broken.step()
    assert_same(every_byte(broken), before)
    run(broken, 2, first_step=2)
    run(whole, 2, first_step=2)
    assert_same(every_byte(broken), every_byte(whole))


@pytest.mark.parametrize("master", DTYPES)
def test_parameters_without_a_gradient_are_left_alone_and_count_no_step(master: str) -> None:
    optimizer = build(master, weight_decay=0.5)
    run(optimizer, 1)
    before, versions = masters(optimizer), [p._version for p in optimizer.flat_params()]
    run(optimizer, 2, first_step=1, chosen={0, 3})
    assert optimizer.core.step_count.tolist() == [3, 1, 1, 3]
    is_seen = [p._version > version for p, version in zip(optimizer.flat_params(), versions, strict=True)]
    assert is_seen == [True, False, False, True]  # by autograd: a backward that has kept an older weight raises
    for index, (value, expected) in enumerate(zip(masters(optimizer), before, strict=True)):
        assert torch.equal(value, expected) == (index in (1, 2)), index
    before_any = every_byte(optimizer)
    run(optimizer, 1, chosen=set())
    assert_same(every_byte(optimizer), before_any)


# --- state ---


@pytest.mark.parametrize("master", DTYPES)
def test_a_state_dict_on_disk_gives_every_byte_and_the_same_next_steps(master: str) -> None:
    first = build(master, lr=1e-2)
    run(first, 3)
    file = io.BytesIO()
    weights = [p.detach().clone() for p in first.flat_params()]
    torch.save(first.state_dict(), file)
    before = every_byte(first)
    second = build(master, seed=1)
    with torch.no_grad():
        for p, value in zip(second.flat_params(), weights, strict=True):
            p.copy_(value)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert_same(every_byte(first), before)
    assert_same(every_byte(second), before)
    run(first, 2, first_step=3)
    run(second, 2, first_step=3)
    assert_same(every_byte(second), every_byte(first))


@pytest.mark.parametrize("master", ["e4m19", "e4m11"])
def test_a_state_dict_keeps_a_scale_that_is_wider_than_its_masters_need(master: str) -> None:
    """lr * bound may cross a power of two that no master crosses: such a scale is the next step's to narrow."""

    def weights() -> list[nn.Parameter]:
        return [nn.Parameter(torch.full((4, 64), 447 * 2.0**-10, dtype=torch.bfloat16))]

    first = Fp8AdamW([{"params": weights(), "master": master}], lr=1e-2, weight_decay=0.0)
    narrow = float(first.core.scales.scale_inv[0])
    first.flat_params()[0].grad = torch.ones(4, 64, dtype=torch.bfloat16)
    first.step()
    assert float(first.core.scales.scale_inv[0]) == 2 * narrow
    assert float(masters(first)[0].abs().max()) < 448 * narrow
    state = first.state_dict()
    second = Fp8AdamW([{"params": weights(), "master": master}], lr=1e-2, weight_decay=0.0)
    second.load_state_dict(state)
    assert_same(every_byte(second), every_byte(first))
    del state["state"][0]["scale_inv"]  # as it was saved before 2026-11-22
    second.load_state_dict(state)
    assert float(second.core.scales.scale_inv[0]) == narrow
    assert torch.equal(masters(second)[0], masters(first)[0])


def test_a_state_dict_has_the_keys_of_torch_and_torch_loads_it() -> None:
    ours = build("fp32", lr=1e-2)
    stock = torch.optim.AdamW(parameters(torch.float32), lr=1e-2)
    run(ours, 3)
    run(stock, 3)
    state, expected = ours.state_dict(), stock.state_dict()
    assert state["state"].keys() == expected["state"].keys()
    assert ours.state_dict()["state"][0].keys() == expected["state"][0].keys()
    for index, entry in expected["state"].items():
        assert state["state"][index].keys() == entry.keys()
        for key, value in entry.items():
            assert state["state"][index][key].dtype == value.dtype and state["state"][index][key].shape == value.shape
    stock.load_state_dict({"state": state["state"], "param_groups": expected["param_groups"]})
    run(stock, 1, first_step=3)


def test_groups_of_older_state_dicts_that_lack_options_are_loaded() -> None:
    optimizer = build("fp32", weight_decay=0.25)
    state = optimizer.state_dict()
    for key in ("weight_decay", "master", "eps"):
        del state["param_groups"][0][key]
    state["param_groups"][0]["lr"] = 0.5
    optimizer.load_state_dict(state)
    assert (optimizer.param_groups[0]["weight_decay"], optimizer.param_groups[0]["lr"]) == (0.25, 0.5)


def test_a_state_dict_of_torch_is_taken_over_mid_run() -> None:
    stock = torch.optim.AdamW(parameters(torch.float32), lr=1e-2)
    run(stock, 20)
    values = [p.detach().clone() for p in stock.param_groups[0]["params"]]
    ours = Fp8AdamW([nn.Parameter(value.clone()) for value in values], lr=1e-2)
    ours.load_state_dict(stock.state_dict())
    assert ours.core.step_count.tolist() == [20] * len(values)
    run(stock, 1, first_step=20)
    run(ours, 1, first_step=20)
    for p, expected, value in zip(ours.flat_params(), stock.param_groups[0]["params"], values, strict=True):
        travel = (expected - value).norm()
        assert 0 < (p - expected).norm() < 0.08 * travel
    with pytest.raises(ValueError, match=r"expected \[4\] parameters by group, got \[1\]"):
        ours.load_state_dict(torch.optim.AdamW(parameters(torch.float32)[:1]).state_dict())


# --- parameters in FP8 ---


@pytest.mark.parametrize("factor", [64.0, 1.0], ids=["a_wider_scale", "the_same_scale"])
@pytest.mark.parametrize("master", ["e4m19", "e4m11"])
def test_elements_that_a_write_leaves_as_they_were_keep_their_masters(master: str, factor: float) -> None:
    optimizer = build(master, lr=1e-2)
    run(optimizer, 3)
    p, before, scale_inv = optimizer.flat_params()[0], masters(optimizer)[0], optimizer.core.scales.scale_inv.clone()
    row = (
        factor * p.detach()[5].float().abs().max() * torch.rand(p.shape[1], generator=torch.Generator().manual_seed(9))
    )
    with torch.no_grad():
        p[5] = row
    after, new = masters(optimizer)[0], optimizer.core.scales.scale_inv
    assert bool(new[0] > scale_inv[0]) == (factor > 1) and torch.equal(new[1:], scale_inv[1:])
    half_ulp = {"e4m19": 2.0**-20, "e4m11": 2.0**-12}[master]
    row = row.bfloat16().float()
    assert bool(((after[5] - row).abs() <= half_ulp * (row.abs() + 2.0**-6 * new[0])).all())
    others = torch.arange(len(before)) != 5
    held = before[others].abs() >= 9 * 2.0**-9 * new[0]  # below lie FP8's subnormals
    assert torch.equal(after[others][held], before[others][held])
    assert float(held.float().mean()) > 0.5 and (factor == 1) == torch.equal(after[others], before[others])
    assert float((after - before)[others].abs().max()) <= 2.0**-10 * float(new[0])
    if factor > 1:  # a smaller scale again gives the bytes of the masters
        wide = float(new[0])
        with torch.no_grad():
            p[5] = 0.0
        narrow, shard = optimizer.core.scales.scale_inv[0], optimizer.core.shards[0]
        assert narrow < wide and optimizer.core.scales.amax[0] >= masters(optimizer)[0].abs().max()
        assert torch.equal(encode(masters(optimizer)[0].flatten(), shard.fmt, narrow)[0], shard.hi)


@pytest.mark.parametrize(("master", "half_ulp"), [("e4m19", 2.0**-20), ("e4m11", 2.0**-12)])
def test_a_float32_value_that_is_copied_into_an_fp8_weight_is_its_master(master: str, half_ulp: float) -> None:
    optimizer = build(master)
    value = torch.randn(SHAPES[0], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        optimizer.flat_params()[0].copy_(value)
    floor = 2.0**-9 * value.abs().max()  # FP8's subnormals
    assert bool(((masters(optimizer)[0] - value).abs() <= half_ulp * (value.abs() + floor)).all())
