"""dataloader: passes, states, ranks, lengths, units and resources of datasets of all kinds, and what they do wrong."""

import os
import warnings
from collections.abc import Mapping
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.packing.lengths import log_normal
from tests.packing.tries import REPEATABLE
from tritonpack import (
    BinDataset,
    MultipackDistributedBatchSampler,
    PackingCollator,
    PackingWarning,
    TreeCollator,
    Units,
    dataloader,
    notices,
    pack_dataset,
    pack_stream,
)
from tritonpack.packing import plan_epoch

TOKENS = 256
LENGTHS = log_normal(120, mean=60, high=TOKENS)
# Document i holds the token i + 1, so that a batch tells which documents it has.
DOCUMENTS = [{"input_ids": [number + 1] * length} for number, length in enumerate(LENGTHS.tolist())]
RANDOM = np.random.default_rng(0)
# Pairs as TRL's DPOTrainer tokenizes them; the first token of a prompt is the number of the pair.
PAIRS = [
    {"prompt_ids": [number, *[7] * RANDOM.integers(1, 9)], "chosen_ids": [500, *[8] * RANDOM.integers(1, 20)],
     "rejected_ids": [501, *[9] * RANDOM.integers(1, 20)]}
    for number in range(60)
]  # fmt: skip
IMAGES = [
    {"input_ids": [number, *[5] * RANDOM.integers(1, 30)], "num_patches": int(RANDOM.integers(0, 3) * 16)}
    for number in range(60)
]


def make(dataset=DOCUMENTS, tokens=TOKENS, **options):
    return dataloader(dataset, tokens, **{"num_replicas": 1, "rank": 0, "seed": 0, **options})


def numbers_of(batch):
    return (batch["input_ids"][0, batch["cu_seq_lens_q"][:-1].long()] - 1).tolist()


def one_pass(loader):
    return [numbers_of(batch) for batch in loader]


def documents_in(batch):
    return [batch["input_ids"][0, start:stop].tolist() for start, stop in pairwise(batch["cu_seq_lens_q"].tolist())]


def planned(epoch, *, ranks=1, rank=0, seed=0):
    plan = plan_epoch(LENGTHS, TOKENS, ranks, seed=seed, epoch=epoch, tail="spread")
    return [row.tolist() for row in plan.rows_of_rank(rank)]


def of_pair(pair):
    return [{"input_ids": pair["prompt_ids"] + pair[name],
             "completion_mask": [0] * len(pair["prompt_ids"]) + [1] * len(pair[name])}
            for name in ("chosen_ids", "rejected_ids")]  # fmt: skip


UNITS = [of_pair(pair) for pair in PAIRS]


def table(rows, kind=None):
    return pytest.importorskip("datasets").Dataset.from_list(rows).with_format(kind)


def lazy(rows):
    """A dataset that tokenizes when it is read has no tokens to measure."""
    datasets = pytest.importorskip("datasets")
    raw = datasets.Dataset.from_dict({"text": range(len(rows)), "length": [len(row["input_ids"]) for row in rows]})
    return raw.with_transform(lambda found: {"input_ids": [rows[number]["input_ids"] for number in found["text"]]})


