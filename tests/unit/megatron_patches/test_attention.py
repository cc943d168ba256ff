"""The core_attention slot: what fp8_ds computes there, and what is left to the stock class, here one that gives NaN."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron-core==0.16.1")

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from fp8_ds.errors import ConfigError, UnsupportedError
from fp8_ds.testing import sqnr_db
from megatron_patches.attention import AttentionSettings, attention_class

S, B, HEADS, GROUPS, DIM = 24, 2, 4, 2, 16


class Stock(nn.Module):
    """Answers NaN, so that what it computes is known."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Tensor:
        return torch.full((*query.shape[:-2], query.shape[-2] * query.shape[-1]), float("nan"))


class MegatronsOwn(Stock, DotProductAttention):
    """Of the class that takes no packed sequences."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        nn.Module.__init__(self)


def build(
    backend: str = "reference",
    hadamard: bool = False,
    layer_number: int = 2,
    kwargs: Any = None,
    stock: type = Stock,
    **values: Any,
) -> Any:
    found = {"context_parallel_size": 1, "attention_dropout": 0.0, "softmax_type": "vanilla"}
    found |= {"window_size": None, "window_attn_skip_freq": None, "num_layers": 4, "first_last_layers_bf16": False}
    found |= {"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1}
    config = SimpleNamespace(**found | values)
    settings = AttentionSettings(backend, hadamard)  # type: ignore[arg-type]
    cls = attention_class(stock)
    return cls(config, layer_number, AttnMaskType.causal, "self", fp8_attention=settings, **(kwargs or {}))


def operands(packed: bool = False) -> list[Tensor]:
    """Views of a fused QKV, as Megatron hands them over."""
    torch.manual_seed(1)
    lead = (S * B,) if packed else (S, B)
    fused = torch.randn(*lead, GROUPS, (HEADS // GROUPS + 2) * DIM, dtype=torch.float64)
    q, k, v = fused.split([HEADS // GROUPS * DIM, DIM, DIM], dim=-1)
    return [q.reshape(*lead, HEADS, DIM), k, v]


def expected(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
    out = scaled_dot_product_attention(*(x.permute(1, 2, 0, 3) for x in (q, k, v)), enable_gqa=True, **kwargs)
    return out.permute(2, 0, 1, 3).reshape(S, B, -1)


def call(module: Any, *qkv: Tensor, **kwargs: Any) -> Tensor:
    return module(*qkv, None, **{"attn_mask_type": None, "attention_bias": None, "packed_seq_params": None, **kwargs})


def test_causal_attention_and_the_callers_own_scale_and_mask() -> None:
    q, k, v = operands()
    torch.testing.assert_close(call(build(), q, k, v), expected(q, k, v, is_causal=True))
    module = build(kwargs={"softmax_scale": 0.5})
    out = call(module, q, k, v, attn_mask_type=AttnMaskType.no_mask)
    torch.testing.assert_close(out, expected(q, k, v, scale=0.5))
    assert isinstance(module, Stock) and list(module.state_dict()) == ["weight"]


def test_fp8_is_near_and_the_rotation_reaches_it() -> None:
    q, k, v = (x.float() for x in operands())
    plain, rotated = (call(build("fa3_fp8_emulated", hadamard), q, k, v) for hadamard in (False, True))
    assert not torch.equal(plain, rotated)
    for out in (plain, rotated):
        assert 20 < sqnr_db(expected(q, k, v, is_causal=True), out) < 60


def packed_to(end: int = S * B, longest: int | None = 38, padded: bool = False) -> PackedSeqParams:
    """Two sequences."""
    ends = torch.tensor([0, 10, end], dtype=torch.int32)
    return PackedSeqParams("thd", ends, ends, *([ends + 1] * 2 if padded else [None] * 2), longest, longest)


@pytest.mark.parametrize("longest", [38, None])
def test_packed_sequences_are_attended_to_one_by_one(longest: int | None) -> None:
    q, k, v = operands(packed=True)
    options = {"attn_mask_type": AttnMaskType.padding_causal, "packed_seq_params": packed_to(longest=longest)}
    out = call(build(), q, k, v, **options)
    assert out.shape == (S * B, HEADS * DIM)
    for first, last in ((0, 10), (10, S * B)):
        alone = (x[first:last, None].permute(1, 2, 0, 3) for x in (q, k, v))
        part = scaled_dot_product_attention(*alone, is_causal=True, enable_gqa=True)[0].transpose(0, 1).flatten(1)
        torch.testing.assert_close(out[first:last], part)


@pytest.mark.parametrize(("stock", "is_ours"), [(MegatronsOwn, True), (Stock, False)])
def test_packed_sequences_in_evaluation_are_ours_where_stock_refuses_them(stock: type, is_ours: bool) -> None:
    module, qkv = build(stock=stock), operands(packed=True)
    trained, evaluated = (call(module.train(mode), *qkv, packed_seq_params=packed_to()) for mode in (True, False))
    assert torch.equal(trained, evaluated) is is_ours
    assert call(module.eval(), *operands()).isnan().all()


def test_masks_and_packings_that_it_does_not_have_are_refused() -> None:
    """The mask is --reset-attention-mask's: documents do not see each other."""
    causal = torch.ones(1, 1, S, S, dtype=torch.bool).triu(1)
    documents = causal.expand(B, -1, -1, -1).clone()
    documents[:, :, S // 2 :, : S // 2] = True
    qkv = operands()
    torch.testing.assert_close(build()(*qkv, causal, attn_mask_type=None), expected(*qkv, is_causal=True))
    with pytest.raises(UnsupportedError, match="attention_mask: expected none or a causal one"):
        build()(*qkv, documents, attn_mask_type=None)
    assert build()(*qkv, documents, attn_mask_type=AttnMaskType.arbitrary).isnan().all()  # stock
    for end, padded in ((S * B - 1, False), (S * B + 1, False), (S * B, True)):
        packing = packed_to(end, padded=padded)
        with pytest.raises(UnsupportedError, match="padding between them" if padded else "packing.cu_seqlens_q"):
            call(build(), *operands(packed=True), packed_seq_params=packing)


def test_window_of_the_layers_that_have_one() -> None:
    q, k, v = operands()
    i, j = torch.arange(S)[:, None], torch.arange(S)
    windowed = expected(q, k, v, attn_mask=(j <= i) & (j >= i - 5))
    values = {"window_size": (5, 0), "window_attn_skip_freq": 2}
    torch.testing.assert_close(call(build(layer_number=1, **values), q, k, v), windowed)
    torch.testing.assert_close(call(build(layer_number=2, **values), q, k, v), expected(q, k, v, is_causal=True))


@pytest.mark.parametrize(
    ("values", "kwargs", "reason"),
    [
        ({"context_parallel_size": 2}, {}, "context parallelism"),
        ({"attention_dropout": 0.1}, {}, "attention dropout 0.1"),
        ({}, {"attention_dropout": 0.2}, "attention dropout 0.2"),
        ({"deterministic_mode": True}, {}, "--deterministic-mode"),
        ({"batch_invariant_mode": True}, {}, "--batch-invariant-mode"),
        ({"softmax_type": "learnable"}, {}, "softmax with an offset"),
        ({"qk_clip": True}, {}, "qk_clip"),
        ({}, {"k_channels": 24, "v_channels": 16}, "MLA"),
    ],
)
def test_stock_computes_what_ours_does_not_and_says_why(
    values: dict[str, Any], kwargs: dict[str, Any], reason: str
) -> None:
    module = build(kwargs=kwargs, **values)
    assert call(module, *operands()).isnan().all()
    assert f"attention=stock ({reason}" in repr(module)


@pytest.mark.parametrize(
    "options", [{"attention_bias": torch.zeros(1)}, {"attn_mask_type": AttnMaskType.arbitrary}, {"num_splits": 1}, {}]
)
def test_stock_computes_single_calls_that_ours_does_not(options: dict[str, Any]) -> None:
    assert call(build().train(bool(options)), *operands(), **options).isnan().all()


def test_first_and_last_layers_are_bf16_and_the_precision_file_names_others() -> None:
    settings = [build("fa3_fp8_emulated", True, n, first_last_layers_bf16=True).fp8_attention for n in (1, 2, 4)]
    assert [(one.backend, one.hadamard) for one in settings] == [
        ("reference", False),
        ("fa3_fp8_emulated", True),
        ("reference", False),
    ]
    payload = lambda **values: SimpleNamespace(config=values)  # noqa: E731
    module = build("fa3_fp8_emulated", hadamard=True)
    module.finish_init(None)
    module.finish_init(payload(transformer_engine_config_type="TEQuantizationParams"))
    assert (module.fp8_attention.backend, module.fp8_attention.hadamard) == ("fa3_fp8_emulated", True)
    module.finish_init(payload(fp8_attention_backend="reference"))
    assert (module.fp8_attention.backend, module.fp8_attention.hadamard) == ("reference", False)
    with pytest.raises(ConfigError, match=r"--fp8-attention-backend: .* got fa9"):
        module.finish_init(payload(fp8_attention_backend="fa9"))
    module.finish_init(payload(fp8_attention_backend="stock"))
    assert call(module, *operands()).isnan().all()


def test_a_backend_that_cannot_run_here_is_refused_when_the_model_is_built() -> None:
    with pytest.raises(UnsupportedError, match=r"fa3|CUDA"):
        build("fa3_fp8")
