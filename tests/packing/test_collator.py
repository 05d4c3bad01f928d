"""PackingCollator: the batch for each objective, kind of column and mask. test_refusals.py has what it refuses."""

import sys
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import tritonpack
from tests.packing.tries import REPEATABLE
from tests.packing.vision.test_collator import LLAVA
from tritonpack import PackingCollator, PackingWarning, TreeCollator, VisionPackingCollator, notices
from tritonpack.packing.collator import LEARNED

IGNORED = -100
IDS = [5, 6, 7, 8]


def collate(*features: Any, **settings: Any) -> dict[str, Any]:
    return PackingCollator(**settings)(features)


def test_documents_share_a_row():
    batch = collate({"input_ids": [5, 6, 7]}, {"input_ids": [8]}, {"input_ids": [9, 4]})
    expected = {
        "input_ids": torch.tensor([[5, 6, 7, 8, 9, 4]]), "labels": torch.tensor([[IGNORED, 6, 7, IGNORED, IGNORED, 4]]),
        "position_ids": torch.tensor([[0, 1, 2, 0, 0, 1]]), "seq_idx": torch.tensor([[0, 0, 0, 1, 2, 2]]).int(),
        "cu_seq_lens_q": torch.tensor([0, 3, 4, 6]).int(), "cu_seq_lens_k": torch.tensor([0, 3, 4, 6]).int(),
        "max_length_q": 3, "max_length_k": 3,
    }  # fmt: skip
    assert str(batch) == str(expected)


@REPEATABLE
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from([None, 4, 64]), st.sampled_from([None, 3]),
    st.sampled_from(["causal", "tokens"]), st.sampled_from(["documents", "seq_lengths", "position_ids", "both"]),
)  # fmt: skip
def test_every_document_once_with_its_columns(lengths, multiple, longest, objective, form):
    """Padding is one more document, which a masker must leave alone; causal models have no label at first tokens.

    A row of documents is its documents.
    """
    documents: Any = [
        {"input_ids": [number + 1] * length, "special_tokens_mask": [0] * length}
        for number, length in enumerate(lengths)
    ]
    if form != "documents":
        row = {name: [value for one in documents for value in one[name]] for name in documents[0]}
        row |= {"seq_lengths": lengths} if form != "position_ids" else {}
        row |= {"position_ids": [at for n in lengths for at in range(n)]} if form != "seq_lengths" else {}
        documents = [row]
    batch = collate(*documents, max_document_length=longest, objective=objective, pad_to_multiple_of=multiple)
    cut = [min(length, longest or length) for length in lengths]
    tokens = [number + 1 for number, length in enumerate(cut) for _ in range(length)]
    padded = -len(tokens) % (multiple or 1)
    every = cut + [padded] * (padded > 0)
    assert batch["input_ids"][0].tolist() == tokens + [0] * padded
    assert batch["special_tokens_mask"][0].tolist() == [0] * len(tokens) + [1] * padded
    assert batch["cu_seq_lens_q"].diff().tolist() == every
    assert batch["seq_idx"][0].tolist() == [number for number, length in enumerate(every) for _ in range(length)]
    assert batch["max_length_q"] == batch["max_length_k"] == max(every)
    assert batch["position_ids"][0].tolist() == [place for length in every for place in range(length)]
    if multiple is not None:  # also of full rows: the same arguments for every batch make one graph
        assert batch["attention_mask"].tolist() == [[1] * len(tokens) + [0] * padded]
    if objective == "causal":
        expected = batch["input_ids"].clone()
        expected[:, len(tokens) :] = expected[:, np.cumsum([0, *every])[:-1]] = IGNORED
        assert torch.equal(batch["labels"], expected)
    else:
        assert "labels" not in batch


def read_only(ids):
    array = np.array(ids)
    array.flags.writeable = False
    return array


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("convert", [
    list, tuple, torch.tensor, torch.IntTensor, read_only, lambda ids: np.array(ids, dtype=np.uint16),
    lambda ids: torch.tensor(ids, dtype=torch.uint64), lambda ids: np.array(ids, dtype=">i4"),
    lambda ids: list(np.array(ids)),
])  # fmt: skip
def test_types_of_columns_which_stay_unchanged(convert):
    names = ("input_ids", "labels", "attention_mask", "completion_mask")
    feature = {name: convert([1, 1, 1]) for name in names}
    batch = collate(feature)
    assert batch["input_ids"].tolist() == [[1, 1, 1]]
    assert batch["labels"].tolist() == [[IGNORED, 1, 1]]
    for value in batch.values():
        if isinstance(value, torch.Tensor):
            value.zero_()
    assert all(list(map(int, feature[name])) == [1, 1, 1] for name in names)


# objective, a column of two documents of 3 and 1 tokens, and what becomes of it
COLUMNS: list[Any] = [
    ("tokens", "labels", ([2, IGNORED, 0], [1]), [[2, IGNORED, 0, 1]]),
    ("causal", "length", (3, 1), None),
    ("causal", "token_type_ids", ([0, 1, 1], [0]), [[0, 1, 1, 0]]),
    ("causal", "w", ([0.5, 1, 2], np.array([70000.0])), [[0.5, 1, 2, 70000.0]]),
    ("causal", "w", ([[1, 2]] * 3, [[3, 4]]), [[[1, 2]] * 3 + [[3, 4]]]),
]


@pytest.mark.parametrize(("objective", "name", "both", "expected"), COLUMNS)
def test_columns(objective, name, both, expected):
    features = [{"input_ids": ids, name: values} for ids, values in zip(([5, 6, 7], [8]), both, strict=True)]
    for given_features in (features, [features]):  # documents, or a list of them
        batch = collate(*given_features, objective=objective, per_token=["w"] if name == "w" else ())
        assert batch["input_ids"].tolist() == [[5, 6, 7, 8]]
        assert (batch[name].tolist() if name in batch else None) == expected


