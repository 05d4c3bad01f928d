"""dataloader with units of several documents, resources with budgets, and collators of one's own."""

from collections.abc import Mapping
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tritonpack import PackingCollator, TreeCollator, Units, dataloader
from tritonpack.packing import PackedDataLoader

RANDOM = np.random.default_rng(0)
# Pairs as TRL's DPOTrainer tokenizes them; the first token of a prompt is the number of the pair, and an answer begins
# with 500 or 501.
PAIRS = [
    {
        "prompt_ids": [number, *[7] * RANDOM.integers(1, 9)],
        "chosen_ids": [500, *[8] * RANDOM.integers(1, 20)],
        "rejected_ids": [501, *[9] * RANDOM.integers(1, 20)],
    }
    for number in range(60)
]
TOKENS = 96


def documents_of_pair(pair):
    return [
        {
            "input_ids": pair["prompt_ids"] + pair[name],
            "completion_mask": [0] * len(pair["prompt_ids"]) + [1] * len(pair[name]),
        }
        for name in ("chosen_ids", "rejected_ids")
    ]


UNITS = [documents_of_pair(pair) for pair in PAIRS]
IMAGES = [
    {"input_ids": [number, *[5] * RANDOM.integers(1, 30)], "num_patches": int(RANDOM.integers(0, 3) * 16)}
    for number in range(60)
]


def make(dataset=PAIRS, tokens=TOKENS, **options) -> PackedDataLoader:
    return dataloader(dataset, tokens, **{"num_replicas": 1, "rank": 0, "seed": 0, **options})


def documents_in(batch):
    starts = batch["cu_seq_lens_q"].tolist()
    return [batch["input_ids"][0, start:stop].tolist() for start, stop in pairwise(starts)]


def patches(example):
    return torch.tensor(example["num_patches"])


