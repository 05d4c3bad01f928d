"""pack_tree and TreeCollator: the tree, the way back, and the loss and gradients of each sequence alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.packing.test_training import IGNORED, VOCABULARY, learned, pad, tiny_llama
from tests.packing.tries import REPEATABLE
from tritonpack import BlockDiagonalMask, TreeCollator, pack_tree

GROUPS = [[7, 8, 9, 3, 4], [5, 6], [7, 8, 9, 3, 2, 1], [7, 8], [5, 6], [1], [7, 8, 9, 3, 4, 4]]
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=7)


def labels_after(sequences, prompt, step=0):
    """Labels that leave out the first tokens of each sequence, and differ between sequences by `step`."""
    return [
        [IGNORED if place < prompt else token + step * number for place, token in enumerate(row)]
        for number, row in enumerate(sequences)
    ]


def close(actual, expected, dtype=torch.float64):
    """Equal up to 1,000 roundings of the largest value: sums of a few hundred terms in other orders."""
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() <= 1000 * torch.finfo(dtype).eps * b.abs().max()


@REPEATABLE
@given(SEQUENCES, st.integers(0, 3))
def test_every_begin_is_one_token_and_predicts_its_targets(sequences, prompt):
    labels = labels_after(sequences, prompt, 10)
    batch = pack_tree(sequences, labels=labels)
    parents, paths = batch.parents.tolist(), []
    for place, token in enumerate(batch.input_ids[0].tolist()):
        paths.append((*(paths[parents[place]] if parents[place] >= 0 else ()), token))
    assert sorted(paths) == sorted({tuple(row[:stop]) for row in sequences for stop in range(1, len(row) + 1)})
    assert batch.position_ids[0].tolist() == [len(path) - 1 for path in paths]
    by_parents = BlockDiagonalMask.from_tree(batch.parents)
    assert torch.equal(batch.ends, by_parents.query_stop.long())
    assert torch.equal(batch.mask.to_dense(), by_parents.to_dense())
    assert [row.tolist() for row in batch.gather(batch.input_ids)] == sequences
    expected = [
        (tuple(row[: place + 1]), label)
        for row, own in zip(sequences, labels, strict=True)
        for place, label in enumerate(own[1:])
        if label != IGNORED
    ]
    found = zip(batch.logits_to_keep.tolist(), batch.targets.tolist(), strict=True)
    assert [(paths[place], target) for place, target in found] == expected
    assert list(batch.target_counts) == [sum(label != IGNORED for label in own[1:]) for own in labels]


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logprobs(kept, dtype):
    """Of each sequence alone; gradients of `gather` add up."""
    labels = labels_after(GROUPS, 2)
    batch = pack_tree(GROUPS, labels=labels)
    logits = torch.randn(1, batch.num_tokens, VOCABULARY, dtype=dtype, requires_grad=True)
    found = batch.logprobs(logits[:, batch.logits_to_keep] if kept else logits, kept=kept)
    alone = []
    for row, own, scores in zip(GROUPS, labels, batch.gather(logits.double()), strict=True):
        scores = scores[:-1].log_softmax(-1)[range(len(row) - 1), row[1:]]
        alone.append(scores[torch.tensor(own[1:]) != IGNORED])
    assert [len(one) for one in found] == [3, 0, 4, 0, 0, 0, 4]
    assert {one.dtype for one in found} == {torch.float32}
    close([torch.cat(found)], [torch.cat(alone)], torch.float32)
    weights = torch.randn(11)
    actual, expected = (
        torch.autograd.grad((torch.cat(one) * weights).sum(), logits, retain_graph=True)[0] for one in (found, alone)
    )
    close([actual], [expected], dtype)


@pytest.mark.parametrize("prompt", [0, 3])
def test_model_in_a_tree_equals_the_model_on_each_sequence(prompt):
    """Loss and gradients in float32, in which transformers computes norms and the loss."""
    model, labels = tiny_llama(), labels_after(GROUPS, prompt)
    features = [{"input_ids": row, "labels": own} for row, own in zip(GROUPS, labels, strict=True)]
    batch = pack_tree(GROUPS, labels=labels)
    inputs = batch.inputs() | {"attention_mask": batch.mask.to_dense()[None, None]}  # which stock models take
    del inputs["tree_ends"]
    close(learned(model, **inputs), learned(model, **pad(features)), torch.float32)


def test_to_moves_everything_but_ends():
    batch = pack_tree(GROUPS).to("meta")
    moved = (*batch.inputs().values(), batch.parents, batch.places, batch.mask)
    assert {x.device.type for x in moved} == {"meta"}
    assert batch.ends.device.type == "cpu"


WRONG = [  # N = 3, M = 2
    *[(lambda batch, one=one: batch.gather(one), r"values must be of shape \(1, 3, ...\): the row has N = 3")
      for one in (torch.zeros(4), torch.zeros(2, 3, 5), [1, 2, 3])],
    *[(lambda batch, one=one, kept=kept: batch.logprobs(one, kept=kept), r"of shape \(1, [23], vocab.* of M = 2")
      for kept, size in ((True, 3), (False, 2)) for one in (torch.zeros(1, size, 5), torch.zeros(1, 5 - size))],
    (lambda batch: batch.logprobs(torch.zeros(1, 3, 3)), "a vocabulary of 3 tokens, and the largest target is 3"),
    (lambda batch: batch.logprobs(torch.zeros(1, 2, 5), kept=1), "kept must be True or False; got int 1"),
    (lambda batch: batch.gather(torch.zeros(1, 3, device="meta")), r"lie on meta and .*batch\.to\('meta'\)"),
    (lambda batch: batch.gather(torch.zeros(1, 3), padded=True), "padded of gather was removed: torch.nn.utils.rnn"),
    (lambda batch: TreeCollator(capacity=5), "capacity= of TreeCollator was removed: dataloader"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(pack_tree([[1, 2], [1, 3]]))


@pytest.mark.filterwarnings("ignore:unpatched-tree")
@pytest.mark.parametrize("columns", ["labels", "completion_mask", "assistant_masks", None])
def test_collator_makes_the_batch_of_pack_tree(columns):
    labels = labels_after(GROUPS, 0 if columns is None else 2)
    features = [{"input_ids": row, "attention_mask": [1] * len(row), "length": len(row)} for row in GROUPS]
    for feature, own in zip(features, labels, strict=True) if columns else ():
        feature[columns] = own if columns == "labels" else [int(label != IGNORED) for label in own]
    expected = pack_tree(GROUPS, labels=labels).inputs()
    for given_features in (features, [features[:3], features[3:]]):  # documents, or groups of them
        assert str(TreeCollator()(given_features)) == str(expected)