# Labels beside a mask: labels, mask -> what the labels become; or the label that is refused, and its token.
MASKED: list[Any] = [
    ([5, 6, 7, 8], [0, 0, 1, 1], [-100, -100, 7, 8]),
    (None, [0, 1, 0, 1], [-100, 6, -100, 8]),
    ([-100, -100, -100, 8], [0, 0, 1, 1], [-100, -100, -100, 8]),
    ([-100, -100, 9, 8], [0, 0, 1, 1], [-100, -100, 9, 8]),
    ([5, 6, 7, 8], [0, 0, 0, 0], [-100] * 4),
    ([5, 9, 7, 8], [1, 1, 1, 1], [-100, 9, 7, 8]),
    ([5, -100, 7, -100], [0, 0, 1, 1], "5 at token 0"),
    ([-100, 6, 7, 8], [0, 0, 1, 1], "6 at token 1"),
    ([-100, 6, 9, 8], [0, 1, 0, 1], "9 at token 2"),
]


def through_table(rows: Any) -> dict[str, Any]:
    packed = tritonpack.pack_dataset(pytest.importorskip("datasets").Dataset.from_list(rows), 4)
    return PackingCollator()([packed[0]])


WAYS: dict[str, Any] = {
    "PackingCollator": lambda rows: collate(rows[0]),
    "a row of documents": lambda rows: collate(rows[0] | {"seq_lengths": [4]}),
    "dataloader": lambda rows: next(iter(tritonpack.dataloader(rows, tokens=4))),
    "pack_dataset": through_table,
    "TreeCollator": lambda rows: TreeCollator()(rows[:1]),
}


@pytest.mark.fast(
    "PackingCollator-completion_mask", "a row of documents-assistant_masks", "TreeCollator-assistant_masks"
)
@pytest.mark.parametrize("mask", LEARNED)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_combines_labels_with_masks_alike(way: str, mask: str) -> None:
    for labels, values, expected in MASKED:
        rows = [{"input_ids": IDS, mask: values} | ({} if labels is None else {"labels": labels})] * 2
        if isinstance(expected, str):
            message = rf"document 0 has the label {expected}, where its {mask} is 0.*aren't\. Set such labels to -100"
            with pytest.raises(ValueError, match=message):
                WAYS[way](rows)
            continue
        found = WAYS[way](rows)["labels"][0].tolist()
        assert found == [label for label in expected if label != -100 or way != "TreeCollator"]


def test_masks_beside_each_other_and_in_rows() -> None:
    """A token is learned where every mask is 1. The documents of a row choose for themselves."""
    row = {"input_ids": IDS, "completion_mask": [False, True, True, True], "assistant_masks": [1, 1, 0, 1]}
    batch = collate(row)
    assert batch["labels"].tolist() == [[-100, 6, -100, 8]]
    assert all(batch[name].tolist() == [[int(value) for value in row[name]]] for name in LEARNED)
    two = {"input_ids": [*IDS, *IDS], "seq_lengths": [4, 4], "completion_mask": [0, 0, 1, 1, 0, 0, 1, 1]}
    chosen = collate(two | {"labels": [*IDS, -100, -100, -100, 8]})["labels"]
    assert chosen.tolist() == [[-100, -100, 7, 8, -100, -100, -100, 8]]
    for features, settings, message in (
        (row | {"labels": [-100, 6, 7, 8]}, {}, "label 7 at token 2, where its assistant_masks is 0"),
        (two | {"labels": [*IDS, -100, 6, -100, 8]}, {"max_document_length": 1}, "document 0 has the label 6 at token"),
    ):
        with pytest.raises(ValueError, match=message):
            collate(features, **settings)


DOCUMENTS = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]


@pytest.fixture
def fresh_process(monkeypatch):
    """transformers is imported, no warning was given and no model is patched yet."""
    pytest.importorskip("transformers.modeling_utils")
    monkeypatch.setattr(notices, "said", {})
    monkeypatch.setattr(notices, "patched_models", weakref.WeakSet())


def warned(documents=DOCUMENTS, collator=PackingCollator()):  # noqa: B008
    """The PackingWarnings of two calls."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        _ = collator(documents), collator(documents)
    return [str(warning.message) for warning in found if warning.category is PackingWarning]


@pytest.mark.parametrize(("collator", "words"), [
    (PackingCollator(), "FlashAttention implementations, which read position_ids in training, do so, too."),
    (PackingCollator(8, 0), "don't beside the mask of pad_to_multiple_of."),
    (VisionPackingCollator(LLAVA), "Call tritonpack.patch(model) before the first batch."),
    (TreeCollator(), "Other models ignore tree_ends"),
])  # fmt: skip
def test_warns_once_without_a_patched_model(collator, words, fresh_process, monkeypatch):
    (message,) = warned(collator=collator)
    assert f"{type(collator).__name__} laid 2 documents into one" in message
    assert words in message
    notices.said.clear()
    assert not warned(DOCUMENTS[:1], collator)
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils")
    assert not warned(collator=collator)


@pytest.mark.parametrize(("method", "count"), [("fork", 1), pytest.param("spawn", 0, marks=pytest.mark.slow)])
def test_only_forked_workers_warn(method, count, fresh_process):
    options = {"num_workers": 1, "collate_fn": warned, "multiprocessing_context": method}
    assert sum(map(len, DataLoader(DOCUMENTS * 4, 2, **options))) == count
    if method == "fork":
        from tests.packing.test_training import tiny_llama

        with tritonpack.patch(tiny_llama()):
            assert not any(DataLoader(DOCUMENTS * 2, 2, **options))