KINDS = {
    "list": list, "table": table, "numpy": lambda rows: table(rows, "numpy"), "torch": lambda rows: table(rows, "torch"),
    "lazy": lazy, "bins": BinDataset, "lists of documents": lambda rows: [[row] for row in rows],
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_passes_over_datasets_of_all_kinds(kind, workers, monkeypatch):
    """Each pass is the next epoch with every document once, without a warning; `set_epoch` chooses one."""
    monkeypatch.setattr(notices, "_said", {"unpatched-model": None})
    loader = make(KINDS[kind](DOCUMENTS), num_workers=workers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for epoch in range(2):
            rows = one_pass(loader)
            assert rows == planned(epoch)
            assert sorted(chain.from_iterable(rows)) == list(range(120))
            assert (loader.epoch, len(loader)) == (epoch, len(rows))
        next(iter(loader))  # a pass that is broken off ends its epoch
        assert one_pass(loader) == planned(3)
        for epoch in (0, 5):
            iter(loader)  # as Lightning makes one
            (loader if epoch else loader.batch_sampler).set_epoch(epoch)
            assert one_pass(loader) == planned(epoch)
    with pytest.raises(ValueError, match="epoch must be"):
        loader.set_epoch(-1)


@REPEATABLE
@given(st.lists(st.integers(1, 40), min_size=1, max_size=25), st.integers(1, 3), st.booleans(), st.booleans())
def test_every_document_once_and_no_row_too_long(lengths, ranks, shuffle, drop):
    documents = [{"input_ids": [number + 1] * length} for number, length in enumerate(lengths)]
    tokens = max(20, min(lengths)) if drop else 40
    options = {"shuffle": shuffle, "overlong": "drop" if drop else "error", "num_replicas": ranks}
    loaders = [make(documents, tokens, rank=rank, **options) for rank in range(ranks)]
    batches = [list(loader) for loader in loaders]
    assert {len(each) for each in batches} == {len(loaders[0])}, "all ranks have the same steps"
    assert all(batch["input_ids"].numel() <= tokens for batch in chain.from_iterable(batches))
    found = [number for batch in chain.from_iterable(batches) for number in numbers_of(batch)]
    assert len(found) - loaders[0].rows.plan.filler_rows == len(set(found))
    assert sorted(set(found)) == [number for number, length in enumerate(lengths) if length <= tokens]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_take_their_rows(rank):
    loader = make(num_replicas=3, rank=rank)
    assert len(loader) == len(planned(0, ranks=3))
    assert one_pass(loader) == planned(0, ranks=3, rank=rank)


def test_seed_is_torch_s():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    loader = make(seed=None)
    assert torch.equal(before, torch.get_rng_state()), "no random number is drawn"
    assert one_pass(loader) == planned(0, seed=5)


class TestStates:
    @pytest.mark.parametrize("workers", [pytest.param(0, id="0"), pytest.param(2, marks=pytest.mark.heavy, id="2")])
    def test_batches_that_the_loop_got_count(self, workers):
        """Workers have fetched four more by then."""
        options = {"num_workers": workers, "persistent_workers": workers > 0}
        loader = make(**options)
        one_pass(loader)
        list(zip(range(3), loader, strict=False))
        state = loader.state_dict()
        counted = make()
        counted.set_epoch(1)
        assert state == counted.state_dict(batches_done=3) != counted.state_dict(batches_done=4)
        resumed = make(**options)
        resumed.load_state_dict(state)
        assert resumed.epoch == 1
        assert resumed.state_dict() == state, "before the first batch"
        resumed.set_epoch(1)  # which keeps its place
        assert one_pass(resumed) == planned(1)[3:]
        assert resumed.state_dict() == resumed.state_dict(batches_done=len(planned(1)))
        assert one_pass(resumed) == planned(2)

    def test_of_another_rank_and_of_another_seed(self):
        loader, other = (make(num_replicas=2, rank=rank) for rank in (0, 1))
        list(zip(range(2), loader, strict=False))
        other.load_state_dict(loader.state_dict())
        assert one_pass(other) == planned(0, ranks=2, rank=1)[2:]
        resumed, refused = make(seed=None), make(seed=1)
        resumed.load_state_dict(make().state_dict(batches_done=2))
        assert [one_pass(resumed), one_pass(resumed)] == [planned(0)[2:], planned(1)], (
            "without a seed it takes this one"
        )
        with pytest.raises(ValueError, match="seed was 0 and is 1"):
            refused.load_state_dict(make().state_dict(batches_done=1))
        assert one_pass(refused) == planned(0, seed=1)
        with pytest.raises(ValueError, match=r"batches_done must be an integer from 0 to .*, the number of steps"):
            refused.state_dict(batches_done=10**6)

    def test_of_other_settings_tell_what_was_trained_on(self, monkeypatch):
        monkeypatch.setattr(notices, "_said", {"unpatched-model": None})
        loader, resumed = make(), make(tokens=300)
        rows = list(zip(range(3), loader, strict=False))
        with pytest.warns(PackingWarning, match="other-settings"):
            resumed.load_state_dict(loader.state_dict())
        tokens = sum(row["input_ids"].numel() for _, row in rows)
        assert f"\n  trained on before, with other settings: 3 steps of this epoch, {tokens:,} tokens\n" in str(resumed)
        one_pass(resumed), next(iter(resumed))
        assert "trained on before" not in str(resumed), "the next epoch"


class TestLengths:
    def test_come_from_a_column_or_are_given(self):
        assert "(lengths from the column 'length')" in str(make(lazy(DOCUMENTS)))
        wrong = table([{**document, "length": 1} for document in DOCUMENTS])
        assert one_pass(make(wrong, drop_columns=("length",))) == planned(0)
        assert one_pass(make([{**document, "length": 7, "lengths": 8} for document in DOCUMENTS])) == planned(0)
        assert one_pass(make(lengths=LENGTHS)) == planned(0)
        changed = LENGTHS.copy()
        changed[-1] += 1
        for options, message in (
            ({"dataset": wrong}, f"document 0 has {LENGTHS[0]} tokens, but 1 by the column 'length'"),
            ({"dataset": table([{**document, "lengths": 1.5} for document in DOCUMENTS])},
             r"the column 'lengths' must hold the number.*drop_columns=\('lengths',\)"),
            ({"lengths": [1, 2, 3]}, "3 lengths for a dataset of 120 documents"),
            ({"lengths": changed, "tokens": TOKENS + 1}, r"document 119 has .* tokens, but .* by the argument lengths"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=message):
                one_pass(make(**options))

    def test_that_are_too_long(self):
        long = [{"input_ids": [1] * 300}, *DOCUMENTS[1:]]
        with pytest.raises(ValueError, match=r"1 of 120 documents.*300 tokens\).*'drop'.*max_document_length=256"):
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
        make(rows, resources={"patches": "num_patches"}, budgets={"patches": 48})
        assert [key for key in loads if isinstance(key, (int, list))] == [[0]], "the first one, for its columns"


def test_columns_that_are_packed_dropped_and_named():
    documents = [{**one, "text": "", "pixel_values": [1.0]} for one in DOCUMENTS]
    with pytest.raises(ValueError, match=r"'pixel_values', 'text'.*drop_columns=\('pixel_values', 'text'\)"):
        make(documents)
    loader = make(documents, drop_columns=("pixel_values", "text"))
    assert one_pass(loader) == planned(0)
    assert str(loader).endswith("columns: input_ids; left out: pixel_values, text")
    documents = [{**one, "bbox": [[1, 2]] * len(one["input_ids"]), "label": number % 3}
                 for number, one in enumerate(DOCUMENTS)]  # fmt: skip
    batch = next(iter(make(documents, per_token=("bbox",), labels="documents")))
    assert batch["bbox"].shape == (1, batch["input_ids"].shape[1], 2)
    assert batch["labels"].tolist() == [number % 3 for number in numbers_of(batch)]
    with pytest.raises(ValueError, match="drop_columns names 'txt', but the first document has the columns input_"):
        make(drop_columns=("txt",))
    with pytest.raises(ValueError, match="drop_columns must be a collection"):
        make(drop_columns="text")
    order = np.array([5, 37, *range(5), *range(6, 37), *range(38, 120)])  # document 37 isn't the first of its row
    for column, message in (
        ({"input_ids": [-2] * int(LENGTHS[37])}, "document 37 has -2 at position 0"),
        ({"completion_mask": [1]}, "document 37 has .* input_ids but 1 completion_mask"),
        ({"bbox": [[1]] * int(LENGTHS[37])}, r"document 37 and integers of shape \(2,\) in document \d+;"),
        ({"label": [1, 1]}, r"shape \(2,\) in document 37 and integers of shape \(\) in document \d+;"),
        ({"token_type_ids": [0] * int(LENGTHS[37])}, r"document 37 has 'token_type_ids' and document \d+ hasn't"),
    ):
        wrong = [*documents[:37], documents[37] | column, *documents[38:]]
        with pytest.raises(ValueError, match=message):
            list(make(wrong, tokens=4096, order=order, per_token=("bbox",), labels="documents"))


def test_options_reach_collator_dataloader_and_sampler():
    loader = make(pad_to_multiple_of=64, pad_token_id=0)
    assert {batch["input_ids"].shape[1] % 64 for batch in loader} == {0}
    assert max(batch["input_ids"].shape[1] for batch in loader) <= TOKENS
    with pytest.raises(ValueError, match="can't be padded to multiples of 100"):
        make(pad_to_multiple_of=100, pad_token_id=0)
    generator = torch.Generator()
    loader = make(generator=generator, timeout=0, worker_init_fn=print, pin_memory=False)
    assert (loader.generator, loader.worker_init_fn, loader.pin_memory) == (generator, print, False)
    options = {"tail": "drop", "objective": "linear", "lookahead": 0.02, "shuffle": False}
    loader, expected = (
        make(steps_together=1, **options),
        MultipackDistributedBatchSampler(TOKENS, LENGTHS, 1, 0, **options),
    )
    assert one_pass(loader) == list(expected)
    assert f"{120 - len(np.unique(expected.plan.items))} document" in str(loader)
    loader = make(order=np.arange(120)[::-1])
    rows = one_pass(loader)
    assert "left out: no document of the order\n" in str(loader)
    assert np.corrcoef([np.mean(row) for row in rows], np.arange(len(rows)))[0, 1] < -0.95


def test_print():
    for ranks, filler in ((1, ""), (2, "1 filler row repeats"), (3, "2 filler rows repeat")):
        lines = str(make([{"input_ids": [5] * 3}], num_replicas=ranks)).splitlines()
        assert lines[0] == "PackedDataLoader of 1 document, 3 tokens (lengths from input_ids)"
        assert lines[1].startswith("  epoch 0: 1 step of ")
        assert lines[2:-2] == ([f"  {filler} a document in the last step"] if filler else [])
    tokens = sum(len(document["input_ids"]) for unit in UNITS for document in unit)
    first, *_, last = str(make(PAIRS, documents=of_pair)).splitlines()
    source = "lengths from the documents of each example"
    assert first == f"PackedDataLoader of 60 units of 120 documents, {tokens:,} tokens ({source})"
    assert last == "  columns: completion_mask, input_ids; left out: none"


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

    message = r"document \d+ has .*The function documents must return the same at each call"
    with pytest.raises(ValueError, match=message):
        [list(make(PAIRS, 96, documents=changing)) for _ in range(2)]


RESOURCES = {
    "column": "num_patches",
    "function": lambda example: torch.tensor(example["num_patches"]),
    "integers": [each["num_patches"] for each in IMAGES],
}


@pytest.mark.parametrize("dataset", [list, table])
@pytest.mark.parametrize("kind", RESOURCES)
def test_no_row_is_over_the_budget(kind, dataset):
    def loader(budget, **options):
        drop = () if kind == "column" else ("num_patches",)
        given = {"resources": {"patches": RESOURCES[kind]}, "budgets": {"patches": budget}, "drop_columns": drop}
        return make(dataset(IMAGES), 96, **given, **options)

    budgeted = loader(48)
    rows = [[row[0] for row in documents_in(batch)] for batch in budgeted]
    assert sorted(chain.from_iterable(rows)) == list(range(60))
    assert max(sum(IMAGES[number]["num_patches"] for number in row) for row in rows) <= 48
    total = sum(each["num_patches"] for each in IMAGES)
    assert f"  patches: {total:,}, at most 48 a row, {total / (48 * len(rows)):.1%} full\n" in str(budgeted)
    assert "columns: input_ids; left out: num_patches" in str(budgeted)
    with pytest.raises(ValueError, match=r"units take more .* 32 patches, and the budget of patches is 16"):
        loader(16)
    dropping, count = loader(16, overlong="drop"), sum(each["num_patches"] > 16 for each in IMAGES)
    assert f"left out: {count} units that take more than a row has dropped" in str(dropping)
    assert sum(len(documents_in(batch)) for batch in dropping) == 60 - count


def test_amounts_that_change_or_are_zero():
    changing = [dict(each) for each in IMAGES]
    loader = make(changing, 96, resources={"patches": "num_patches"}, budgets={"patches": 48})
    changing[5]["num_patches"] += 1
    with pytest.raises(ValueError, match=r"example 5 has \d+ patches, but had \d+ when it was measured"):
        list(loader)
    loader = make(IMAGES, 96, resources={"s": [0] * 60}, budgets={"s": 0}, drop_columns=("num_patches",))
    assert "  s: 0, at most 0 a row\n" in str(loader)


class Own:
    """A collator that keeps the examples."""

    def __call__(self, examples):
        tokens = torch.tensor([token for example in examples for token in example["input_ids"]])
        return {"input_ids": tokens[None], "examples": list(examples)}


def test_collator_of_the_user_s():
    for kind, columns in (("column", {"input_ids"}), ("function", {"input_ids", "num_patches"})):
        budget = {"resources": {"patches": RESOURCES[kind]}, "budgets": {"patches": 48}}
        found = [example for batch in make(IMAGES, 96, collate_fn=Own(), **budget) for example in batch["examples"]]
        assert sorted(example["input_ids"][0] for example in found) == list(range(60))
        assert all(isinstance(example, Mapping) and set(example) == columns for example in found)
    with pytest.raises(ValueError, match=r"collate_fn made \d+ input_ids of examples .*, and a row has at most 96"):
        list(make(IMAGES, 96, lengths=[1] * 60, collate_fn=Own()))
    examples = [dict(each) for each in IMAGES]
    loader = make(examples, 96, collate_fn=Own())
    examples[3]["input_ids"] = [1]
    with pytest.raises(ValueError, match="document 3 has 1 tokens, but"):
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
    "pack_dataset": lambda dataset: list(pack_dataset(dataset, 8)),
    "loaded rows": lambda dataset: list(pack_dataset(dataset, 8, lengths=[4] * 6)),
    "bins": lambda dataset: BinDataset(dataset)[[1, 4]],
    "loaded": lambda dataset: list(make(dataset, **GIVEN)),
    "workers": lambda dataset: list(make(dataset, **GIVEN, num_workers=1)),
    "pack_stream": lambda dataset: list(pack_stream(dataset, 8)),
}


@pytest.mark.parametrize("kind", [Failing, AtOnce])
@pytest.mark.parametrize("way", WAYS)
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
    message = r"document [45] can't be read: the dataset holds only 4 documents now\. It mustn't shrink"
    for kind in (Failing, AtOnce):
        dataset = kind()
        loader, packed = make(dataset, 8), pack_dataset(dataset, 8)
        del dataset[4:]
        for load in (lambda loader=loader: list(loader), lambda packed=packed: [packed[n] for n in range(3)]):
            with pytest.raises(ValueError, match=message) as info:
                load()
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


class TestAccelerate:
    def prepared(self, loader, rank, ranks):
        data_loader = pytest.importorskip("accelerate.data_loader")
        return data_loader.prepare_data_loader(loader, num_processes=ranks, process_index=rank, put_on_device=False)

    @pytest.mark.parametrize("ranks", [1, 3])
    def test_divides_the_rows_counts_epochs_and_resumes(self, ranks):
        for rank in range(ranks):
            ours = make(num_replicas=ranks, rank=rank)
            loader = self.prepared(ours, rank, ranks)
            for epoch in range(2):
                assert one_pass(loader) == planned(epoch, ranks=ranks, rank=rank)
                assert len(loader) == len(planned(epoch, ranks=ranks))
            for done in (2, len(planned(3, ranks=ranks))):
                source = make(num_replicas=ranks, rank=0)
                source.set_epoch(3)
                ours.load_state_dict(source.state_dict(batches_done=done))
                if done == 2:
                    loader.set_epoch(ours.epoch)
                rest = [planned(3, ranks=ranks, rank=rank)[done:], planned(4, ranks=ranks, rank=rank)]
                assert [one_pass(loader), one_pass(loader)] == rest

    def test_cannot_count_its_batches(self):
        ours, counted = (make(num_replicas=2, rank=rank) for rank in (0, 1))
        next(iter(self.prepared(ours, 0, 2)))
        with pytest.raises(ValueError, match=r"weren't counted here\. Pass batches_done"):
            ours.state_dict()
        next(iter(counted))
        assert ours.state_dict(batches_done=1) == counted.state_dict()


def one_of_two_processes(rank, store):
    """Runs in each of two processes: ranks agree on the seed; their rows hold each pair once, and resume alike."""
    # As torchrun does. accelerate reads these, and finds the group that exists.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(rank + 3)
    assert one_pass(dataloader(DOCUMENTS, TOKENS)) == planned(0, ranks=2, rank=rank, seed=3), "the seed of rank 0"
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    prepared = accelerate.Accelerator(cpu=True).prepare(dataloader(DOCUMENTS, TOKENS))
    for epoch in range(2):
        assert one_pass(prepared) == planned(epoch, ranks=2, rank=rank, seed=3)

    def pairs(budget=4, state=None):
        counted = {"resources": {"pairs": lambda pair: 1}, "budgets": {"pairs": budget}}
        loader = dataloader(PAIRS, 96, documents=of_pair, epochs=2, **counted)
        if state is not None:
            loader.load_state_dict(state)
        return loader, [documents_in(batch)[::2] for batch in loader]

    def of_all_ranks(value):
        values = [None, None]
        dist.all_gather_object(values, value)
        return values

    def numbers(rows):
        return [pair[0] for each in of_all_ranks(rows) for row in each for pair in row]

    whole, rows = pairs()
    assert max(map(len, rows)) <= 4
    assert len(set(of_all_ranks(len(rows)))) == 1
    assert len(numbers(rows)) - whole.rows.plan.filler_rows == len(set(numbers(rows))) == 60
    whole.set_epoch(0)
    state = whole.state_dict(batches_done=2)
    assert of_all_ranks(state) == [state, state]
    assert pairs(state=state)[1] == rows[2:]
    later = numbers(pairs(budget=5, state=state)[1])
    assert sorted({*numbers(rows[:2]), *later}) == list(range(60))
    assert not set(numbers(rows[:2])) & set(later)
    with pytest.raises(ValueError, match=r"budgets is \{'pairs': 4\} on rank 0 and \{'pairs': 5\} on rank 1"):
        pairs(budget=4 + rank)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes(tmp_path):
    store = str(tmp_path / "store")
    torch.multiprocessing.start_processes(one_of_two_processes, (store,), nprocs=2, start_method="fork")
