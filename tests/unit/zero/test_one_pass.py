"""`OnePassAdam` against torch's own optimizers, for which cases it leaves the step to DeepSpeed, and its counts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.ops.adam import FusedAdam
from support.threads import on_threads
from torch import Tensor, nn
from torch.optim.lr_scheduler import ConstantLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8_ds.zero.one_pass import OnePassAdam, Work, pieces_of_master

SIZES = ([40, 7, 130], [65, 3])
"""Parameters of two groups; the second group's flat master has padding behind the first parameter."""
GAP = 5
GROUPS: tuple[dict[str, Any], ...] = (
    {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    {"lr": 3e-3, "betas": (0.8, 0.999), "eps": 1e-6, "weight_decay": 0.0},
)


def values(group: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(group)
    return [torch.randn(size, generator=generator) * 4.0**i for i, size in enumerate(SIZES[group])]


def gradients(step: int, group: int) -> list[Tensor]:
    """bf16, a range of its own for each parameter; the fourth step has an infinite element."""
    generator = torch.Generator().manual_seed(100 + 10 * step + group)
    found = [(torch.randn(n, generator=generator) * 8.0**-i).bfloat16() for i, n in enumerate(SIZES[group])]
    if step == 3 and group == 1:
        found[1][2] = float("inf")
    return found


def flat(pieces: list[Tensor], group: int) -> Tensor:
    """One behind the other, with the padding of the second group."""
    gap = torch.zeros(GAP if group else 0, dtype=pieces[0].dtype)
    return torch.cat([pieces[0], gap, *pieces[1:]])


def fused_adam(groups: Any) -> Any:
    """DeepSpeed's FusedAdam without its kernel, which needs CUDA."""
    made = FusedAdam.__new__(FusedAdam)
    defaults = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    torch.optim.Optimizer.__init__(made, groups, defaults)
    made.adam_w_mode = 1
    return made


MAKERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, foreach=False),
    "Adam": lambda groups: torch.optim.Adam(groups, foreach=False),
    "FusedAdam": fused_adam,
}


def host_of(optimizer: Any, clip: float = 0.0) -> Any:
    """What `OnePassAdam` reads of a ZeRO optimizer."""
    found = SimpleNamespace(
        optimizer=optimizer,
        param_groups=optimizer.param_groups,
        dp_process_group=dist.group.WORLD,
        model_parallel_group=None,
        model_parallel_rank=0,
        clip_grad=clip,
        loss_scale=1.0,
        overflow=False,
        scales_updated=[],
    )
    found._model_parallel_all_reduce = lambda tensor, op: None
    found._update_scale = found.scales_updated.append
    return found


def made(name: str) -> tuple[Any, list[nn.Parameter]]:
    """An optimizer over flat masters, and these."""
    masters = [nn.Parameter(flat(values(group), group)) for group in range(2)]
    groups = [{"params": [master], **numbers} for master, numbers in zip(masters, GROUPS, strict=True)]
    return MAKERS[name](groups), masters


def work_of(host: Any, masters: list[nn.Parameter], step: int) -> list[Work]:
    found = []
    for group, master in enumerate(masters):
        first, *others = gradients(step, group)
        marked: Any = torch.zeros(GAP if group else 0, dtype=torch.bfloat16)
        marked._zero_padding = True
        params = [nn.Parameter(torch.empty(0)) for _ in SIZES[group]]
        found.append(Work(master, host.param_groups[group], list(pieces_of_master([first, marked, *others], params))))
    return found


def reference(name: str, masters: list[nn.Parameter]) -> Any:
    """torch's optimizer with the arithmetic of `name`, over copies of the masters."""
    kind = "AdamW" if name == "FusedAdam" else name
    copies = [nn.Parameter(master.detach().clone()) for master in masters]
    return MAKERS[kind]([{"params": [p], **numbers} for p, numbers in zip(copies, GROUPS, strict=True)])


