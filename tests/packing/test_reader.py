"""Reader: lengths, columns, units and collators of dataloader, and datasets that raise, shrink or change."""

from collections.abc import Mapping
from itertools import chain

import numpy as np
import pytest
import torch

from tests.packing.test_loader import (
    DOCUMENTS,
    IMAGES,
    LENGTHS,
    PAIRS,
    TOKENS,
    UNITS,
    documents_in,
    make,
    of_pair,
    one_pass,
    planned,
    table,
)
from tritonpack import BinDataset, PackingCollator, TreeCollator, Units, pack_stream


class TestLengths:
    def test_are_counted_or_given(self):
        assert one_pass(make(table([{**document, "length": 1} for document in DOCUMENTS]))) == planned(0)
        assert one_pass(make(lengths=LENGTHS)) == planned(0)
        changed = LENGTHS.copy()
        changed[-1] += 1
        for options, message in (
            ({"lengths": [1, 2, 3]}, "3 lengths for a dataset of 120 documents"),
            ({"lengths": changed, "tokens": TOKENS + 1}, r"example 119 has .* tokens, but .* by the argument lengths"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=message):
                one_pass(make(**options))

    def test_that_are_too_long(self):
        long = [{"input_ids": [1] * 300}, *DOCUMENTS[1:]]
        with pytest.raises(ValueError, match=r"1 of 120 documents.*300 tokens.*'drop'.*max_document_length, which"):
            make(long)
        dropping = make(long, overlong="drop")
        assert sorted(chain.from_iterable(one_pass(dropping))) == list(range(1, 120))
        assert "1 document longer than the capacity dropped: 300 tokens lost" in str(dropping)
        cutting, kept = make(long, max_document_length=50), np.minimum([300, *LENGTHS[1:]], 50).sum()
        assert max(int(batch["max_length_q"]) for batch in cutting) == 50
        assert sum(batch["input_ids"].numel() for batch in cutting) == kept
        assert f"{300 + LENGTHS[1:].sum() - kept:,} tokens cut off by max_document_length" in str(cutting)

    def test_of_a_table_are_read_without_loading_examples(self):
        datasets = pytest.importorskip("datasets")
        rows, loads = table(IMAGES), []

        class Counted(datasets.Dataset):
            def __getitem__(self, key):
                loads.append(key)
                return super().__getitem__(key)

        rows.__class__ = Counted
        make(rows, drop_columns=("num_patches",))
        assert [key for key in loads if isinstance(key, (int, list))] == [[0]], "the first one, for its columns"


def test_columns_that_are_packed_dropped_and_named():
    documents = [{**one, "text": "", "pixel_values": [1.0]} for one in DOCUMENTS]
    with pytest.raises(ValueError, match=r"'pixel_values', 'text'.*drop_columns=\('pixel_values', 'text'\)"):
        make(documents)
    loader = make(documents, drop_columns=("pixel_values", "text"))
    assert one_pass(loader) == planned(0)
    assert str(loader).endswith("columns: input_ids; left out: pixel_values, text")
    documents = [{**one, "bbox": [[1, 2]] * len(one["input_ids"])} for one in DOCUMENTS]
    batch = next(iter(make(documents, per_token=("bbox",))))
    assert batch["bbox"].shape == (1, batch["input_ids"].shape[1], 2)
    with pytest.raises(ValueError, match=r"drop_columns names 'txt', which isn't there; .* has the columns 'input_"):
        make(drop_columns=("txt",))
    with pytest.raises(ValueError, match="drop_columns must be a collection"):
        make(drop_columns="text")
    order = np.array([5, 37, *range(5), *range(6, 37), *range(38, 120)])  # document 37 isn't the first of its row
    for column, message in (
        ({"input_ids": [-2] * int(LENGTHS[37])}, "document 37 has -2 at position 0"),
        ({"completion_mask": [1]}, "document 37 has .* input_ids but 1 completion_mask"),
        ({"bbox": [[1]] * int(LENGTHS[37])}, r"document 37 and torch.int64 of shape \(2,\) in document \d+;"),
        ({"token_type_ids": [0] * int(LENGTHS[37])}, r"document 37 has 'token_type_ids' and document \d+ hasn't"),
    ):
        wrong = [*documents[:37], documents[37] | column, *documents[38:]]
        with pytest.raises(ValueError, match=message):
            list(make(wrong, tokens=4096, order=order, per_token=("bbox",)))


UNITS_OF = Units.of_sequences([[len(document["input_ids"]) for document in unit] for unit in UNITS])
WAYS_OF_UNITS = {
    "function": {"dataset": PAIRS, "documents": of_pair},
    "function in workers": {"dataset": PAIRS, "documents": of_pair, "num_workers": 2},
    "lists": {"dataset": UNITS},
    "lists, given": {"dataset": UNITS, "lengths": UNITS_OF},
    "table": {"dataset": "table", "documents": of_pair},
    "collate_fn": {"dataset": PAIRS, "documents": of_pair, "collate_fn": PackingCollator().__call__},
    "trees": {"dataset": UNITS, "lengths": UNITS_OF, "collate_fn": TreeCollator()},
}


@pytest.mark.parametrize("way", WAYS_OF_UNITS)
def test_documents_of_a_unit_stay_together_in_order(way):
    options = dict(WAYS_OF_UNITS[way])
    if options["dataset"] == "table":
        options["dataset"] = table(PAIRS)
    loader = make(tokens=96, **options)
    assert loader.documents.units.squares.tolist() == UNITS_OF.squares.tolist()
    if way == "trees":
        assert max(batch["input_ids"].shape[1] for batch in loader) <= 96
        return
    found = [documents_in(batch) for batch in loader]
    assert found == [documents_in(batch) for batch in make(UNITS, 96)]
    assert max(sum(map(len, row)) for row in found) <= 96
    pairs = chain.from_iterable(zip(row[::2], row[1::2], strict=True) for row in found)
    assert sorted(pairs) == sorted(tuple(document["input_ids"] for document in unit) for unit in UNITS)


def test_units_beside_documents_cut_and_wrong():
    mixed = [unit[0] if number % 2 else unit for number, unit in enumerate(UNITS)]
    found = [documents_in(batch) for batch in make(mixed, 96)]
    expected = chain.from_iterable(unit if isinstance(unit, list) else [unit] for unit in mixed)
    assert sorted(chain.from_iterable(found)) == sorted(document["input_ids"] for document in expected)
    loader = make(PAIRS, documents=of_pair, tokens=20, max_document_length=10)
    assert max(batch["input_ids"].shape[1] for batch in loader) <= 20
    assert max(int(batch["max_length_q"]) for batch in loader) == 10
    with pytest.raises(ValueError, match=r"lengths=Units\(\.\.\.\) don't tell the lengths of documents"):
        make(UNITS, lengths=UNITS_OF, max_document_length=10)
    wrong = [list(unit) for unit in UNITS]
    wrong[37][1] = wrong[37][1] | {"completion_mask": [1]}
    with pytest.raises(ValueError, match=r"document 1 of example 37 has .* input_ids but 1 completion_mask"):
        list(make(wrong, 96))
    calls = []

    def changing(pair):
        calls.append(pair)
        return [{"input_ids": pair["prompt_ids"] + [1] * (len(calls) > 150)}]

    message = r"example \d+ has .*A function must return the same documents each time"
    with pytest.raises(ValueError, match=message):
        [list(make(PAIRS, 96, documents=changing)) for _ in range(2)]


class Own:
    """A collator that keeps the examples."""

    def __call__(self, examples):
        tokens = torch.tensor([token for example in examples for token in example["input_ids"]])
        return {"input_ids": tokens[None], "examples": list(examples)}


def test_collator_of_the_user_s():
    found = [example for batch in make(IMAGES, 96, collate_fn=Own()) for example in batch["examples"]]
    assert sorted(example["input_ids"][0] for example in found) == list(range(60))
    assert all(isinstance(example, Mapping) and set(example) == {"input_ids", "num_patches"} for example in found)
    with pytest.raises(ValueError, match=r"collate_fn made \d+ input_ids of examples .*, and a row has at most 96"):
        list(make(IMAGES, 96, lengths=[1] * 60, collate_fn=Own()))
    examples = [dict(each) for each in IMAGES]
    loader = make(examples, 96, collate_fn=Own())
    examples[3]["input_ids"] = [1]
    with pytest.raises(ValueError, match="example 3 has 1 tokens and"):
        list(loader)


class Failing(list):
    """Documents, one of which can't be read."""

    def __init__(self, bad=None, error=None):
        super().__init__([{"input_ids": [5, 6, 7, 8]}] * 6)
        self.bad, self.error = bad, error

    def __getitem__(self, number):
        if number == self.bad:
            raise self.error
        return super().__getitem__(number)

    def __iter__(self):
        return (self[number] for number in range(len(self)))


class AtOnce(Failing):
    def __getitems__(self, numbers):
        return [self[number] for number in numbers]


GIVEN = {"tokens": 8, "lengths": [4] * 6}
WAYS = {
    "dataloader": lambda dataset: list(make(dataset, 8)),
    "bins": lambda dataset: BinDataset(dataset)[[1, 4]],
    "loaded": lambda dataset: list(make(dataset, **GIVEN)),
    "workers": lambda dataset: list(make(dataset, **GIVEN, num_workers=1)),
    "pack_stream": lambda dataset: list(pack_stream(dataset, 8)),
}


@pytest.mark.parametrize("kind", [Failing, AtOnce])
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow) if way == "workers" else way for way in WAYS]
)
def test_a_dataset_that_raises_names_the_document(way, kind):
    error = OSError("image is truncated")
    with pytest.raises(ValueError, match=r"document 4 .*can't be read: OSError: image is truncated") as info:
        WAYS[way](kind(4, error))
    assert way == "workers" or error in (info.value.__cause__, getattr(info.value.__cause__, "__cause__", None))
    for error, wanted in ((ConnectionResetError("a"), ConnectionError), (TimeoutError(), TimeoutError)):
        if way in ("bins", "pack_stream"):  # programs catch a failing connection to resume
            with pytest.raises(wanted, match=rf"document 4 .*can't be read: {type(error).__name__}"):
                WAYS[way](kind(4, error))


def test_datasets_that_shrink_or_return_too_few():
    message = r"document [45] can't be read: IndexError"
    for kind in (Failing, AtOnce):
        dataset = kind()
        loader = make(dataset, 8)
        del dataset[4:]
        with pytest.raises(ValueError, match=message) as info:
            list(loader)
        assert isinstance(info.value.__cause__, IndexError)

    class Short(AtOnce):
        def __getitems__(self, numbers):
            if self.error is not None:
                raise self.error
            return super().__getitems__(numbers)[:1]

    with pytest.raises(ValueError, match=r"__getitems__ returned 1 document for the 2 numbers [0-5], [0-5]; it must"):
        list(make(Short(), **GIVEN))
    with pytest.raises(ValueError, match=r"one of the documents 1, 4 can't be read: OSError: no connection"):
        BinDataset(Short(None, OSError("no connection")))[[1, 4]]
