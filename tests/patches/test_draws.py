"""Models that draw random numbers in evaluation mode can be compared: their draws are made constant."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from tests.patches.sweep.draws import ConstantDraws, constant_draws_if_any

PROBABILITIES = torch.tensor([0.2, 0.7])
DRAWS = {
    "randn": (lambda n: torch.randn(n), 0.5),
    "rand": (lambda n: torch.rand_like(torch.ones(n)), 0.5),
    "normal": (lambda n: torch.normal(torch.full((n,), 3.0), torch.full((n,), 2.0)), 4.0),
    "normal_": (lambda n: torch.empty(n).normal_(1.0, 2.0), 2.0),
    "uniform_": (lambda n: torch.empty(n).uniform_(2.0, 4.0), 3.0),
    "bernoulli": (lambda n: torch.bernoulli(torch.ones(n), p=0.3), 0.0),
    "bernoulli_": (lambda n: torch.empty(n).bernoulli_(0.5), 1.0),
    "dropout": (lambda n: torch.nn.functional.dropout(torch.ones(n), 0.2, True), 1.25),
}


@pytest.mark.parametrize("name", DRAWS)
def test_each_draw_is_one_number_of_its_distribution(name: str) -> None:
    draw, expected = DRAWS[name]
    with ConstantDraws():
        for n in (3, 8):
            torch.testing.assert_close(draw(n), torch.full((n,), expected))
        assert torch.bernoulli(PROBABILITIES).tolist() == [0.0, 1.0]
        assert torch.multinomial(PROBABILITIES, 2).tolist() == [1, 0]
        assert torch.multinomial(PROBABILITIES, 2, replacement=True).tolist() == [1, 1]


@pytest.mark.parametrize("random", [False, True])
def test_draws_are_constant_only_for_models_that_draw(random: bool) -> None:
    def call() -> list[Tensor]:
        x = torch.nn.functional.dropout(torch.ones(3), 0.5, training=False)
        return [x * (torch.randn(3) if random else 1)]

    context = constant_draws_if_any(call)
    assert isinstance(context, ConstantDraws if random else nullcontext)
    with context:
        assert torch.equal(*call(), *call())