class TestDocuments:
    @pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
    def test_of_an_example_stay_together_in_order(self, workers):
        loader = make(documents=documents_of_pair, num_workers=workers)
        found = [documents_in(batch) for batch in loader]
        assert max(sum(map(len, row)) for row in found) <= TOKENS
        pairs = list(chain.from_iterable(zip(row[::2], row[1::2], strict=True) for row in found))
        expected = [tuple(document["input_ids"] for document in unit) for unit in UNITS]
        assert sorted(pairs) == sorted(expected)

    def test_are_the_same_as_lists_of_documents(self):
        by_function, lists = make(documents=documents_of_pair), make(UNITS)
        for one, other in zip(by_function, lists, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in one)

    def test_make_the_batches_of_their_units(self):
        units = Units.of_sequences([[len(document["input_ids"]) for document in unit] for unit in UNITS])
        loader, given = make(UNITS), make(UNITS, lengths=units)
        assert loader.documents.units.squares.tolist() == units.squares.tolist()
        assert list(map(documents_in, loader)) == list(map(documents_in, given))
        assert loader.state_dict() == given.state_dict()

    def test_beside_examples_of_one_document(self):
        mixed = [unit[0] if number % 2 else unit for number, unit in enumerate(UNITS)]
        rows = [documents_in(batch) for batch in make(mixed)]
        expected = chain.from_iterable(unit if isinstance(unit, list) else [unit] for unit in mixed)
        assert sorted(chain.from_iterable(rows)) == sorted(document["input_ids"] for document in expected)

    def test_are_each_cut(self):
        loader = make(documents=documents_of_pair, tokens=20, max_document_length=10)
        assert max(batch["input_ids"].shape[1] for batch in loader) <= 20
        assert max(int(batch["max_length_q"]) for batch in loader) == 10
        lengths = [len(document["input_ids"]) for unit in UNITS for document in unit]
        cut = sum(lengths) - np.minimum(lengths, 10).sum()
        assert f"{cut:,} tokens cut off by max_document_length" in str(loader)
        with pytest.raises(ValueError, match=r"lengths=Units\(\.\.\.\) don't tell the lengths of documents"):
            make(UNITS, lengths=loader.documents.units, max_document_length=10)

    def test_of_a_table(self):
        datasets = pytest.importorskip("datasets")
        table = datasets.Dataset.from_list(PAIRS)
        assert list(map(documents_in, make(table, documents=documents_of_pair))) == list(map(documents_in, make(UNITS)))

    def test_print(self):
        tokens = sum(len(document["input_ids"]) for unit in UNITS for document in unit)
        first, second, third, last = str(make(documents=documents_of_pair)).splitlines()
        assert first == (
            f"PackedDataLoader of 60 units of 120 documents, {tokens:,} tokens (lengths from the documents of each "
            "example)"
        )
        assert second.startswith("  epoch 0: ")
        assert (third, last) == ("  left out: no document", "  columns: completion_mask, input_ids; left out: none")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"documents": lambda pair: [{"input_ids": pair["prompt"]}]},
                "documents failed on example 0, which has the columns 'chosen_ids', .*: KeyError: 'prompt'",
            ),
            (
                {"documents": "chosen"},
                "documents must be a function that returns the documents of an example; got 'chos",
            ),
            (
                {"documents": lambda pair: []},
                r"documents\(\.\.\.\) of example 0 must be a list of documents, .*got \[\]",
            ),
            ({"documents": lambda pair: pair}, r"documents\(\.\.\.\) of example 0 must be a list of documents"),
            (
                {"documents": lambda pair: [{"input_ids": pair["chosen_ids"]}, {"input_ids": pair["chosen_ids"][9:]}]},
                r"every document needs at least one token, .*; document 1 of example \d+ has 0",
            ),
            ({"dataset": [UNITS[0], []]}, r"example 1 must be a list of documents.* at least one; got \[\]"),
            (
                {"documents": None},
                r"got the keys \['chosen_ids'.*as preference pairs do, pass documents=, a function of",
            ),
            ({"dataset": [[{"ids": [1]}]]}, "must be a mapping with 'input_ids'; got the keys"),
            ({"tokens": 20, "documents": documents_of_pair}, r"units take more than a row has .*row size is 20"),
            (
                {"dataset": UNITS, "lengths": [sum(len(each["input_ids"]) for each in unit) for unit in UNITS]},
                r"example 0 has documents of \[\d+, \d+\] tokens, but others by the argument lengths. .*Units.of_seq",
            ),
        ],
    )
    def test_that_cannot_be_made_are_named(self, options, message):
        with pytest.raises(ValueError, match=message):
            make(**options)

    def test_with_a_fault_are_named_by_their_example(self):
        wrong = [list(unit) for unit in UNITS]
        wrong[37][1] = wrong[37][1] | {"completion_mask": [1]}
        with pytest.raises(ValueError, match=r"document 1 of example 37 has .* input_ids but 1 completion_mask"):
            list(make(wrong))

    def test_that_change_are_named(self):
        seen = []

        def changing(pair):
            seen.append(pair)
            extra = [1] * (len(seen) > 150)
            return [{"input_ids": pair["prompt_ids"] + extra}]

        with pytest.raises(
            ValueError, match=r"document \d+ has .*The function documents must return the same at each call"
        ):
            [list(make(documents=changing)) for _ in range(2)]


