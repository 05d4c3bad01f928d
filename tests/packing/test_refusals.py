"""What packing refuses: for each way into it a table of wrong values, and the words that the message must hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tritonpack import (
    BinDataset,
    PackingCollator,
    TreeCollator,
    dataloader,
    pack_dataset,
    pack_stream,
    pack_tree,
)

DOCUMENTS = [{"input_ids": [5, 6, 7]}] * 6
A = {"input_ids": [5, 6]}
IDS = {"input_ids": [[1, 2], [3]]}
PAIRS = [{"prompt_ids": [n, 7, 7], "chosen_ids": [8] * 9, "rejected_ids": [9] * (n + 1)} for n in range(10)]
IMAGES = [{"input_ids": [number, 5], "num_patches": number % 3 * 16} for number in range(60)]


def documents_of_pair(pair: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"input_ids": pair["prompt_ids"] + pair[name]} for name in ("chosen_ids", "rejected_ids")]


def own(examples: Any) -> dict[str, Any]:
    return {"input_ids": torch.ones(1, len(examples))}


def load(**options: Any) -> list[Any]:
    defaults = {"dataset": DOCUMENTS, "tokens": 96, "num_replicas": 1, "rank": 0, "seed": 0}
    return list(dataloader(**{**defaults, **options}))


def pack_table(columns: dict[str, Any], options: dict[str, Any]) -> Any:
    datasets, pyarrow = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    return pack_dataset(datasets.Dataset(pyarrow.table(columns)), 8, **options)


def stream(rows: Any, options: dict[str, Any]) -> list[Any]:
    return list(pack_stream(rows, **{"capacity": 8, **options}))


UNITS = [documents_of_pair(pair) for pair in PAIRS]
# What is called with the values of each row but the last, which is the message.
CALLS: dict[str, Any] = {
    "collate": lambda features, settings: PackingCollator(**settings)(features),
    "settings": lambda settings: PackingCollator(**settings),
    "dataloader": lambda options: load(**options),
    "dataloader of pairs": lambda options: load(**{"dataset": PAIRS, **options}),
    "collate_fn": lambda options: load(**{"dataset": IMAGES, "collate_fn": own, **options}),
    "pack_dataset of a table": pack_table,
    "pack_dataset": lambda dataset, options: pack_dataset(dataset, 10, **options),
    "BinDataset": BinDataset,
    "pack_stream": stream,
    "pack_tree": lambda sequences, labels: pack_tree(sequences, labels=labels),
    "TreeCollator": lambda features: TreeCollator()(features),
}
REFUSED: dict[str, list[Any]] = {
    "collate": [
        ([], {}, "at least one document; got an empty list"),
        ([{"labels": [1]}], {}, r"document 0 must be a mapping with 'input_ids'; got the keys \['labels'\]"),
        ([{"input_ids": [1]}, {"input_ids": []}], {}, "document 1 is empty"),
        ([{"input_ids": [1, 2], "attention_mask": [1, 0]}], {}, r"isn't 1 .*\(sum 1\).*padding=False"),
        (5, {}, r"takes a list of documents.* got int"),
        ({"input_ids": [[1, 2], [3]]}, {}, r"got dict.*dataset\[i\] for i in range.*not as dataset\[:8\]"),
        ([{"input_ids": [1.0]}], {}, "document 0 needs a row of integers as input_ids; got torch.float32"),
        ([{"input_ids": "text"}], {}, "needs a row of integers as input_ids; got 'text'"),
        ([{"input_ids": torch.ones(1, dtype=torch.int64, device="meta")}], {},
         "document 0 has input_ids on meta; collate in host memory"),
        ([A | {"id": "x", "text": "..."}], {}, r"document 0 has 'id', 'text', which .* takes 'input_ids', .*per_token"),
        ([A | {"seq_idx": [0, 1]}], {}, "'seq_idx', which .*and makes .*'seq_idx', .* itself.*drop_columns=..seq_idx"),
        ([A | {"position_ids": [1, 2]}], {}, "has 2 position_ids for 2 input_ids that don't count from 0 in each"),
        ([A | {"seq_lengths": [1, 2]}], {}, r"has 2 input_ids, but its seq_lengths are \[1, 2\], which add up to 3"),
        ([A | {"seq_lengths": [2, 0]}], {}, r"seq_lengths are \[2, 0\], .*the length of each document .*at least 1"),
        ([A | {"seq_lengths": [2], "position_ids": [0, 0]}], {},
         r"don't count from 0 in each document of its seq_lengths \[2\]"),
        ([A | {"pixel_values": [0.5]}], {}, "'pixel_values', which .*packs only tokens.*processor's own collator"),
        ([A | {"labels": 1}], {}, r"row of integers as labels; got torch.int64 of shape \(\). Give one integer"),
        ([A | {"labels": [1, 2], "label": 1}], {}, "has 'label', which .*Rename labels of tokens to 'labels'"),
        ([A | {"labels": [0.5, 1.0]}], {"objective": "tokens"}, "needs a row of integers as labels; got .*float32"),
        ([A | {"w": [0.5]}], {"per_token": ["w"]}, "document 0 has 2 input_ids but 1 w; give every token one value"),
        ([A | {"w": 0.5}], {"per_token": ["w"]}, "needs one number, or one row of numbers, per token as w; got 0.5"),
        ([A], {"per_token": ["w"]}, "document 0 has no 'w', which per_token names; got 'input_ids'"),
        ([A | {"labels": [1, 2]}, A], {"objective": "tokens"}, "document 0 has 'labels' and document 1 hasn't"),
        ([A | {"completion_mask": [0, 2]}], {}, r"document 0 needs only 0 and 1 in completion_mask, .*; got \[0, 2\]"),
        ([A, {"input_ids": [5, -100, 7]}], {},
         "document 1 has -100 at position 1 of input_ids, which holds numbers of at least 0. Only labels may be"),
        ([A | {"w": np.ones(2, np.float16)}, A | {"w": [70000, 1]}], {"per_token": ["w"]},
         "w holds torch.int64 .* in document 1 and torch.float16 .* in document 0; give every document .* of one kind"),
        ([{"input_ids": torch.tensor([2**63 + 5, 1], dtype=torch.uint64)}], {},
         r"needs a row of integers as input_ids; got uint64 values of 2\*\*63 or more"),
        ([{"input_ids": torch.tensor([1, 2]).to_sparse()}], {}, "needs a row of integers as input_ids; got tensor"),
        ([A | {"bbox": [[1, 2]] * 2}, A | {"bbox": [[1]] * 2}], {"per_token": ["bbox"]},
         r"bbox holds torch.int64 of shape \(1,\) per token in document 1 and .* \(2,\) in document 0"),
    ],
    "settings": [
        ({"pad_to_multiple_of": 0, "pad_token_id": 0}, "pad_to_multiple_of must be an integer from 1 to .* got 0"),
        ({"pad_to_multiple_of": 8, "pad_token_id": 2**70},
         f"pad_token_id must be an integer from 0 to 2147483647; got {2**70}"),
        ({"objective": "mlm"}, "objective must be one of 'causal', 'tokens'; got 'mlm'"),
        ({"objective": "documents"}, "objective='documents' of PackingCollator was removed: collate labels"),
        ({"max_document_length": 0}, "max_document_length must be an integer from 1 to .* got 0"),
        ({"per_token": "bbox"}, r"per_token must be a collection of column names, such as \('bbox',\); got 'bbox'"),
        ({"per_token": ["labels"]}, "per_token can't name 'labels'; leave that out"),
    ],
    "dataloader": [
        ({"batch_size": 4}, "no option 'batch_size'. .* use DataLoader itself with tritonpack.PackingCollator"),
        ({"collate_fn": 5}, "collate_fn must be a function of a list of examples.*; got 5"),
        ({"collate_fn": list, "pad_token_id": 1}, "so give pad_token_id to the collator itself"),
        ({"num_wokers": 4}, "no option 'num_wokers'.*num_workers"),
        ({"overlong": "split"}, "got 'split'.*pass max_document_length, .* pack_dataset"),
        ({"tokens": 1, "overlong": "drop", "dataset": [{"input_ids": [1, 2]}]}, "leaves nothing: no document fits"),
        ({"tokens": 1, "collate_fn": PackingCollator()}, "max_document_length=1 to dataloader or its PackingCollator"),
        ({"drop_columns": ("input_ids",)}, "drop_columns can't name 'input_ids'"),
        ({"dataset": []}, "the dataset has no document to pack"),
        ({"dataset": [{"text": "a"}]}, r"must be a mapping with 'input_ids'; got the keys \['text'\].*Tokenize"),
        ({"dataset": [{"input_ids": [1]}, {"input_ids": []}]}, "document 1 is empty"),
        ({"dataset": iter(DOCUMENTS)}, "must have a length and be indexed by document"),
    ],
    "dataloader of pairs": [
        ({"documents": lambda pair: [{"input_ids": pair["prompt"]}]},
         "documents failed on example 0, which has the columns 'chosen_ids', .*: KeyError: 'prompt'"),
        ({"documents": "chosen"}, "documents must be a function of an example; got 'chosen'"),
        ({"documents": lambda pair: []}, r"documents\(\.\.\.\) of example 0 must be a list of documents, .*got \[\]"),
        ({"documents": lambda pair: [{"input_ids": pair["chosen_ids"]}, {"input_ids": pair["chosen_ids"][9:]}]},
         r"document 1 of example \d+ is empty; every document needs at least one token"),
        ({"dataset": [UNITS[0], []]}, r"example 1 must be a list of documents.* at least one; got \[\]"),
        ({"documents": None}, r"got the keys \['chosen_ids'.*as preference pairs do, pass documents=, a function of"),
        ({"dataset": [[{"ids": [1]}]]}, "must be a mapping with 'input_ids'; got the keys"),
        ({"tokens": 20, "documents": documents_of_pair}, r"units are longer than the row size of 20"),
        ({"dataset": UNITS, "lengths": [sum(len(each["input_ids"]) for each in unit) for unit in UNITS]},
         r"example 0 has \d+ tokens and \d+ squared tokens, but .* by the argument lengths. .*Units.of_sequences"),
    ],
    "collate_fn": [
        ({"max_document_length": 5}, "so give max_document_length to the collator itself"),
        ({"labels": "tokens"}, r"so give labels \(its objective\) to the collator itself"),
        ({"tokens": 1}, "pass overlong='drop', which leaves them out, or cut them before, as by dataset.map.$"),
        ({"tokens": 1, "collate_fn": TreeCollator()}, "which leaves them out, or cut them before, as by dataset.map.$"),
    ],
    "pack_dataset of a table": [
        ({"text": ["a"]}, {}, "the dataset has no column 'input_ids'; it has 'text'. Tokenize the text first"),
        (IDS | {"text": ["a", "b"], "labels": [[1, 2], [3]]}, {}, "such as columns=input_ids,labels, or remove"),
        (IDS | {"seq_lengths": [[1, 1], [1]]}, {}, "'seq_lengths', .* Rows of several documents are packed already"),
        (IDS, {"columns": ["input_ids", "labels"]}, "columns are .*; name .* others of 'input_ids', each"),
        (IDS, {"columns": "input_ids"}, r"columns must be a collection of column names, .*; got 'input_ids'"),
        (IDS, {"jobs": 0}, "jobs must be an integer from 1"),
        (IDS | {"attention_mask": [[1, 1], [0]]}, {}, "document 1 has an attention_mask that isn't 1 for each of its"),
        (IDS | {"special_tokens_mask": [[1, 200], [0]]}, {}, "document 0 Integer value 200 not in range"),
        ({"input_ids": [[1], []]}, {}, "document 1 is empty; every document needs at least one token"),
        ({"input_ids": [[1], [2, -7]]}, {}, "document 1 has -7 at position 1 of input_ids, .*at least 0"),
        ({"input_ids": [[1], [2**31]]}, {}, "document 1 Integer value 2147483648 not in range"),
        (IDS | {"labels": [[1, 2], [3, 4]]}, {}, "document 1 has 1 input_ids but 2 labels; give every token one"),
        ({"input_ids": []}, {}, "the dataset holds no document"),
        ({"input_ids": [[1] * 9]}, {}, r"1 of 1 document is longer .* \(the first: document 0, 9 tokens\)"),
    ],
    "pack_dataset": [
        (DOCUMENTS, {}, r"takes a datasets\.Dataset .* got list\. Make one by .*from_list.*load by dataloader"),
        (iter(DOCUMENTS), {}, "got list_iterator.*rows of a stream by pack_stream"),
        (DOCUMENTS, {"lengths": [3] * 6}, "length or lengths of pack_dataset was removed: .*counts its tokens"),
    ],
    "BinDataset": [
        (iter(DOCUMENTS), "must have a length and be indexed by document"),
    ],
    "pack_stream": [
        ([[1], []], {}, "document 1 is empty"),
        ([[1] * 9], {}, r"document 0 has 9 tokens, longer than the capacity of 8.*overlong="),
        (["text"], {}, "document 0 must be a row of tokens.*got str. Tokenize text first"),
        ([np.ones((2, 3))], {}, r"got shape \(2, 3\)"),
        ([{"input_ids": [1] * 9, "text": "words", "id": 3, "labels": [1] * 8}], {"overlong": "split"},
         "document 0 has 9 tokens and must be cut, but 'id', 'labels', 'text' isn't a row of one value per token"),
        ([[1]], {"window": 0}, "window must be an integer from 1 .*got 0"),
        ([[1]], {"max_items": 0}, "max_items must be .*got 0"),
        ([[1]], {"overlong": "cut"}, "overlong must be one of .*got 'cut'"),
        ({"input_ids": [[1]]}, {}, "documents must be an iterable of rows .*got dict"),
        ([[1]], {"shard": 1}, "shard must be True or False"),
        ([[1]], {"divide": "documents"}, "divide of pack_stream was removed: .*split_dataset_by_node"),
        (lambda: None, {}, "the function must return an iterable of documents, .*; it returned None"),
    ],
    "pack_tree": [
        ([], None, "got 0 sequences and labels for 0; pass at least one sequence"),
        (5, None, "sequences must be a list with a row of integers for each sequence, .*; got int 5"),
        ([[1], [2, -1]], None, "sequence 1 has -1 at position 1 of input_ids"),
        ([[1, 2], [1, 3]], [[1, 2]], "got 2 sequences and labels for 1"),
        ([[1, 2], [1, 3]], [[1, 2], [3]], "sequence 1 has 2 input_ids but 1 labels; give every token one value, -100"),
        ([[1, 2], [1, 3]], [[1, 2], [3, -1]], "sequence 1 has the label -1; labels are token ids, or -100"),
    ],
    "TreeCollator": [
        ([], "TreeCollator needs at least one document"),
        ({"input_ids": [[1]]}, "TreeCollator takes a list of documents"),
        ([{"input_ids": [1], "advantage": 0.5}], "document 0 has 'advantage', which TreeCollator doesn't.*gather"),
        ([{"input_ids": [1, 2], "labels": [1, -7]}], "document 0 has the label -7"),
    ],
}  # fmt: skip
CASES = [
    pytest.param(way, row, id=f"{way}-{number}") for way, rows in REFUSED.items() for number, row in enumerate(rows)
]


@pytest.mark.parametrize(("way", "row"), CASES)
def test_refused(way: str, row: Any) -> None:
    *values, message = row
    with pytest.raises(ValueError, match=message):
        CALLS[way](*values)
