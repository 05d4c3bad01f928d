"""The columns of documents in PackingCollator: which are packed, cut, left out or refused, for each objective."""

import numpy as np
import pytest
import torch

from tritonpack import PackingCollator

IGNORED = -100


def collate(*features, **settings):
    return PackingCollator(**settings)(features)


def plain(batch):
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def test_tokens_objective_keeps_all_labels():
    batch = collate(
        {"input_ids": [5, 6, 7], "labels": [2, IGNORED, 0]}, {"input_ids": [8], "labels": [1]}, objective="tokens"
    )
    assert batch["labels"].tolist() == [[2, IGNORED, 0, 1]]


def test_tokens_objective_makes_no_labels():
    assert "labels" not in collate({"input_ids": [5, 6, 7]}, {"input_ids": [8]}, objective="tokens")


@pytest.mark.parametrize(
    ("labels", "dtype"),
    [
        ([2, 0], torch.int64),
        ([True, False], torch.int64),
        ([np.int16(2), np.int16(0)], torch.int64),
        ([torch.tensor(2), torch.tensor(0)], torch.int64),
        ([0.5, -1.0], torch.float32),
        ([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]], torch.float32),
        ([np.array([0.5]), np.array([1.5])], torch.float64),
    ],
)
def test_documents_objective_takes_one_label_per_document(labels, dtype):
    batch = collate(
        {"input_ids": [5, 6, 7], "label": labels[0]}, {"input_ids": [8], "label": labels[1]}, objective="documents"
    )
    assert batch["labels"].dtype == dtype
    assert batch["labels"].tolist() == [label.tolist() if hasattr(label, "tolist") else label for label in labels]
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8]]


def test_padding_adds_no_document_label():
    batch = collate(
        {"input_ids": [5, 6, 7], "label": 1},
        {"input_ids": [8], "label": 0},
        objective="documents",
        pad_to_multiple_of=8,
        pad_token_id=0,
    )
    assert batch["labels"].tolist() == [1, 0]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0, 0, 0]]


@pytest.mark.parametrize("name", ["labels", "label", "label_ids"])
@pytest.mark.parametrize("objective", ["causal", "tokens"])
def test_names_of_labels(name, objective):
    batch = collate({"input_ids": [5, 6, 7], name: [1, 2, 3]}, objective=objective)
    assert batch["labels"].tolist() == [[IGNORED if objective == "causal" else 1, 2, 3]]
    assert name == "labels" or name not in batch


def test_columns_with_one_value_per_token():
    documents = (
        {"input_ids": [5, 6, 7], "token_type_ids": [0, 1, 1], "special_tokens_mask": [1, 0, 0], "length": 3},
        {"input_ids": [8, 9], "token_type_ids": [0, 0], "special_tokens_mask": [1, 1], "length": 2},
    )
    batch = collate(*documents, pad_to_multiple_of=4, pad_token_id=0)
    assert batch["token_type_ids"].tolist() == [[0, 1, 1, 0, 0, 0, 0, 0]]
    assert batch["special_tokens_mask"].tolist() == [[1, 0, 0, 1, 1, 1, 1, 1]], "a masker must leave padding alone"
    assert "length" not in batch


@pytest.mark.parametrize("mask", ["completion_mask", "assistant_masks"])
@pytest.mark.parametrize("as_type", [int, bool])
def test_completion_masks_make_labels(mask, as_type):
    values = [as_type(value) for value in (0, 1, 0, 1)]
    batch = collate({"input_ids": [5, 6, 7, 8], mask: values}, {"input_ids": [9, 9, 9, 9], mask: values})
    assert batch["labels"].tolist() == [[IGNORED, 6, IGNORED, 8, IGNORED, 9, IGNORED, 9]]
    assert batch[mask].tolist() == [[0, 1, 0, 1, 0, 1, 0, 1]]


def test_uint64_ids_that_fit_int64():
    for ids in (torch.tensor([5, 2**40], dtype=torch.uint64), np.array([5, 2**40], np.uint64)):
        assert collate({"input_ids": ids})["input_ids"].tolist() == [[5, 2**40]]


def test_float_dtypes_may_differ():
    documents = ({"input_ids": [5], "w": np.array([0.5], np.float16)}, {"input_ids": [8], "w": [70000.0]})
    assert collate(*documents, per_token=("w",))["w"].tolist() == [[0.5, 70000.0]]


def test_per_token_columns():
    documents = (
        {"input_ids": [5, 6], "bbox": [[1, 2], [3, 4]], "weights": [0.5, 1.0]},
        {"input_ids": [8], "bbox": [[5, 6]], "weights": [0.25]},
    )
    batch = collate(*documents, per_token=("bbox", "weights"), pad_to_multiple_of=4, pad_token_id=0)
    assert batch["bbox"].tolist() == [[[1, 2], [3, 4], [5, 6], [0, 0]]]
    assert batch["weights"].tolist() == [[0.5, 1.0, 0.25, 0.0]]
    assert batch["weights"].dtype == torch.float32


