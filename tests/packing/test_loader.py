"""dataloader: every unit once in rows that hold it, passes, states, ranks, and datasets that raise or change."""

import os
import warnings
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
    TreeCollator,
    Units,
    dataloader,
    notices,
)
from tritonpack.packing import plan_epoch

TOKENS = 256
LENGTHS = log_normal(120, mean=60, high=TOKENS)
# Document i holds the token i + 1, so that a batch tells which documents it has.
DOCUMENTS = [{"input_ids": [number + 1] * length} for number, length in enumerate(LENGTHS.tolist())]
RANDOM = np.random.default_rng(0)
# Pairs as TRL's DPOTrainer tokenizes them.
PAIRS = [
    {
        "prompt_ids": [number, 7],
        "chosen_ids": [8] * RANDOM.integers(1, 20),
        "rejected_ids": [9] * RANDOM.integers(1, 20),
    }
    for number in range(60)
]


def make(dataset=DOCUMENTS, tokens=TOKENS, **options):
    return dataloader(dataset, tokens, **{"num_replicas": 1, "rank": 0, "seed": 0, **options})


def one_pass(loader):
    """The documents of each batch."""
    return [(batch["input_ids"][0, batch["cu_seq_lens_q"][:-1].long()] - 1).tolist() for batch in loader]


def documents_in(batch):
    return [batch["input_ids"][0, start:stop].tolist() for start, stop in pairwise(batch["cu_seq_lens_q"].tolist())]


def planned(epoch, *, ranks=1, rank=0, seed=0):
    plan = plan_epoch(LENGTHS, TOKENS, ranks, seed=seed, epoch=epoch, tail="spread")
    return [row.tolist() for row in plan.rows_of_rank(rank)]


def of_pair(pair):
    return [{"input_ids": pair["prompt_ids"] + pair[name]} for name in ("chosen_ids", "rejected_ids")]


def table(rows, kind=None):
    return pytest.importorskip("datasets").Dataset.from_list(rows).with_format(kind)


def lazy(rows):
    """A dataset that tokenizes when it is read has no tokens to measure."""
    raw = table([{"text": number} for number in range(len(rows))])
    return raw.with_transform(lambda found: {"input_ids": [rows[number]["input_ids"] for number in found["text"]]})


KINDS = {
    "list": list, "table": table, "lazy": lazy, "numpy": lambda rows: table(rows, "numpy"),
    "torch": lambda rows: table(rows, "torch"), "bins": BinDataset, "units": lambda rows: [[row] for row in rows],
}  # fmt: skip


@pytest.mark.fast("0-list", "0-units")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_passes_over_datasets_of_all_kinds(kind, workers, monkeypatch):
    """Each pass is the next epoch with every document once, without a warning; `set_epoch` chooses one."""
    monkeypatch.setattr(notices, "said", {"unpatched-model": None})
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


# An example of a unit's documents, and the options that read it.
FORMS = {
    "lists": (lambda own: own, {}),
    "function": (lambda own: {"own": own, "n": 1}, {"documents": lambda example: example["own"]}),
    "documents": (lambda own: own[0], {}),
    "own collator": (lambda own: own, {"collate_fn": PackingCollator().__call__}),
}