class TestResources:
    def rows(self, loader):
        return [[row[0] for row in documents_in(batch)] for batch in loader]

    @pytest.mark.parametrize("resource", ["num_patches", patches, [each["num_patches"] for each in IMAGES]])
    def test_no_row_is_over_the_budget(self, resource):
        drop = () if isinstance(resource, str) else ("num_patches",)
        loader = make(IMAGES, resources={"patches": resource}, budgets={"patches": 48}, drop_columns=drop)
        rows = self.rows(loader)
        assert sorted(chain.from_iterable(rows)) == list(range(60))
        held = [sum(IMAGES[number]["num_patches"] for number in row) for row in rows]
        assert max(held) <= 48
        assert len(rows) > len(make(IMAGES, drop_columns=("num_patches",)))
        total = sum(each["num_patches"] for each in IMAGES)
        share = total / (48 * len(rows))
        assert f"  patches: {total:,}, at most 48 a row, {share:.1%} full\n" in str(loader)
        assert "columns: input_ids; left out: num_patches" in str(loader)

    def test_are_read_from_a_column_without_loading_examples(self):
        datasets = pytest.importorskip("datasets")
        table = datasets.Dataset.from_list(IMAGES)
        loads = []

        class Counted(datasets.Dataset):
            def __getitem__(self, key):
                loads.append(key)
                return super().__getitem__(key)

        table.__class__ = Counted
        loader = make(table, resources={"patches": "num_patches"}, budgets={"patches": 48})
        assert [key for key in loads if isinstance(key, (int, list))] == [[0]], "the first one, for its columns"
        assert self.rows(loader) == self.rows(
            make(IMAGES, resources={"patches": patches}, budgets={"patches": 48}, drop_columns=("num_patches",))
        )

    def test_of_units(self):
        loader = make(
            UNITS,
            lengths=Units.of_sequences(
                [[len(document["input_ids"]) for document in unit] for unit in UNITS], images=[1] * 60
            ),
            budgets={"images": 1},
        )
        assert [len(documents_in(batch)) for batch in loader] == [2] * 60

    def test_that_no_example_takes(self):
        loader = make(IMAGES, resources={"sounds": [0] * 60}, budgets={"sounds": 0}, drop_columns=("num_patches",))
        assert "  sounds: 0, at most 0 a row\n" in str(loader)

    def test_over_the_budget(self):
        with pytest.raises(ValueError, match=r"units take more .* 32 patches, and the budget of patches is 16"):
            make(IMAGES, resources={"patches": "num_patches"}, budgets={"patches": 16})
        loader = make(IMAGES, resources={"patches": "num_patches"}, budgets={"patches": 16}, overlong="drop")
        count = sum(each["num_patches"] > 16 for each in IMAGES)
        assert f"left out: {count} units that take more than a row has dropped" in str(loader)
        assert len(list(chain.from_iterable(self.rows(loader)))) == 60 - count

    def test_are_checked_when_loaded(self):
        changing = [dict(each) for each in IMAGES]
        loader = make(changing, resources={"patches": "num_patches"}, budgets={"patches": 48})
        changing[5]["num_patches"] += 1
        with pytest.raises(ValueError, match=r"example 5 has \d+ patches, but had \d+ when it was measured"):
            list(loader)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"resources": {"patches": "patch"}},
                "names the column 'patch', which example 0 hasn't: it has the columns",
            ),
            (
                {"resources": {"patches": "num_patch"}, "drop_columns": ()},
                r"resources\['patches'\] names the column 'num_patch', which example 0 hasn't: .*'num_patches'",
            ),
            (
                {"resources": {"patches": lambda example: example["x"]}},
                r"resources\['patches'\] failed on example 0.*'x'",
            ),
            ({"resources": {"patches": lambda example: 1.5}}, "patches of example 0 must be an integer .*; got 1.5"),
            ({"resources": {"patches": lambda example: -1}}, "patches of example 0 must be an integer .*; got -1"),
            ({"resources": {"patches": lambda example: True}}, "patches of example 0 must be an integer .*; got True"),
            ({"resources": {"patches": [1, 2]}}, "resource 'patches' must be 60 integers"),
            ({"resources": ["patches"]}, r"resources must be a mapping from names .*; got \['patches'\]"),
            (
                {"resources": {"patches": patches}},
                r"resource 'patches', and budgets={} doesn't say how much.*budgets=\{'patches'.* out of resources",
            ),
            ({"budgets": {"patches": 3}}, "budgets has 'patches', which isn't a resource.* Pass resources= with it"),
            (
                {"resources": {"patches": [2**62] * 60}, "budgets": {"patches": 3}},
                r"resource 'patches' must be integers from 0 to 2\*\*62 - 1; unit 0 has",
            ),
            (
                {"resources": {"patches": [4] * 60}, "budgets": {"patches": 3}},
                "or pass overlong='drop', which leaves them out",
            ),
        ],
    )
    def test_refuses(self, options, message):
        with pytest.raises(ValueError, match=message):
            make(IMAGES, **{"drop_columns": ("num_patches",), **options})


class Own:
    """A collator that keeps the examples."""

    def __call__(self, examples):
        tokens = torch.tensor([token for example in examples for token in example["input_ids"]])
        return {"input_ids": tokens[None], "examples": list(examples)}