def test_max_document_length_cuts_all_columns():
    documents = (
        {"input_ids": [5, 6, 7, 8], "labels": [1, 2, 3, 4], "token_type_ids": [0, 0, 1, 1], "attention_mask": [1] * 4},
        {"input_ids": [9], "labels": [9], "token_type_ids": [0]},
    )
    cut = plain(collate(*documents, max_document_length=3, objective="tokens"))
    by_hand = [{name: values[:3] for name, values in document.items()} for document in documents]
    assert cut == plain(collate(*by_hand, objective="tokens"))
    assert cut["input_ids"] == [[5, 6, 7, 9]]
    assert cut["labels"] == [[1, 2, 3, 9]]


def test_max_document_length_keeps_document_labels():
    document = {"input_ids": [5, 6, 7], "label": [0.0, 1.0, 1.0, 0.0]}
    batch = collate(document, objective="documents", max_document_length=2)
    assert batch["labels"].tolist() == [[0.0, 1.0, 1.0, 0.0]]
    assert batch["input_ids"].tolist() == [[5, 6]]


@pytest.mark.parametrize("longest", [None, 2])
@pytest.mark.parametrize("objective", ["causal", "tokens", "documents"])
def test_rows_of_documents_are_their_documents(objective, longest):
    lengths = [3, 1, 4]
    documents = [{"input_ids": [*range(5, 5 + n)], "token_type_ids": [n] * n} for n in lengths]
    row = {name: [value for document in documents for value in document[name]] for name in documents[0]}
    if objective == "documents":
        documents = [document | {"label": n % 2} for document, n in zip(documents, lengths, strict=True)]
        row["label"] = [n % 2 for n in lengths]
    boundaries = {"seq_lengths": lengths, "position_ids": [place for n in lengths for place in range(n)]}
    settings = {"objective": objective, "max_document_length": longest}
    expected = plain(collate(*documents, *documents, **settings))
    for names in (["seq_lengths"], ["position_ids"], ["seq_lengths", "position_ids"]):
        marked = row | {name: boundaries[name] for name in names}
        assert plain(collate(marked, *documents, **settings)) == expected
    assert plain(collate(*documents, **settings)) != plain(collate(*documents[::-1], **settings))


A = {"input_ids": [5, 6]}