def steps(name: str, clip: float, loss_scale: float) -> None:
    optimizer, masters = made(name)
    host, other = host_of(optimizer, clip), reference(name, masters)
    host.loss_scale = loss_scale
    one_pass = OnePassAdam(host)
    for step in range(6):
        one_pass.run(work_of(host, masters, step), waits=True)
        grads = [flat(gradients(step, group), group).float() for group in range(2)]
        norm = torch.stack([torch.linalg.vector_norm(grad.double()) for grad in grads]).square().sum().sqrt().float()
        assert host.overflow is (step == 3) and host.scales_updated[-1] is host.overflow
        if host.overflow:
            assert host._global_grad_norm == float("inf")
            continue
        assert float(host._global_grad_norm) == pytest.approx(float(norm) / loss_scale, rel=1e-6)
        factor = 1 / max(1.0, (float(norm) / loss_scale + 1e-6) / clip) if clip else 1.0
        assert clip == 0.0 or factor < 0.5
        for group, grad in zip(other.param_groups, grads, strict=True):
            group["params"][0].grad = grad * (factor / loss_scale)
        other.step()
        for group, master in zip(other.param_groups, masters, strict=True):
            p = group["params"][0]
            state, own = other.state[p], optimizer.state[master]
            exact = clip == 0.0  # else the factor is a rounding or two off
            for mine, its in (
                (master, p),
                (own["exp_avg"], state["exp_avg"]),
                (own["exp_avg_sq"], state["exp_avg_sq"]),
            ):
                torch.testing.assert_close(mine, its, rtol=0.0 if exact else 1e-5, atol=0.0 if exact else 1e-7)
            assert int(own["step"]) == int(state["step"]) == step + (step < 3)
    assert optimizer._opt_called


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("loss_scale", [1.0, 4.0])
@pytest.mark.parametrize("name", MAKERS)
def test_steps_of_unequal_groups_are_those_of_torch_and_a_skipped_one_changes_and_counts_nothing(
    name: str, clip: float, loss_scale: float
) -> None:
    on_threads(1, steps, name, clip, loss_scale)


def without_waiting(bad: float) -> None:
    """As DeepSpeed does with `bf16.check_grad_overflow` false: what has a bad gradient becomes NaN, no other does."""
    optimizer, masters = made("AdamW")
    host = host_of(optimizer, 0.5)
    work = work_of(host, masters, 0)
    work[1].pieces[1].grad[2] = bad
    OnePassAdam(host).run(work, waits=False)
    assert host.overflow is False and int(optimizer.state[masters[0]]["step"]) == 1
    assert bool(masters[0].isfinite().all())
    lost = masters[1].isfinite().logical_not().nonzero().flatten().tolist()
    assert lost == [SIZES[1][0] + GAP + 2]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_without_a_look_at_overflows_only_an_element_with_a_bad_gradient_is_lost(bad: float) -> None:
    on_threads(1, without_waiting, bad)


def without_corrections() -> None:
    optimizer, masters = made("FusedAdam")
    host = host_of(optimizer)
    host.compute_grad_norm = False
    optimizer.param_groups[0].update(bias_correction=False, weight_decay=0.0)
    before, grad = masters[0].detach().clone(), flat(gradients(0, 0), 0).float()
    OnePassAdam(host).run(work_of(host, masters, 0), waits=True)
    moved = -1e-2 * (0.1 * grad) / ((0.05 * grad.square()).sqrt() + 1e-8)
    torch.testing.assert_close(masters[0].detach(), before + moved)
    assert host._global_grad_norm is None


def test_options_of_fused_adam_and_of_the_norm_are_followed() -> None:
    """Bias correction may be off; DeepSpeed may be told to report no norm."""
    on_threads(1, without_corrections)


def counted_anew() -> None:
    """By who writes a count: torch's load, user code in place, and a load past the version counter."""
    optimizer, masters = made("AdamW")
    host, state = host_of(optimizer), optimizer.state
    one_pass = OnePassAdam(host)

    def assert_step(number: int) -> None:
        """The next step moves a master as step `number` does."""
        expected, before = moved_as_step(number, optimizer, masters[0]), masters[0].detach().clone()
        one_pass.run(work_of(host, masters, 0), waits=True)
        assert float((masters[0].detach() - before).abs().sum()) == pytest.approx(expected, rel=1e-6)
        assert int(state[masters[0]]["step"]) == number

    one_pass.run(work_of(host, masters, 0), waits=True)
    assert_step(2)
    other = torch.zeros(())  # written as often as the tensor in whose place it is put
    while other._version < state[masters[0]]["step"]._version - 1:
        other.zero_()
    state[masters[0]]["step"] = other.fill_(5.0)
    assert_step(6)
    state[masters[0]]["step"].fill_(17.0)
    assert_step(18)
    state[masters[0]]["step"].data.fill_(1.0)
    one_pass.forget_counts()
    assert_step(2)


def moved_as_step(number: int, optimizer: Any, master: Tensor) -> float:
    """How far torch's AdamW moves `master` in step `number`."""
    p = nn.Parameter(master.detach().clone())
    other = torch.optim.AdamW([{"params": [p], **GROUPS[0]}], foreach=False)
    state = {key: x.clone() for key, x in optimizer.state[master].items()}
    other.state[p] = {**state, "step": torch.tensor(float(number - 1))}
    p.grad = flat(gradients(0, 0), 0).float()
    other.step()
    return float((p.detach() - master.detach()).abs().sum())


def test_counts_of_steps_that_somebody_else_has_written_are_read_anew() -> None:
    on_threads(1, counted_anew)


# --- who steps ---


def _hook(optimizer: Any) -> None:
    optimizer.register_step_pre_hook(lambda *_: None)


