"""PackingCollator: the batch for each objective, kind of column and mask. test_refusals.py has what it refuses."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tritonpack
from tests.packing.tries import REPEATABLE
from tritonpack import BlockDiagonalMask, PackingCollator, TreeCollator
from tritonpack.packing.collator import LEARNED

IGNORED = -100
IDS = [5, 6, 7, 8]


def collate(*features: Any, **settings: Any) -> dict[str, Any]:
    return PackingCollator(**settings)(features)


def plain(batch: Any) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def test_documents_share_a_row():
    batch = collate({"input_ids": [5, 6, 7]}, {"input_ids": [8]}, {"input_ids": [9, 4]})
    assert plain(batch) == {
        "input_ids": [[5, 6, 7, 8, 9, 4]],
        "labels": [[IGNORED, 6, 7, IGNORED, IGNORED, 4]],
        "position_ids": [[0, 1, 2, 0, 0, 1]],
        "seq_idx": [[0, 0, 0, 1, 2, 2]],
        "cu_seq_lens_q": [0, 3, 4, 6],
        "cu_seq_lens_k": [0, 3, 4, 6],
        "max_length_q": 3,
        "max_length_k": 3,
    }
    short = {"seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"}
    for name, value in batch.items():
        wanted = int if name.startswith("max") else torch.int32 if name in short else torch.int64
        assert getattr(value, "dtype", type(value)) is wanted, name


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
    starts = np.cumsum([0, *every])[:-1]
    assert batch["input_ids"][0].tolist() == tokens + [0] * padded
    assert batch["special_tokens_mask"][0].tolist() == [0] * len(tokens) + [1] * padded
    assert batch["cu_seq_lens_q"].diff().tolist() == every
    assert batch["max_length_q"] == batch["max_length_k"] == max(every)
    assert batch["position_ids"][0].tolist() == [place for length in every for place in range(length)]
    if multiple is not None:  # also of full rows: the same arguments for every batch make one graph
        assert batch["attention_mask"].tolist() == [[1] * len(tokens) + [0] * padded]
    if objective == "causal":
        expected = batch["input_ids"].clone()
        expected[:, len(tokens) :] = expected[:, starts] = IGNORED
        assert torch.equal(batch["labels"], expected)
    else:
        assert "labels" not in batch
    masks = (
        BlockDiagonalMask.from_cu_seqlens(batch["cu_seq_lens_q"]),
        BlockDiagonalMask.from_position_ids(batch["position_ids"]),
        BlockDiagonalMask.from_segment_ids(batch["seq_idx"] + 1),
    )
    for mask in masks[1:]:
        assert torch.equal(mask.key_start, masks[0].key_start)
        assert torch.equal(mask.key_stop, masks[0].key_stop)


def read_only(ids):
    array = np.array(ids)
    array.flags.writeable = False
    return array


CONVERSIONS = {
    "list": list,
    "tuple": tuple,
    "tensor": torch.tensor,
    "int32": lambda ids: torch.tensor(ids, dtype=torch.int32),
    "uint16 array": lambda ids: np.array(ids, dtype=np.uint16),
    "uint64 tensor": lambda ids: torch.tensor(ids, dtype=torch.uint64),
    "big-endian": lambda ids: np.array(ids, dtype=">i4"),
    "read-only": read_only,
    "list of numbers": lambda ids: list(np.array(ids)),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
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


# objective, columns of two documents of 3 and 1 tokens, and what becomes of them
COLUMNS: dict[str, Any] = {
    "tokens keep all labels": ("tokens", {"labels": ([2, IGNORED, 0], [1])}, {"labels": [[2, IGNORED, 0, 1]]}),
    "length": ("causal", {"length": (3, 1)}, {"length": None}),
    "types": ("causal", {"token_type_ids": ([0, 1, 1], [0])}, {"token_type_ids": [[0, 1, 1, 0]]}),
    "per token": ("causal", {"w": ([0.5, 1, 2], np.array([70000.0]))}, {"w": [[0.5, 1, 2, 70000.0]]}),
    "rows per token": ("causal", {"w": ([[1, 2]] * 3, [[3, 4]])}, {"w": [[[1, 2]] * 3 + [[3, 4]]]}),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_columns(case):
    objective, columns, expected = COLUMNS[case]
    features = [{"input_ids": ids} | {name: both[i] for name, both in columns.items()}
                for i, ids in enumerate(([5, 6, 7], [8]))]  # fmt: skip
    for given_features in (features, [features]):  # documents, or a list of them
        batch = collate(*given_features, objective=objective, per_token=["w"] if "w" in columns else ())
        assert batch["input_ids"].tolist() == [[5, 6, 7, 8]]
        for name, values in expected.items():
            assert (batch[name].tolist() if name in batch else None) == values


# Labels beside a mask: labels, mask -> what the labels become; or the label that is refused, and its token.
MASKED: dict[str, Any] = {
    "copy of the ids": ([5, 6, 7, 8], [0, 0, 1, 1], [-100, -100, 7, 8]),
    "no labels": (None, [0, 1, 0, 1], [-100, 6, -100, 8]),
    "fewer tokens than the mask": ([-100, -100, -100, 8], [0, 0, 1, 1], [-100, -100, -100, 8]),
    "other ids": ([-100, -100, 9, 8], [0, 0, 1, 1], [-100, -100, 9, 8]),
    "nothing learned": ([5, 6, 7, 8], [0, 0, 0, 0], [-100] * 4),
    "mask of ones": ([5, 9, 7, 8], [1, 1, 1, 1], [-100, 9, 7, 8]),
    "refused: first token": ([5, -100, 7, -100], [0, 0, 1, 1], "5 at token 0"),
    "refused: tokens of their own": ([-100, 6, 7, 8], [0, 0, 1, 1], "6 at token 1"),
    "refused: another id": ([-100, 6, 9, 8], [0, 1, 0, 1], "9 at token 2"),
}


def through_table(rows: Any) -> dict[str, Any]:
    packed = tritonpack.pack_dataset(pytest.importorskip("datasets").Dataset.from_list(rows), 4)
    return PackingCollator()([packed[0]])


WAYS: dict[str, Any] = {
    "PackingCollator": lambda rows: collate(rows[0]),
    "a row of documents": lambda rows: collate(rows[0] | {"seq_lengths": [4]}),
    "dataloader": lambda rows: next(iter(tritonpack.dataloader(rows, tokens=4))),
    "pack_stream": lambda rows: PackingCollator()(next(iter(tritonpack.pack_stream(rows, 4)))),
    "pack_dataset": through_table,
    "TreeCollator": lambda rows: TreeCollator()(rows[:1]),
}


@pytest.mark.fast(
    "PackingCollator-completion_mask",
    "a row of documents-completion_mask",
    "pack_stream-assistant_masks",
    "TreeCollator-assistant_masks",
)
@pytest.mark.parametrize("mask", LEARNED)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_combines_labels_with_masks_alike(way: str, mask: str) -> None:
    for labels, values, expected in MASKED.values():
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
    for kind in (list, torch.tensor, lambda values: [bool(value) for value in values]):
        row = {"input_ids": IDS, "completion_mask": kind([0, 1, 1, 1]), "assistant_masks": kind([1, 1, 0, 1])}
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
