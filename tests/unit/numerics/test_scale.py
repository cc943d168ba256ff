"""amax -> scale, and AmaxHistory: which step's amax sets the scale, and what a NaN does."""

import copy
import io
import pickle

import pytest
import torch
from support.linears import convert
from torch import nn

from fp8_ds.errors import ConfigError
from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.numerics.scale import AmaxHistory, row_scale_from_amax, scale_from_amax

NAN, INF = float("nan"), float("inf")
TINY = 2.0**-149  # smallest subnormal of float32


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_amax_lands_on_fp8_max_by_a_quotient_that_is_rounded_once(fmt):
    amax = torch.rand(10_000) + 0.1
    scale, scale_inv = scale_from_amax(amax, fmt.max)
    assert torch.equal(scale, (torch.tensor(fmt.max, dtype=torch.float64) / amax.double()).float())
    torch.testing.assert_close(scale * scale_inv, torch.ones_like(scale))
    bf16 = scale_from_amax(torch.tensor(3.0, dtype=torch.bfloat16), fmt.max)
    assert bf16[0].dtype == torch.float32 and bf16[0] == torch.tensor(fmt.max) / 3


def test_the_ends_of_float32_give_finite_normal_scales_and_what_is_not_finite_poisons_scale_inv_only():
    amax = torch.tensor([0.0, TINY, 2.0**-126, 1e-30, 3.4e38, INF, NAN])
    scale, scale_inv = plain = scale_from_amax(amax, E4M3.max)
    assert scale[[0, 5, 6]].tolist() == [1, 1, 1] and scale_inv[0] == 1 and scale_inv[5:].isnan().all()
    assert (torch.stack([scale[:5], scale_inv[:5]]) >= torch.finfo(torch.float32).smallest_normal).all()
    assert (amax[:5] * scale[:5] <= E4M3.max * (1 + 1e-6)).all() and scale.isfinite().all()
    of_rows = row_scale_from_amax(amax, E4M3.max)  # where zeros have the largest scale
    assert of_rows[0][0] == 2.0**126 and of_rows[1][0] == 2.0**-126 <= of_rows[1][:5].min()
    torch.testing.assert_close([one[1:] for one in of_rows], [one[1:] for one in plain], rtol=0, atol=0, equal_nan=True)


def make(num_slots=2, history_len=4):
    return AmaxHistory(num_slots, [448.0] * num_slots, history_len=history_len)


def feed(history, *steps):
    for step in steps:
        history.update(torch.tensor(step))


def test_scale_follows_the_maximum_of_the_window():
    history = make(2, history_len=4)
    feed(history, [64.0, 8.0], [4.0, 2.0], [2.0, 1.0], [1.0, 1.0])
    assert history.scale.tolist() == [7.0, 56.0]
    assert history.scale_inv.tolist() == pytest.approx([1 / 7, 1 / 56], rel=1e-7)
    feed(history, [1.0, 1.0])
    assert history.scale.tolist() == [112.0, 224.0]
    with pytest.raises(ConfigError, match="layer plan"):
        history.load_state_dict(make(3).state_dict())
    assert history.scale.tolist() == [112.0, 224.0] and history.num_updates == 5


@pytest.mark.parametrize("first", [0.0, NAN, INF])
def test_a_slot_without_any_amax_has_scale_one_and_zeros_for_a_whole_history_keep_a_scale(first):
    history = make(2, history_len=4)
    feed(history, [2.0, first], *[[0.0, 0.0]] * 9)
    assert history.scale.tolist() == [224.0, 1.0]
    assert torch.equal(history.scale_inv, history.scale.reciprocal())
    feed(history, [4.0, 4.0])
    assert history.scale.tolist() == [112.0, 112.0]


