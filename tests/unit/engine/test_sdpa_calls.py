"""What is read of the calls of SDPA in a model's own source."""

from __future__ import annotations

from contextlib import nullcontext  # noqa: F401  (this and the next: for the sources below)
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: F401
from torch.nn.functional import scaled_dot_product_attention  # noqa: F401
from torch.nn.functional import scaled_dot_product_attention as attend_by_torch  # noqa: F401

from fp8_ds.engine.sdpa_calls import SdpaCall, sdpa_calls

IS_CAUSAL = True
EXACT = {"causal": True, "has_mask": False, "is_grouped": False, "dropout": 0.0, "is_certain": True}


def read(model: nn.Module) -> list[dict[str, Any]]:
    fields = [name for name in SdpaCall.__dataclass_fields__ if name != "module"]
    return [{name: getattr(call, name) for name in fields} for call in sdpa_calls(model)]


class Base(nn.Module):
    """Attributes as models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.flash, self.causal, self.p, self.num_kv_heads, self.num_heads = True, True, 0.25, 2, 4
        self.drop = nn.Dropout(0.5)
        self.no_mask = None
        self.register_buffer("mask", torch.ones(2, 2))
        self.attn_fn = F.scaled_dot_product_attention

    @property
    def is_computed(self) -> bool:
        raise AssertionError("the code of properties is not run")


def a_helper(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, is_causal=IS_CAUSAL)


def manual(q: Any, k: Any, v: Any) -> Any:
    return (q @ k.mT).softmax(-1) @ v


def forward(source: str) -> type[Base]:
    """A Base with this forward, whose text can be read."""
    import linecache

    name = f"<forward {abs(hash(source))}>"
    lines = ["def forward(self, q, k, v, mask=None, causal=True):", *(f"    {line}" for line in source.splitlines())]
    linecache.cache[name] = (len(source), None, [f"{line}\n" for line in lines], name)
    space: dict[str, Any] = dict(globals())
    exec(compile("\n".join(lines), name, "exec"), space)
    return type("Own", (Base,), {"forward": space["forward"], "__module__": __name__})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("return F.scaled_dot_product_attention(q, k, v, is_causal=True)", {}),
        ("return torch.nn.functional.scaled_dot_product_attention(q, k, v, None, 0.0, True)", {}),
        ("return attend_by_torch(q, k, v, is_causal=IS_CAUSAL)", {}),
        ("return self.attn_fn(q, k, v, is_causal=self.causal)", {}),
        ("out = a_helper(q, k, v)\nreturn out.mT", {}),
        ("return scaled_dot_product_attention(q, k, v)", {"causal": False}),
        ("return scaled_dot_product_attention(q, k, v, is_causal=causal)", {"causal": None}),
        ("return scaled_dot_product_attention(q, k, v, is_causal=self.is_computed)", {"causal": None}),
        ("return scaled_dot_product_attention(q, k, v, attn_mask=self.no_mask, is_causal=True)", {}),
        ("return scaled_dot_product_attention(q, k, v, self.mask)", {"causal": False, "has_mask": True}),
        ("return scaled_dot_product_attention(q, k, v, mask)", {"causal": False, "has_mask": None}),
        ("is_causal = self.causal and not False\nreturn a_helper(q, k, v) if is_causal else q", {}),
        (
            "p = self.p if self.training else 0\nreturn attend_by_torch(q, k, v, dropout_p=p, is_causal=True)",
            {"dropout": 0.25},
        ),
        ("return attend_by_torch(q, k, v, None, self.drop.p, True)", {"dropout": 0.5}),
        ("return attend_by_torch(q, k, v, dropout_p=self.p * 2, is_causal=True)", {"dropout": None}),
        (
            "return attend_by_torch(q, k, v, is_causal=True, enable_gqa=self.num_heads != self.num_kv_heads)",
            {"is_grouped": True},
        ),
        (
            "return attend_by_torch(q, k, v, **{'is_causal': True})",
            {"causal": None, "has_mask": None, "is_grouped": None, "dropout": None},
        ),
        ("if self.flash:\n    return a_helper(q, k, v)\nreturn manual(q, k, v)", {}),
        ("if not self.flash:\n    return manual(q, k, v)\nreturn a_helper(q, k, v)", {}),
        ("with nullcontext():\n    return a_helper(q, k, v)", {}),
        ("if mask is None:\n    return a_helper(q, k, v)\nreturn manual(q, k, v)", {"is_certain": False}),
        ("if mask is not None:\n    return manual(q, k, v)\nreturn a_helper(q, k, v)", {"is_certain": False}),
        ("return manual(q, k, v) if mask is not None else a_helper(q, k, v)", {"is_certain": False}),
    ],
)
def test_a_call_is_read_with_what_it_is_given_in_training(source: str, expected: dict[str, Any]) -> None:
    model = forward(source)().eval()  # which it will not be in training
    assert read(model) == [{**EXACT, **expected}]


@pytest.mark.parametrize(
    "source",
    [
        "return manual(q, k, v)",
        "if not self.flash:\n    return a_helper(q, k, v)\nreturn manual(q, k, v)",
        "if self.flash:\n    return manual(q, k, v)\nreturn a_helper(q, k, v)",
        "with nullcontext():\n    if self.flash:\n        return manual(q, k, v)\nreturn a_helper(q, k, v)",
        "with sdpa_kernel(SDPBackend.MATH):\n    return a_helper(q, k, v)",
        "F = self\nreturn F.scaled_dot_product_attention(q, k, v)",
        "from somewhere import attend_by_torch\nreturn attend_by_torch(q, k, v)",
        "raise NotImplementedError\nreturn a_helper(q, k, v)",
    ],
)
def test_where_none_is_seen_or_another_kernel_is_chosen_nothing_is_said(source: str) -> None:
    assert read(forward(source)()) == []


def test_what_somebody_has_put_in_its_place_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = forward("return F.scaled_dot_product_attention(q, k, v, is_causal=True)")()
    assert read(model) == [EXACT]
    monkeypatch.setattr(F, "scaled_dot_product_attention", manual)
    assert read(model) == []


def test_methods_of_the_module_are_followed_and_a_forward_that_was_replaced_is_not() -> None:
    class Own(Base):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return self.attend(q, k, v)

        def attend(self, q: Any, k: Any, v: Any) -> Any:
            return self.attend_static(q, k, v, self)

        @staticmethod
        def attend_static(q: Any, k: Any, v: Any, module: Base) -> Any:
            return F.scaled_dot_product_attention(q, k, v, is_causal=module.causal)

    model = Own()
    assert read(model) == [{**EXACT, "causal": None}]
    model.forward = lambda q, k, v: q  # type: ignore[method-assign]
    assert read(model) == []


def test_a_function_that_calls_itself_ends() -> None:
    class Own(Base):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return self.forward(q, k, v)

    assert read(Own()) == []


def test_modules_of_one_class_are_asked_one_by_one_where_a_branch_depends_on_them() -> None:
    kind = forward("if self.flash:\n    return a_helper(q, k, v)\nreturn manual(q, k, v)")
    first, second = kind(), kind()
    first.flash = False
    assert [call.module for call in sdpa_calls(nn.ModuleList((first, second)))] == [second]


class Traps:
    """An instance whose code is not to be run by a reader."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"__getattr__ was asked for {name}")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("__eq__ was asked")

    __hash__ = None  # type: ignore[assignment]