@pytest.mark.parametrize(
    ("features", "settings", "message"),
    [
        ([A | {"id": "x", "text": "..."}], {}, r"document 0 has 'id', 'text', which .* takes 'input_ids', .*per_token"),
        ([A | {"seq_idx": [0, 1]}], {}, "'seq_idx', which .*it makes 'seq_idx' itself"),
        ([A | {"position_ids": [1, 2]}], {}, "has 2 position_ids for 2 input_ids that don't count from 0 in each"),
        ([A | {"position_ids": [0, 2]}], {}, "that don't count from 0 in each document; .*Remove the column"),
        ([A | {"position_ids": [0]}], {}, "has 1 position_ids for 2 input_ids"),
        ([A | {"seq_lengths": [1, 2]}], {}, r"has 2 input_ids, but its seq_lengths are \[1, 2\], which add up to 3"),
        ([A | {"seq_lengths": [2, 0]}], {}, r"seq_lengths are \[2, 0\], .*the length of each document .*at least 1"),
        ([A | {"seq_lengths": []}], {}, r"has 2 input_ids, but its seq_lengths are \[\], which add up to 0"),
        ([A | {"seq_lengths": [2], "position_ids": [0, 0]}], {}, r"\[2\] tokens by its seq_lengths, but of \[1, 1\]"),
        (
            [A | {"seq_lengths": [1, 1], "label": [1, 0, 1]}],
            {"objective": "documents"},
            r"document 0 holds 2 documents, but its labels have the shape \(3,\)",
        ),
        ([A | {"pixel_values": [0.5]}], {}, "'pixel_values', which .*packs only tokens.*processor's own collator"),
        ([A | {"image_grid_thw": [1, 2, 2]}], {}, "packs only tokens"),
        ([A | {"labels": 1}], {}, "document 0 has one number as labels, 1, .*'causal'.*Pass objective='documents'"),
        ([A | {"label": 1}], {"objective": "tokens"}, "has one number as label, 1, .*'tokens'"),
        ([A | {"labels": [1, 2], "label": 1}], {}, "document 0 has 'labels', 'label', which all name its labels"),
        ([A | {"labels": [0.5, 1.0]}], {"objective": "tokens"}, "needs a row of integers as labels; got .*float32"),
        ([A | {"labels": "yes"}], {"objective": "documents"}, "a number, or a row of numbers, as labels; got 'yes'"),
        ([A | {"labels": None}], {"objective": "documents"}, "a number, or a row of numbers, as labels; got None"),
        ([A | {"labels": 1j}], {"objective": "documents"}, "a number, or a row of numbers, as labels; got 1j"),
        ([A | {"token_type_ids": [0]}], {}, "document 0 has 2 input_ids but 1 token_type_ids"),
        ([A | {"token_type_ids": [0.0, 1.0]}], {}, "document 0 needs a row of integers as token_type_ids; got"),
        ([A | {"completion_mask": None}], {}, "needs a row of integers as completion_mask; got None"),
        ([A | {"w": [0.5]}], {"per_token": ["w"]}, "document 0 has 2 input_ids but 1 w; give every token one value"),
        ([A | {"w": 0.5}], {"per_token": ["w"]}, "needs one number, or one row of numbers, per token as w; got 0.5"),
        ([A | {"w": ["a", "b"]}], {"per_token": ["w"]}, r"or one row of numbers, per token as w; got \['a', 'b'\]"),
        ([A], {"per_token": ["w"]}, "document 0 has no 'w', which per_token names; got 'input_ids'"),
        ([A | {"labels": [1, 2]}, A], {"objective": "tokens"}, "document 0 has 'labels' and document 1 hasn't"),
        ([A | {"labels": [1, 2]}, A], {}, "document 0 has 'labels' and document 1 hasn't"),
        ([A, A | {"label_ids": [1, 2]}], {}, "document 1 has 'labels' and document 0 hasn't"),
        ([A | {"completion_mask": [0, 2]}], {}, r"document 0 needs only 0 and 1 in completion_mask; got \[0, 2\]"),
        ([A | {"assistant_masks": [-1, 0]}], {}, "document 0 has -1 at position 0 of assistant_masks"),
        (
            [A, {"input_ids": [5, -100, 7]}],
            {},
            "document 1 has -100 at position 1 of input_ids, which holds numbers of at least 0. Only labels may be",
        ),
        ([A | {"token_type_ids": [0, -1]}], {}, "document 0 has -1 at position 1 of token_type_ids"),
        (
            [A | {"w": np.ones(2, np.float16)}, A | {"w": [70000, 1]}],
            {"per_token": ["w"]},
            "w holds integers .* in document 1 and floating point .* in document 0; give every document .* of one kind",
        ),
        ([A | {"w": [True, False]}, A | {"w": [1, 0]}], {"per_token": ["w"]}, "in document 1 and bool .* in document"),
        (
            [{"input_ids": torch.tensor([2**63 + 5, 1], dtype=torch.uint64)}],
            {},
            r"needs a row of integers as input_ids; got uint64 values of 2\*\*63 or more",
        ),
        ([{"input_ids": np.array([2**63 + 5, 1], np.uint64)}], {}, r"got uint64 values of 2\*\*63 or more"),
        (
            [{"input_ids": torch.tensor([1, 2]).to_sparse()}],
            {},
            "needs a row of integers as input_ids; got tensor",
        ),
        ([A, A | {"label": 1}], {"objective": "documents"}, "document 1 has 'labels' and document 0 hasn't"),
        ([A, A | {"token_type_ids": [0, 0]}], {}, "document 1 has 'token_type_ids' and document 0 hasn't"),
        ([A | {"label": [1, 2]}, A | {"label": [1]}], {"objective": "documents"}, r"shape \(1,\) in document 1 and "),
        (
            [A | {"bbox": [[1, 2]] * 2}, A | {"bbox": [[1]] * 2}],
            {"per_token": ["bbox"]},
            r"bbox holds integers of shape \(1,\) in document 1 and integers of shape \(2,\) in document 0",
        ),
        ([{"input_ids": [2**70]}], {}, "document 0 needs a row of integers as input_ids"),
        ([{"input_ids": np.array([2**63], dtype=np.uint64)}], {}, "document 0 needs a row of integers as input_ids"),
        ([{"input_ids": np.array(["a"])}], {}, "document 0 needs a row of integers as input_ids"),
    ],
)  # fmt: skip
def test_refuses(features, settings, message):
    with pytest.raises(ValueError, match=message):
        collate(*features, **settings)


@pytest.mark.parametrize("columns", [{}, {"labels": [1, 2]}, {"token_type_ids": [1, 1]}])
def test_input_is_unchanged(columns):
    document = {name: torch.tensor(values) for name, values in (A | columns | {"completion_mask": [0, 1]}).items()}
    before = plain(document)
    for value in collate(document).values():
        if isinstance(value, torch.Tensor):
            value.zero_()
    assert plain(document) == before