@pytest.mark.parametrize("bad", [NAN, INF])
def test_non_finite_amax_keeps_the_scale_and_does_not_linger(bad):
    history = make(2, history_len=4)
    feed(history, [8.0, 1.0], [2.0, 1.0], [bad, 1.0])
    assert history.scale.tolist() == [56.0, 448.0]  # the last finite maximum, and the neighbour untouched
    assert history.amax_history.isfinite().all()
    feed(history, [2.0, 1.0], [2.0, 1.0], [2.0, 1.0])
    assert history.scale[0] == 56.0
    feed(history, [2.0, 1.0])
    assert history.scale[0] == 224.0
    assert history.scale_inv.isfinite().all()


def test_resume_is_bit_exact_and_weights_only_safe():
    torch.manual_seed(0)
    steps = torch.rand(11, 2).exp()
    whole, first = make(), make()
    for step in steps:
        whole.update(step)
    for step in steps[:6]:
        first.update(step)
    first.amax_local.fill_(0.5)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    resumed = make()
    view = resumed.scale[1]
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.ready and resumed.num_updates == 6
    assert resumed.amax_local.tolist() == [0.5, 0.5]
    for step in steps[6:]:
        resumed.update(step)
    for name in ("scale", "scale_inv", "amax_history"):
        assert torch.equal(getattr(resumed, name), getattr(whole, name))
    assert view == whole.scale[1]  # storage was kept


def test_a_history_that_forgets_is_a_new_one_in_the_same_storage():
    history, new = make(), make()
    views = {name: getattr(history, name)[-1:] for name in ("scale", "scale_inv", "amax_local")}
    feed(history, [2.0, 3.0])
    history.amax_local.fill_(0.5)
    history.forget()
    assert not history.ready
    for name, value in new.state_dict().items():
        assert torch.equal(torch.as_tensor(history.state_dict()[name]), torch.as_tensor(value)), name
    assert [view.item() for view in views.values()] == [1.0, 1.0, 0.0]


def test_every_slot_is_aligned_for_cuda_graphs():
    """Inductor takes a graph's input for static, so that it may be written in a CUDA graph, if 16 bytes divide it."""
    history = AmaxHistory(5, [448.0] * 5)
    for index in range(5):
        slot = history.slot(index)
        assert all(view.data_ptr() % 16 == 0 for view in (slot.amax_local, slot.scale, slot.scale_inv))
        slot.amax_local.fill_(index)
    assert history.amax_local.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def saved_and_loaded(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing)), saved_and_loaded]
COPY_NAMES = ["deepcopy", "pickle", "torch.save"]


@pytest.mark.parametrize("duplicate", COPIES, ids=COPY_NAMES)
def test_slots_of_a_copy_are_views_of_its_own_history(duplicate):
    history = make(3)
    slots = [history.slot(2), history.slot(0)]
    feed(history, [1.0, 2.0, 4.0])
    other, (last, first), (same, _) = duplicate((history, slots, slots))
    assert same is last
    assert last.scale == history.scale[2] and first.scale == history.scale[0]
    last.amax_local.fill_(8.0)
    assert other.amax_local.tolist() == [0.0, 0.0, 8.0] and not history.amax_local.any()
    feed(other, [1.0, 1.0, 8.0])
    assert last.scale.item() == 56.0 and last.scale_inv == other.scale_inv[2]
    assert last.scale.data_ptr() == other.scale[2].data_ptr() and last.scale.data_ptr() % 16 == 0


class Readers(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        h = self.norm(x)
        return self.q(h) + self.k(h)


@pytest.mark.parametrize("duplicate", COPIES, ids=COPY_NAMES)
def test_a_copied_model_records_what_its_history_scales_by(duplicate):
    torch.manual_seed(0)
    model = Readers()
    history = convert(model, recipe="delayed")
    x = torch.randn(8, 16)
    model(x).sum().backward()
    history.update(history.amax_local.clone())
    other = duplicate(model)
    recipe, reader = other.q.fp8_recipe, other.k.fp8_recipe
    assert recipe.history is reader.history is not history
    assert reader.leader is recipe.leader is recipe.slot_x
    for one in (model, other):
        one(3 * x).square().sum().backward()
    assert history.amax_local.all() and torch.equal(history.amax_local, recipe.history.amax_local)
