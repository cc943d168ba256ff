"""Which linears read a module's output, as the source of `forward` says."""

import pytest
from torch import nn

from fp8_ds.nn.fused.search import linears_that_read


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(4)
        self.q, self.k, self.v, self.o = (nn.Linear(4, 4) for _ in range(4))

    def reads(self):
        names = {linear: name for name, linear in self.named_modules()}
        return [names[linear] for linear in linears_that_read(self, "norm")]


class Plain(Base):
    def forward(self, x):
        residual = x
        h = self.norm(x)
        q, k = self.q(h), self.k(h).view(-1)
        return residual + q + k + self.v(h) + self.o(residual)


class Nested(Base):
    def forward(self, x):
        return x + self.q(self.norm(x))


class Reassigned(Base):
    def forward(self, x):
        x = self.norm(x)
        x = self.q(x) + self.k(x)
        return self.v(x)


class InABranch(Base):
    def forward(self, x):
        if x.sum() > 0:
            x = self.norm(x)
            x = self.q(x)
        else:
            x = self.k(x)
        return self.o(x)


class OtherBranch(Base):
    """What one branch assigns the other does not see, nor the code behind."""

    def forward(self, x):
        if x.sum() > 0:
            x = self.norm(x)
        else:
            x = self.k(x)
        return self.o(x)


class Twice(Base):
    def forward(self, x):
        return self.q(self.norm(x)) + self.k(self.norm(x))


class Part(Base):
    """Only what is read as it is: the chunk is another tensor."""

    def forward(self, x):
        h = self.norm(x)
        first = h[:1]
        return self.q(first) + self.k(h)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (Plain, ["q", "k", "v"]),
        (Nested, ["q"]),
        (Reassigned, ["q", "k"]),
        (InABranch, ["q"]),
        (OtherBranch, []),
        (Twice, []),
        (Part, ["k"]),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_calls_are_followed_until_the_name_means_something_else(module, expected):
    assert module().reads() == expected


def test_a_forward_without_source_or_of_the_instance_reads_nothing():
    namespace = {"Base": Base}
    exec("class Made(Base):\n    def forward(self, x):\n        return self.q(self.norm(x))", namespace)
    assert namespace["Made"]().reads() == []
    module = Nested()
    module.forward = lambda x: module.k(module.norm(x))
    assert module.reads() == []