class TestOwnCollator:
    def test_gets_the_examples(self):
        for resource, columns in (("num_patches", {"input_ids"}), (patches, {"input_ids", "num_patches"})):
            loader = make(IMAGES, resources={"patches": resource}, budgets={"patches": 48}, collate_fn=Own())
            found = [example for batch in loader for example in batch["examples"]]
            assert sorted(example["input_ids"][0] for example in found) == list(range(60))
            assert all(isinstance(example, Mapping) and set(example) == columns for example in found)

    def test_makes_longer_rows_than_planned(self):
        loader = make(IMAGES, lengths=[1] * 60, collate_fn=Own())
        with pytest.raises(ValueError, match=r"collate_fn made \d+ input_ids of examples .*, and a row has at most 96"):
            list(loader)

    def test_that_is_measured_is_checked(self):
        examples = [dict(each) for each in IMAGES]
        loader = make(examples, collate_fn=Own())
        examples[3]["input_ids"] = [1]
        with pytest.raises(ValueError, match="document 3 has 1 tokens, but"):
            list(loader)

    def test_trees_of_groups(self):
        groups = [[document["input_ids"] for document in unit] for unit in UNITS]
        units = Units.of_trees(groups)
        loader = make(
            [[{"input_ids": ids} for ids in group] for group in groups], lengths=units, collate_fn=TreeCollator(TOKENS)
        )
        assert str(loader).startswith("PackedDataLoader of 60 units, ")
        rows = [batch["input_ids"].shape[1] for batch in loader]
        assert sum(rows) == units.tokens.sum() < sum(len(ids) for group in groups for ids in group)
        assert max(rows) <= TOKENS

    def test_takes_documents(self):
        loader = make(documents=documents_of_pair, collate_fn=PackingCollator().__call__)
        assert list(map(documents_in, loader)) == list(map(documents_in, make(UNITS)))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"labels": "tokens"}, "labels is an option of PackingCollator"),
            ({"max_document_length": 5}, "max_document_length is an option of PackingCollator"),
            ({"dataset": [{"text": "a"}]}, "document 0 must be a row of tokens .*; got the keys"),
        ],
    )
    def test_refuses(self, options, message):
        with pytest.raises(ValueError, match=message):
            make(**{"dataset": IMAGES, "collate_fn": Own(), **options})


def one_of_two_processes(rank, store):
    """Runs in each of two processes: their rows hold each pair once, within the budget, and resume alike."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

    def loader(budget=4, **options):
        counted = {"resources": {"pairs": lambda pair: 1}, "budgets": {"pairs": budget}}
        return dataloader(PAIRS, TOKENS, documents=documents_of_pair, **counted, **options)

    def of_all_ranks(value):
        values = [None, None]
        dist.all_gather_object(values, value)
        return values

    whole = loader(epochs=2)
    rows = [documents_in(batch) for batch in whole]
    steps = of_all_ranks(len(rows))
    assert steps[0] == steps[1]
    assert max(map(len, rows)) <= 2 * 4
    fillers = whole.rows.plan.filler_rows
    found = [pair[0] for each in of_all_ranks(rows) for batch in each for pair in batch[::2]]
    assert len(found) - fillers == len(set(found)) == 60
    state = of_all_ranks(whole.state_dict(batches_done=2))
    assert state[0] == state[1]
    rest = loader(epochs=2)
    rest.load_state_dict(state[0])
    assert [documents_in(batch) for batch in rest] == rows[2:]
    more = loader(budget=5)
    more.load_state_dict(state[0])
    later = [documents_in(batch) for batch in more]
    after = [pair[0] for each in of_all_ranks(later) for batch in each for pair in batch[::2]]
    before = [pair[0] for each in of_all_ranks(rows[:2]) for batch in each for pair in batch[::2]]
    assert sorted({*before, *after}) == sorted(set(found))
    assert not set(before) & set(after)
    with pytest.raises(ValueError, match=r"budgets is \{'pairs': 4\} on rank 0 and \{'pairs': 5\} on rank 1"):
        loader(budget=4 + rank)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes(tmp_path):
    torch.multiprocessing.start_processes(
        one_of_two_processes, (str(tmp_path / "store"),), nprocs=2, start_method="fork"
    )