@REPEATABLE
@given(
    st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=3), min_size=1, max_size=15),
    st.sampled_from(sorted(FORMS)), st.integers(1, 3), st.booleans(), st.sampled_from([None, 4]), st.data(),
)  # fmt: skip
def test_invariants(drawn, form, ranks, shuffle, longest, data):
    """Whole units in order, each once if it fits, on ranks with the same steps, in rows of 20 tokens; resume."""
    make_example, options = FORMS[form]
    longest = None if form == "own collator" else longest
    units = []
    for number, lengths in enumerate(drawn):
        lengths = lengths[:1] if form == "documents" else lengths
        units.append([{"input_ids": [3 * number + place] * n, "n": n} for place, n in enumerate(lengths)])
    sizes = [sum(min(len(one["input_ids"]), longest or 99) for one in unit) for unit in units]
    fits = [number for number, size in enumerate(sizes) if size <= 20]
    options = {
        **options, "overlong": "drop", "max_document_length": longest, "num_replicas": ranks, "drop_columns": ["n"],
        "dataset": [*map(make_example, units)], "tokens": 20, "shuffle": shuffle,
    }  # fmt: skip
    if len(fits) < len(units):
        with pytest.raises(ValueError, match=r"longer than the row size of 20|take more than|leaves nothing"):
            make(**options | {"overlong": "error" if fits else "drop"})
    if not fits:
        return
    loaders = [make(rank=rank, **options) for rank in range(ranks)]
    batches = [list(loader) for loader in loaders]
    assert {len(each) for each in batches} == {len(loaders[0])}
    found = []
    for batch in chain.from_iterable(batches):
        assert batch["input_ids"].numel() <= 20
        row = documents_in(batch)
        own = list(dict.fromkeys(document[0] // 3 for document in row))
        assert row == [one["input_ids"][:longest] for number in own for one in units[number]]
        found += own
    assert len(found) - loaders[0].rows.plan.filler_rows == len(set(found))
    assert sorted(set(found)) == fits
    done = data.draw(st.integers(0, len(batches[0])))
    again = make(**options)
    again.load_state_dict(make(rank=ranks - 1, **options).state_dict(batches_done=done))
    assert [documents_in(batch) for batch in again] == [documents_in(batch) for batch in batches[0][done:]]


@pytest.mark.fast("0")
@pytest.mark.parametrize("workers", [0, 2])
def test_states_count_the_batches_that_the_loop_got(workers):
    """Workers have fetched four more by then."""
    options = {"num_workers": workers, "persistent_workers": workers > 0}
    loader, resumed, counted = make(**options), make(**options), make()
    one_pass(loader)
    list(zip(range(3), loader, strict=False))
    state = loader.state_dict()
    counted.set_epoch(1)
    assert state == counted.state_dict(batches_done=3) != counted.state_dict(batches_done=4)
    resumed.load_state_dict(state)
    assert (resumed.epoch, resumed.state_dict()) == (1, state), "before the first batch"
    resumed.set_epoch(1)  # which keeps its place
    assert one_pass(resumed) == planned(1)[3:]
    assert resumed.state_dict() == resumed.state_dict(batches_done=len(planned(1)))
    assert one_pass(resumed) == planned(2)
    with pytest.raises(ValueError, match=r"batches_done must be an integer from 0 to .*, the number of steps"):
        resumed.state_dict(batches_done=10**6)


def test_seeds_of_torch_and_of_states():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    loader, resumed = make(seed=None), make(seed=None)
    assert torch.equal(before, torch.get_rng_state()), "no random number is drawn"
    assert one_pass(loader) == planned(0, seed=5)
    resumed.load_state_dict(make().state_dict(batches_done=2))
    assert [one_pass(resumed), one_pass(resumed)] == [planned(0)[2:], planned(1)], "without a seed it takes this one"


def test_options_reach_collator_dataloader_and_sampler():
    options = {"max_document_length": 50, "pad_to_multiple_of": 64, "pad_token_id": 3}
    for one, other in zip(make(**options), make(collate_fn=PackingCollator(**options)), strict=True):
        assert all(torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in one)
    with pytest.raises(ValueError, match="can't be padded to multiples of 100"):
        make(pad_to_multiple_of=100)
    assert make(worker_init_fn=print).worker_init_fn is print
    options = {"tail": "drop", "objective": "linear", "shuffle": False}
    loader, expected = make(**options), MultipackDistributedBatchSampler(TOKENS, LENGTHS, 1, 0, **options)
    assert one_pass(loader) == list(expected)
    assert f"{120 - len(np.unique(expected.plan.items))} document" in str(loader)


def test_print():
    for ranks, filler in ((1, []), (2, ["1 filler row"]), (3, ["2 filler rows"])):
        lines = str(make([{"input_ids": [5] * 3, "n": 1}], num_replicas=ranks, drop_columns=["n"])).splitlines()
        assert lines[0] == "PackedDataLoader of 1 document, 3 tokens (lengths from input_ids)"
        assert lines[1].startswith("  epoch 0: 1 step of ")
        assert lines[2:-2] == [f"  {one} in the last step, of documents that come twice" for one in filler]
        assert lines[-2:] == ["  left out: no document", "  columns: input_ids; left out: n"]
    long = [{"input_ids": [1] * 300}, *DOCUMENTS[1:]]
    for loader, words in (
        (make(max_document_length=9), f"{(LENGTHS - 9).clip(0).sum():,} tokens cut off by max_document_length\n"),
        (make(long, overlong="drop"), "left out: 1 document longer than the capacity dropped: 300 tokens lost"),
        (make(PAIRS, documents=of_pair), " of 60 units of 120 documents, "),
        (make(PAIRS, documents=of_pair), " tokens (lengths from the documents of each example)\n"),
    ):
        assert words in str(loader)


def test_a_table_is_measured_without_loading_examples(monkeypatch):
    datasets, loads = pytest.importorskip("datasets"), []
    get = datasets.Dataset.__getitem__
    monkeypatch.setattr(datasets.Dataset, "__getitem__", lambda self, key: [loads.append(key), get(self, key)][1])
    make(table(DOCUMENTS))
    assert [key for key in loads if isinstance(key, (int, list))] == [[0]], "the first one, for its columns"


OF_37 = int(LENGTHS[37])


@pytest.mark.parametrize(("column", "message"), [  # of document 37
    ({"input_ids": [-2] * OF_37}, "document 37 has -2 at position 0"),
    ({"bbox": [[1]] * OF_37}, r"document 37 and torch.int64 of shape \(2,\) in document"),
])  # fmt: skip
def test_refused_in_loading(column, message):
    documents = [{**one, "bbox": [[1, 2]] * len(one["input_ids"])} for one in DOCUMENTS]
    batch = next(iter(make(documents, per_token=("bbox",))))
    assert batch["bbox"].shape == (1, batch["input_ids"].shape[1], 2)
    wrong = [*documents[:37], documents[37] | column, *documents[38:]]
    with pytest.raises(ValueError, match=message):
        list(make(wrong, tokens=4096, shuffle=False, per_token=("bbox",)))
    unit = [[one, wrong[37]] for one in documents]
    with pytest.raises(ValueError, match=message.replace("document 37", r"document 1 of example \d+")):
        list(make(unit, tokens=4096, per_token=("bbox",)))


def test_examples_that_change():
    """Other tokens than when they were counted, or than the given lengths, are refused in loading."""
    changed, calls = LENGTHS + (np.arange(120) == 119), []
    assert one_pass(make(lengths=LENGTHS)) == planned(0)
    with pytest.raises(ValueError, match=r"example 119 has .* tokens, but .* by the argument lengths"):
        one_pass(make(lengths=changed, tokens=TOKENS + 1))

    def changing(pair):
        calls.append(pair)
        return [{"input_ids": pair["prompt_ids"] + [1] * (len(calls) > 150)}]

    with pytest.raises(ValueError, match=r"example \d+ has .*A function must return the same documents each time"):
        [list(make(PAIRS, 96, documents=changing)) for _ in range(2)]


def test_collators_of_the_user_s():
    units = [*map(of_pair, PAIRS)]
    found = [example for batch in make(PAIRS, 96, documents=of_pair, collate_fn=list) for example in batch]
    assert sorted(found, key=str) == sorted(units, key=str)
    sizes = Units.of_trees([[one["input_ids"] for one in unit] for unit in units])
    trees = make(units, 96, lengths=sizes, collate_fn=TreeCollator())
    assert sum(batch["input_ids"].shape[1] for batch in trees) == sizes.tokens.sum()


class Failing(list):
    """Documents, one of which can't be read."""

    def __getitem__(self, number):
        if number == 4:
            raise self.error
        return super().__getitem__(number)


@pytest.mark.parametrize("read", [
    lambda dataset: list(make(dataset, 8)), lambda dataset: list(make(dataset, 8, lengths=[4] * 6)),
    lambda dataset: BinDataset(dataset)[[1, 4]],
])  # fmt: skip
@pytest.mark.parametrize("error", [OSError("truncated"), ConnectionResetError("a"), TimeoutError()], ids=repr)
def test_a_dataset_that_raises_names_the_document(read, error):
    wanted = next((kind for kind in (ConnectionError, TimeoutError) if isinstance(error, kind)), ValueError)
    dataset = Failing([{"input_ids": [5, 6, 7, 8]}] * 6)
    dataset.error = error
    for at_once in (None, lambda numbers: [dataset[number] for number in numbers]):
        dataset.__getitems__ = at_once
        with pytest.raises(wanted, match=rf"document 4 can't be read: {type(error).__name__}"):
            read(dataset)
    dataset.__getitems__ = lambda numbers: [0]
    with pytest.raises(ValueError, match=r"__getitems__ returned 1 document for the 2 numbers 1, 2; it must"):
        BinDataset(dataset)[[1, 2]]


def test_accelerate_cannot_count_batches():
    data_loader = pytest.importorskip("accelerate.data_loader")
    ours, counted = (make(num_replicas=2, rank=rank) for rank in (0, 1))
    next(iter(data_loader.prepare_data_loader(ours, num_processes=2, process_index=0, put_on_device=False)))
    with pytest.raises(ValueError, match=r"weren't counted here\. Pass batches_done"):
        ours.state_dict()
    next(iter(counted))
    assert ours.state_dict(batches_done=1) == counted.state_dict()
    with pytest.raises(ValueError, match="yields the rows of rank 1, of 2 ranks"):
        _ = make(num_replicas=2, rank=1, shard=True).batch_sampler.batch_size


def one_of_two_processes(rank, store):
    """Runs in each of two processes, which agree on the seed and compare tokens and states."""
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

    state = dataloader(DOCUMENTS, TOKENS).state_dict(batches_done=2 + rank)
    with pytest.raises(ValueError, match="the ranks load different states"):
        dataloader(DOCUMENTS, TOKENS).load_state_dict(state)
    with pytest.raises(ValueError, match="batch_max_length is 96 on rank 0 and 97 on rank 1"):
        dataloader(PAIRS, 96 + rank, documents=of_pair)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes(tmp_path):
    store = str(tmp_path / "store")
    torch.multiprocessing.start_processes(one_of_two_processes, (store,), nprocs=2, start_method="fork")
