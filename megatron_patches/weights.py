"""The E4M3 bytes of a weight, made once in each step: all micro-batches and their backwards read the same.

Megatron's optimizers write weights through `.data` and through the buffers of DDP, of which autograd's version counter
knows nothing. Its schedules say which micro-batch comes next (`layer.current_microbatch`): before the first of a step
weights may have changed. Under a loop that does not say it, and outside of training, every forward makes the bytes
anew.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from fp8_ds.nn.recipe import Fp8Weight, Recipe


class StepWeight:
    """What recipes read as `p._fp8` (fp8_ds/nn/recipe.py): quantised when it is first read after `expire`.

    Args:
        weight: [O, I]; held weakly, as it holds this.
        recipe: quantises it.
    """

    def __init__(self, weight: Tensor, recipe: Recipe) -> None:
        self._weight = weakref.ref(weight)
        self._recipe = recipe
        self._made: Fp8Weight | None = None
        self._state: tuple[Any, ...] = ()

    def expire(self) -> None:
        """The weight may have changed, without a trace that can be seen from here."""
        self._made = None

    def __reduce__(self) -> Any:
        """None: who pickles a Parameter with its attributes does not mean the cache."""
        return type(None), ()

    def _current(self) -> Fp8Weight:
        weight = self._weight()
        assert weight is not None, "read from the weight itself"
        state = weight._version, weight.data_ptr(), weight.dtype
        if self._made is None or state != self._state:
            self._made, self._state = self._recipe.quantize_weight(weight.detach()), state
        return self._made

    @property
    def data(self) -> Tensor:
        """float8_e4m3fn [O, I]."""
        return self._current().data

    @property
    def scale_inv(self) -> Tensor:
        """Its grid, multiply to leave FP8."""
        return self._current().scale_inv


class StepWeights:
    """Mix-in before a transformer layer of Megatron's: its FP8 linears learn when a step begins.

    Attributes:
        step_linears: those linears; empty until they are built.
    """

    step_linears: tuple[Any, ...] = ()
    _microbatch: int | None = None

    @property
    def current_microbatch(self) -> int:
        """Of the step, from 0, as Megatron's schedules set it before each forward.

        Raises:
            AttributeError: nobody has, as in stock layers.
        """
        if self._microbatch is None:
            raise AttributeError("current_microbatch")
        return self._microbatch

    @current_microbatch.setter
    def current_microbatch(self, number: int) -> None:
        self._microbatch = number
        for linear in self.step_linears:
            linear.begin_microbatch(number)
