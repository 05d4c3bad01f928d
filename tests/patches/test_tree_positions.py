"""Position ids beside `tree_ends`: depths, counted from any number in each tree. Others are refused."""

import pytest
import torch
from torch import Tensor

import tritonpack
from tests.patches.models import VOCAB, tiny_model
from tests.small_copies.comparison import apart, tolerance

# Two rows, each with two trees, padding between and within trees, and branches.
ENDS = torch.tensor([[5, 5, 2, 5, 5, 8, 8, 8], [0, 8, 8, 3, 8, 6, 8, 8]])
DEPTHS = torch.tensor([[0, 1, 0, 2, 3, 0, 1, 2], [0, 0, 1, 0, 2, 3, 3, 4]])
PADDING = [(0, 2), (1, 0), (1, 3)]


def logits(positions: Tensor | None) -> Tensor:
    model, ids = tiny_model("llama", initializer_range=0.3), torch.arange(16).view(2, 8) % VOCAB
    with tritonpack.patch(model), torch.no_grad():
        return model(ids, tree_ends=ENDS, position_ids=positions).logits


def test_depths_are_the_positions_of_a_tree() -> None:
    assert torch.equal(logits(DEPTHS), logits(None))
    assert torch.equal(logits(DEPTHS.int()), logits(None))


def test_each_tree_may_count_from_any_number_and_padding_may_have_any() -> None:
    positions = DEPTHS.clone()
    positions[0, :5] += 3
    positions[0, 5:] += 50
    for place in PADDING:
        positions[place] = 77
    assert apart([logits(positions)], [logits(None)]) < tolerance(torch.float64)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (torch.arange(8).expand(2, 8), "token 3 of the flattened rows, 3 for a depth of 2"),
        (torch.arange(8)[None], "token 3 of the flattened rows, 3 for a depth of 2"),
        (torch.zeros_like(DEPTHS), "token 1 of the flattened rows, 0 for a depth of 1"),
        (DEPTHS + (torch.arange(16).view(2, 8) == 14), "token 14 of the flattened rows, 4 for a depth of 3"),
    ],
    ids=["places in the row", "one row for all", "zeros", "one token"],
)
def test_other_positions_are_refused(positions: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"tree_ends and position_ids contradict each other at {message}.*diagonal"):
        logits(positions)
