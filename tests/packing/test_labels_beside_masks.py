"""Labels beside completion_mask or assistant_masks: every way of packing combines them, or refuses them, alike."""

from typing import Any

import pytest
import torch

import tritonpack
from tritonpack import PackingCollator, TreeCollator
from tritonpack.packing.columns import LEARNED

IDS = [5, 6, 7, 8]
COMBINED = {  # labels, mask -> what the labels become
    "copy of the ids": ([5, 6, 7, 8], [0, 0, 1, 1], [-100, -100, 7, 8]),
    "the same tokens": ([-100, -100, 7, 8], [0, 0, 1, 1], [-100, -100, 7, 8]),
    "fewer tokens than the mask": ([-100, -100, -100, 8], [0, 0, 1, 1], [-100, -100, -100, 8]),
    "other ids": ([-100, -100, 9, 8], [0, 0, 1, 1], [-100, -100, 9, 8]),
    "first token, which nothing predicts": ([5, -100, 7, -100], [0, 0, 1, 1], [-100, -100, 7, -100]),
    "nothing learned": ([5, 6, 7, 8], [0, 0, 0, 0], [-100] * 4),
    "mask of ones": ([5, 9, 7, 8], [1, 1, 1, 1], [-100, 9, 7, 8]),
}
REFUSED = {  # labels, mask -> the label and its token
    "tokens of their own": ([-100, 6, 7, 8], [0, 0, 1, 1], "6 at token 1"),
    "the other tokens": ([-100, 6, -100, -100], [0, 0, 1, 1], "6 at token 1"),
    "another id": ([5, 6, 9, 8], [0, 1, 0, 1], "9 at token 2"),
    "shifted": ([6, 7, 8, -100], [0, 0, 1, 1], "7 at token 1"),
}


def through_dataset(rows: Any, folder: Any) -> dict[str, Any]:
    packed = tritonpack.pack_dataset(pytest.importorskip("datasets").Dataset.from_list(rows), 4)
    return PackingCollator()([packed[0]])


def under_another_name(rows: Any, folder: Any) -> dict[str, Any]:
    rows = [{"label_ids" if name == "labels" else name: values for name, values in row.items()} for row in rows]
    return through_dataset(rows, folder)


WAYS: dict[str, Any] = {
    "PackingCollator": lambda rows, folder: PackingCollator()(rows[:1]),
    "a row of documents": lambda rows, folder: PackingCollator()([rows[0] | {"seq_lengths": [4]}]),
    "dataloader": lambda rows, folder: next(iter(tritonpack.dataloader(rows, tokens=4))),
    "pack_stream": lambda rows, folder: PackingCollator()(next(iter(tritonpack.pack_stream(rows, 4)))),
    "PackedDataset": lambda rows, folder: PackingCollator()(tritonpack.pack_dataset(rows, 4)[0]),
    "pack_dataset": through_dataset,
    "pack_dataset, label_ids": under_another_name,
    "TreeCollator": lambda rows, folder: TreeCollator()(rows[:1]),
}


def rows_of(labels: list[int], mask: list[int], name: str) -> list[dict[str, Any]]:
    return [{"input_ids": IDS, "labels": labels, name: mask}] * 2


@pytest.mark.parametrize("way", WAYS)
class TestEveryWay:
    @pytest.mark.parametrize("case", COMBINED)
    def test_combined(self, way: str, case: str, tmp_path: Any) -> None:
        labels, mask, expected = COMBINED[case]
        batch = WAYS[way](rows_of(labels, mask, "assistant_masks"), tmp_path)
        if way == "TreeCollator":
            assert batch["labels"][0].tolist() == [label for label in expected if label != -100]
        else:
            assert batch["labels"].tolist() == [expected]

    @pytest.mark.parametrize("case", REFUSED)
    def test_refused(self, way: str, case: str, tmp_path: Any) -> None:
        labels, mask, found = REFUSED[case]
        message = rf"document 0 has the label {found}, where its completion_mask is 0.*aren't\. Set such labels to -100"
        with pytest.raises(ValueError, match=message):
            WAYS[way](rows_of(labels, mask, "completion_mask"), tmp_path)


@pytest.mark.parametrize("kind", [list, torch.tensor, lambda values: [bool(value) for value in values]])
def test_both_masks(kind: Any) -> None:
    """A token is learned where every mask is 1; the message names the mask that is 0."""
    row = {"input_ids": IDS, "completion_mask": kind([0, 1, 1, 1]), "assistant_masks": kind([1, 1, 0, 1])}
    for labels in ({}, {"labels": IDS}):
        batch = PackingCollator()([row | labels])
        assert batch["labels"].tolist() == [[-100, 6, -100, 8]]
        assert all(batch[name].tolist() == [[int(value) for value in row[name]]] for name in LEARNED)
    with pytest.raises(ValueError, match="label 7 at token 2, where its assistant_masks is 0"):
        PackingCollator()([row | {"labels": [-100, 6, 7, 8]}])


@pytest.mark.filterwarnings("ignore:unpatched-model")
def test_documents_of_a_row_choose_for_themselves() -> None:
    row = {"input_ids": [*IDS, *IDS], "seq_lengths": [4, 4], "completion_mask": [0, 0, 1, 1, 0, 0, 1, 1]}
    batch = PackingCollator()([row | {"labels": [*IDS, -100, -100, -100, 8]}])
    assert batch["labels"].tolist() == [[-100, -100, 7, 8, -100, -100, -100, 8]]
    with pytest.raises(ValueError, match="document 0 has the label 6 at token 5"):
        PackingCollator()([row | {"labels": [*IDS, -100, 6, -100, 8]}])


def test_objectives() -> None:
    """Labels of tokens count from the first token on, and labels of documents belong to no token."""
    row = {"input_ids": IDS, "completion_mask": [0, 0, 1, 1]}
    assert PackingCollator(objective="tokens")([row | {"labels": IDS}])["labels"].tolist() == [[-100, -100, 7, 8]]
    with pytest.raises(ValueError, match="the label 5 at token 0"):
        PackingCollator(objective="tokens")([row | {"labels": [5, -100, 7, 8]}])
    assert PackingCollator(objective="documents")([row | {"label": 5}])["labels"].tolist() == [5]


def test_cut_documents_are_combined_whole() -> None:
    row = {"input_ids": IDS, "labels": [5, 6, 7, 9], "completion_mask": [0, 0, 1, 1]}
    with pytest.raises(ValueError, match="the label 6 at token 1"):
        PackingCollator(max_document_length=3)([row])