class Number(int):
    def __bool__(self) -> bool:
        raise AssertionError("__bool__ was asked")


class Descriptor:
    def __get__(self, owner: Any, kind: Any = None) -> Any:
        raise AssertionError("a descriptor was asked")


@pytest.mark.parametrize(
    "given", ["self.traps.causal", "self.traps == 3", "not self.number", "self.descriptor", "self.gone"]
)
def test_no_code_of_the_models_is_run(given: str) -> None:
    kind = forward(f"return scaled_dot_product_attention(q, k, v, is_causal={given})")
    kind.descriptor = Descriptor()  # type: ignore[attr-defined]
    model: Any = kind()
    model.traps, model.number = Traps(), Number(1)
    assert read(model) == [{**EXACT, "causal": None}]


def test_names_that_a_loop_makes_of_each_other_are_not_known() -> None:
    source = "for _ in range(2):\n    first = second\n    second = first\n"
    assert read(forward(f"{source}return attend_by_torch(q, k, v, is_causal=first)")()) == [{**EXACT, "causal": None}]


def test_a_function_around_a_name_that_is_given_later_is_read() -> None:
    class Own(Base):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return F.scaled_dot_product_attention(late(q), k, v, is_causal=True)

    assert read(Own()) == [EXACT]
    late = torch.clone


def test_torchs_own_modules_are_not_read() -> None:
    assert read(nn.TransformerEncoderLayer(8, 2)) == []
