"""`tree_ends` say that a row holds a tree, as `TreeCollator` gives it: documents with common beginnings."""

import pytest
import torch

import tritonpack
from tests.patches import zoo
from tests.patches.calls import EXACT, alone, documents
from tests.patches.comparison import apart
from tests.patches.models import tiny_model
from tests.patches.padded_batches import padded_batch, results


@pytest.mark.fast("gpt2", "mistral")
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "gpt_oss", "llama4_text"])
def test_sequences_equal_alone(family: str) -> None:
    begin, first, second, own = documents((4, 3, 5, 6))
    further = torch.cat([begin, first], 1)
    pieces = [torch.cat([begin, second], 1), own, further, torch.cat([further[:, :-1], second[:, :1]], 1), begin]
    model = zoo.tiny_model(family, dtype=torch.float64)
    want = alone(model, pieces, gradients=False).values
    tree = tritonpack.pack_tree([piece[0] for piece in pieces])
    call = {name: x for name, x in tree.inputs().items() if name in ("input_ids", "position_ids", "tree_ends")}
    for given in (call, {name: x for name, x in call.items() if name != "position_ids"}):
        with tritonpack.patch(model):
            output = model(**given)
        assert apart([want], [torch.cat(tree.gather(output.logits))]) < EXACT
        assert output.past_key_values is None


def test_loss_and_gradients_of_a_collated_tree() -> None:
    model, batch = tiny_model("mistral"), padded_batch(0)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    want, gradients = results(model, batch)
    rows = [row[live.bool()].tolist() for row, live in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    with tritonpack.patch(model):
        got, found = results(model, tritonpack.TreeCollator()([{"input_ids": row} for row in rows]))
    assert apart([want.loss.detach(), *gradients], [got.loss.detach(), *found]) < EXACT


def test_positions() -> None:
    """Depths, from any number in each tree, and any in padding: two rows of two trees, with padding and branches."""
    ends = torch.tensor([[5, 5, 2, 5, 5, 8, 8, 8], [0, 8, 8, 3, 8, 6, 8, 8]])
    depths = torch.tensor([[0, 1, 0, 2, 3, 0, 1, 2], [0, 0, 1, 0, 2, 3, 3, 4]])
    model, ids = tiny_model("llama", initializer_range=0.3), torch.arange(16).view(2, 8)
    others = depths.clone()
    others[0, :5] += 3
    others[0, 5:] += 50
    others[0, 2] = others[1, 0] = others[1, 3] = 77  # padding
    with tritonpack.patch(model), torch.no_grad():
        want = model(ids, tree_ends=ends).logits
        assert torch.equal(model(ids, tree_ends=ends, position_ids=depths.int()).logits, want)
        assert apart([want], [model(ids, tree_ends=ends, position_ids=others).logits]) < EXACT
        with pytest.raises(ValueError, match="token 14 of the flattened rows, 4 for a depth of 3"):
            model(ids, tree_ends=ends, position_ids=depths + (ids == 14))