def _scheduled(optimizer: Any) -> None:
    ConstantLR(optimizer)


def _replaced(optimizer: Any) -> None:
    optimizer.step = lambda closure=None: None


def _group(**numbers: Any) -> Callable[[Any], None]:
    return lambda optimizer: optimizer.param_groups[1].update(numbers)


def why_not(change: Callable[[Any], None] | None, kind: Any = None, dtype: Any = torch.float32, **more: Any) -> Any:
    """Why a step is DeepSpeed's, for an AdamW over two masters after `change`."""

    def ask() -> Any:
        optimizer, masters = made("AdamW")
        if kind is not None:
            optimizer = kind([{"params": [master]} for master in masters], lr=1e-3)
        if change is not None:
            change(optimizer)
        host = host_of(optimizer)
        vars(host).update(more)
        one_pass = OnePassAdam(host)
        given: list[Any] = [masters[0], masters[1].to(dtype)]
        assert one_pass.is_left_to_deepspeed(given) is (one_pass.why_not(given) is not None)
        return one_pass.why_not(given)

    return on_threads(1, ask)[0]


class MyAdamW(torch.optim.AdamW):
    """A subclass may do anything in its step."""


@pytest.mark.parametrize(
    ("change", "kind", "more", "reason"),
    [
        (None, torch.optim.SGD, {}, "SGD"),
        (None, MyAdamW, {}, "MyAdamW"),
        (_group(amsgrad=True), None, {}, "amsgrad"),
        (_group(maximize=True), None, {}, "maximize"),
        (_group(differentiable=True), None, {}, "differentiable"),
        (_group(lr=torch.tensor(1e-3)), None, {}, "tensors"),
        (_group(betas=(0.9, torch.tensor(0.95))), None, {}, "tensors"),
        (_hook, None, {}, "hooks"),
        (_replaced, None, {}, "replaced"),
        (None, None, {"torch_autocast_gradscaler": object()}, "autocast"),
        (None, None, {"cpu_offload": True}, "offloaded"),
        (None, None, {"offload_optimizer": True}, "offloaded"),
        (None, None, {"dtype": torch.bfloat16}, "fp32"),
    ],
)
def test_what_one_pass_does_not_compute_is_left_to_deepspeed(
    change: Any, kind: Any, more: dict[str, Any], reason: str
) -> None:
    assert reason in why_not(change, kind, **more)


@pytest.mark.parametrize("change", [None, _scheduled, _group(lr=0.5), _group(amsgrad=False)])
def test_an_adam_with_numbers_of_its_own_or_a_scheduler_is_stepped_in_one_pass(change: Any) -> None:
    assert why_not(change) is None


def test_hooks_of_all_optimizers_leave_the_step_to_deepspeed() -> None:
    handle = register_optimizer_step_post_hook(lambda *_: None)
    try:
        assert "hooks" in why_not(None)
    finally:
        handle.remove()


def test_a_norm_that_model_parallel_ranks_share_leaves_the_step_to_deepspeed() -> None:
    def ask() -> Any:
        optimizer, masters = made("AdamW")
        host = host_of(optimizer)
        host.model_parallel_group = dist.group.WORLD
        return OnePassAdam(host).why_not(masters)

    assert on_threads(1, ask) == [None]
    assert all("model-parallel" in reason for reason in on_threads(2, ask))


# --- gradients and states ---


def test_gradients_between_marked_padding_start_where_their_masters_do() -> None:
    marked: Any = torch.zeros(6)
    marked._zero_padding = True
    grads = [torch.ones(3), marked, torch.ones(2, 2).t(), torch.zeros(4)]  # the last one is padding without a mark
    pieces = list(pieces_of_master(grads, ["first", "second"]))
    assert [(piece.start, piece.grad.numel(), piece.param) for piece in pieces] == [(0, 3, "first"), (9, 4, "second")]
    assert all(piece.grad.is_contiguous() for piece in pieces)


@pytest.mark.parametrize("wrong", ["elsewhere", "dtype", "size"])
def test_states_that_a_kernel_would_write_past_are_refused_before_anything_changes(wrong: str) -> None:
    def refuse() -> None:
        optimizer, masters = made("AdamW")
        host = host_of(optimizer)
        one_pass = OnePassAdam(host)
        one_pass.run(work_of(host, masters, 0), waits=True)
        state, before = optimizer.state[masters[1]], [master.detach().clone() for master in masters]
        own = state["exp_avg_sq"]
        state["exp_avg_sq"] = {"elsewhere": own.to("meta"), "dtype": own.double(), "size": own[1:]}[wrong]
        with pytest.raises(ValueError, match="expected v of Adam as float32"):
            one_pass.run(work_of(host, masters, 1), waits=True)
        assert all(torch.equal(master, value) for master, value in zip(masters, before, strict=True))

    on_threads(1, refuse)
