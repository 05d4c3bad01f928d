"""Which epochs come out of the loaders that libraries make of ours: the next one in each pass, or a warning."""

import copy
import warnings
from functools import cache, partial
from itertools import chain, islice

import numpy as np
import pytest
from torch.utils.data import DataLoader, RandomSampler

from tests.packing.lengths import log_normal
from tritonpack import (
    BinDataset,
    MultipackBatchSampler,
    MultipackDistributedBatchSampler,
    dataloader,
    notices,
    pack_stream,
)

LENGTHS = log_normal(60, mean=60, high=200)
DOCUMENTS = [{"input_ids": [number + 1] * length} for number, length in enumerate(LENGTHS.tolist())]


class Shuffled:
    """Documents in an order of their own in each epoch, as datasets.IterableDataset has them."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([DOCUMENTS[number] for number in np.random.default_rng(self.epoch).permutation(len(DOCUMENTS))])


class Made:
    """A loader to try, and what it iterates over: a sampler, the loader itself or a stream."""

    def __init__(self, kind, loader=DataLoader, **options):
        """With two ranks it's the loader of the first process."""
        self.ranks = options.pop("ranks", 1)
        if kind == "loader":
            self.source = self.loader = dataloader(DOCUMENTS, 256, num_replicas=self.ranks, rank=0, seed=0, **options)
            if loader is not DataLoader:
                self.source = self.loader.batch_sampler
                self.loader = loader(
                    self.loader.dataset, batch_sampler=self.source, collate_fn=self.loader.collate_fn, **options
                )
        elif kind == "stream":
            self.source = pack_stream(Shuffled(), 256, window=16, num_replicas=self.ranks, shard=False)
            self.loader = loader(self.source, batch_size=1, collate_fn=of_bins, **options)
        else:
            self.source = self.sampler(kind)
            self.loader = loader(BinDataset(DOCUMENTS), batch_sampler=self.source, collate_fn=of_rows, **options)

    def sampler(self, kind):
        if kind == "sampler":
            return MultipackDistributedBatchSampler(256, LENGTHS, self.ranks, seed=0, tail="spread", shard=False)
        return MultipackBatchSampler(
            RandomSampler(DOCUMENTS), 1, 256, LENGTHS, seed=0, drop_last=False, num_replicas=self.ranks
        )

    def prepare(self, **options):
        data_loader = pytest.importorskip("accelerate.data_loader")
        return data_loader.prepare_data_loader(
            self.loader, num_processes=self.ranks, process_index=0, put_on_device=False, **options
        )


def numbers(documents):
    return sorted({int(document["input_ids"][0]) - 1 for document in documents})


def of_rows(bins):
    """The numbers of the documents of a batch: a list of documents, or of bins."""
    return numbers(chain.from_iterable(bins) if isinstance(bins[0], list) else bins)


def of_bins(bins):
    return numbers(chain.from_iterable(bins))


def one_pass(loader, batches=None):
    """The documents of each batch of a pass."""
    found = []
    for batch in islice(loader, batches):
        found.append(batch if isinstance(batch, list) else sorted(set((batch["input_ids"][0] - 1).tolist())))
    return found


def plain(make):
    loader = make().loader
    return [one_pass(loader) for _ in range(3)]


def broken_off(make):
    loader = make().loader
    return [one_pass(loader, 3), one_pass(loader), one_pass(loader)]


def second_iterator(make):
    loader = make().loader
    first = iter(loader)
    next(first)
    return [one_pass(loader), list(first)[-1:], one_pass(loader)][::2]


def shallow_copy(make):
    loader = make().loader
    return [one_pass(copy.copy(loader)), one_pass(loader), one_pass(loader)]


def as_lightning(make):
    """It makes an iterator that it doesn't use before the first pass, and calls `set_epoch` on the sampler."""
    made, passes = make(), []
    iter(made.loader)
    for epoch in range(3):
        getattr(made.loader.batch_sampler, "set_epoch", made.source.set_epoch)(epoch)
        passes.append(one_pass(made.loader))
    return passes


def skip_first(loader):
    return one_pass(pytest.importorskip("accelerate").skip_first_batches(loader, 2))


def skip(make):
    loader = make().loader
    return [skip_first(loader), one_pass(loader), one_pass(loader)]


def prepared(make):
    loader = make().prepare()
    return [one_pass(loader) for _ in range(3)]


def prepared_broken_off(make):
    loader = make().prepare()
    return [one_pass(loader, 3), one_pass(loader), one_pass(loader)]


def prepared_skip(make):
    loader = make().prepare()
    return [skip_first(loader), one_pass(loader), one_pass(loader)]


def prepared_skip_later(make):
    loader = make().prepare()
    return [one_pass(loader), skip_first(loader), one_pass(loader), one_pass(loader)]


def prepared_skip_twice(make):
    loader = make().prepare()
    return [skip_first(loader), skip_first(loader), one_pass(loader)]


def prepared_and_set(make):
    """As Trainer calls it."""
    loader = make().prepare()
    loader.set_epoch(3)
    first = skip_first(loader)
    loader.set_epoch(4)
    return [first, one_pass(loader), one_pass(loader)]


def prepared_anew(make):
    made = make()
    return [one_pass(made.prepare()), one_pass(made.prepare()), one_pass(made.prepare())]


def prepared_and_source_set(make):
    made = make()
    loader = made.prepare()
    made.source.set_epoch(2)
    return [one_pass(loader) for _ in range(3)]


def prepared_and_loaded(make):
    """A state of our own object, in which nothing was prepared."""
    made = make()
    made.source.set_epoch(2)
    if hasattr(made.source, "num_bins"):
        list(islice(made.source, 3 * made.ranks))
        state = made.source.state_dict()
    else:
        state = made.source.state_dict(3 if made.source is made.loader else 3 * made.ranks)
    again = make()
    loader = again.prepare()
    again.source.load_state_dict(state)
    return [one_pass(loader) for _ in range(3)]


def stateful_loader():
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader


def stateful(make):
    loader = make(loader=stateful_loader()).loader
    return [one_pass(loader) for _ in range(3)]


def stateful_loaded(make):
    made, again = make(loader=stateful_loader()), make(loader=stateful_loader())
    made.source.set_epoch(1)
    batches = iter(made.loader)
    list(islice(batches, 3))
    again.loader.load_state_dict(made.loader.state_dict())
    return [one_pass(again.loader) for _ in range(3)]


def prepared_stateful(make):
    stateful_loader()
    loader = make().prepare(use_stateful_dataloader=True)
    return [one_pass(loader) for _ in range(3)]


def prepared_stateful_loaded(make, epoch=None):
    stateful_loader()
    loader, again = (make().prepare(use_stateful_dataloader=True) for _ in range(2))
    one_pass(loader)
    batches = iter(loader)
    list(islice(batches, 3))
    again.load_state_dict(loader.state_dict())
    if epoch is not None:
        again.set_epoch(epoch)
    return [one_pass(again) for _ in range(3)]


@pytest.mark.parametrize("kind", ["sampler", "bins", "loader", "stream"])
def test_stateful_loaders_of_several_processes_save_no_epoch(kind, monkeypatch):
    """They say so, and which call chooses the epoch of a resumed pass."""
    monkeypatch.setattr(notices, "_said", {"unpatched-model": None})
    make = partial(Made, kind, ranks=2)
    with pytest.warns(UserWarning, match=r"stateful-loader: .* Call set_epoch\(number\) on the prepared loader"):
        assert epoch_of(prepared_stateful_loaded(make)[0], kind, 2) == "0[3:]"
    assert [epoch_of(batches, kind, 2) for batches in prepared_stateful_loaded(make, epoch=1)] == ["1[3:]", "2", "3"]


WORKER, KEPT, TWO = {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}, {"ranks": 2}
# For each way the epochs of its passes, with the first batch if it isn't 0; "warns": of a second pass over an epoch.
# Samplers, loaders and streams differ only where nobody calls set_epoch.
WAYS = [
    (plain, {}, "0 0 0 warns", "0 1 2", "0 0 0 warns"),
    (plain, WORKER, "0 0 0 warns", "0 1 2", "0 0 0"),  # the worker warns
    (plain, KEPT, "0 0 0 warns", "0 1 2", "0 0 0"),
    (broken_off, {}, "0 0 0 warns", "0 1 2", "0 0 0 warns"),
    (second_iterator, {}, "0 0 warns", "1 2", "0 0 warns"),
    (shallow_copy, {}, "0 0 0 warns", "0 1 2", "0 0 0 warns"),
    (as_lightning, {}, *["0 1 2"] * 3),
    (as_lightning, KEPT, *["0 1 2"] * 3),
    (skip, {}, "0[2:] 0 0 warns", "0[2:] 1 2", "0[2:] 0 0 warns"),
    (stateful, {}, "0 0 0 warns", "0 1 2", "0 0 0 warns"),
    (stateful, WORKER, "0 0 0 warns", "0 1 2", "0 0 0"),
    (stateful_loaded, {}, "1[3:] 1 1 warns", "1[3:] 2 3", "1[3:] 1 1 warns"),
    (stateful_loaded, WORKER, "1[3:] 1 1 warns", "1[3:] 2 3", "1[3:] 1 1"),
    *[
        (way, options, *[expected] * 3)
        for way, expected in (
            (prepared, "0 1 2"),
            (prepared_broken_off, "0 1 2"),
            (prepared_skip, "0[2:] 1 2"),
            (prepared_skip_later, "0 1[2:] 2 3"),
            (prepared_and_set, "3[2:] 4 5"),
            (prepared_anew, "0 1 2"),
            (prepared_and_source_set, "2 3 4"),
            (prepared_and_loaded, "2[3:] 3 4"),
            (prepared_stateful, "0 1 2"),
        )
        for options in ({}, TWO)
    ],
    (prepared, KEPT, *["0 1 2"] * 3),
    (prepared_skip, KEPT, *["0[2:] 1 2"] * 3),
    (prepared_skip_twice, {}, *["0[2:] 1[2:] 2"] * 3),
    # accelerate's skipping loader calls set_epoch of no sampler in several processes.
    (prepared_skip_twice, TWO, "0[2:] 0[2:] 1 warns", "0[2:] 1[2:] 2", "0[2:] 1[2:] 2"),
    (prepared_stateful, WORKER, *["0 1 2"] * 3),
    (prepared_stateful_loaded, {}, *["1[3:] 2 3"] * 3),
    (prepared_stateful_loaded, WORKER, *["1[3:] 2 3"] * 3),
]
CASES = [
    pytest.param(
        kind, way, options, expected[number],
        id="-".join([kind, way.__name__, *(f"{name}={value}" for name, value in options.items())]),
        marks=[pytest.mark.slow] if kind == "bins" or (options and way is not prepared_skip) else [],
    )
    for way, options, *expected in ((way, options, one, one, two, three) for way, options, one, two, three in WAYS)
    for number, kind in enumerate(("sampler", "bins", "loader", "stream"))
]  # fmt: skip


@cache
def epochs_of(kind, ranks):
    """The batches of the first process in each epoch, made by nobody but our own object."""
    epochs = []
    for epoch in range(6):
        made = Made(kind, ranks=ranks)
        made.source.set_epoch(epoch)
        if kind == "loader":
            epochs.append(one_pass(made.loader))
        elif kind == "stream":
            epochs.append([of_bins([documents]) for documents in made.source][::ranks])
        else:
            epochs.append([of_rows([made.loader.dataset[one] for one in batch]) for batch in made.source][::ranks])
    assert len({str(batches) for batches in epochs}) == len(epochs)
    return epochs


def epoch_of(batches, kind, ranks):
    """Which epoch these batches are of, and the first of them, such as "1" or "1[3:]"."""
    for epoch, whole in enumerate(epochs_of(kind, ranks)):
        for first in range(len(whole)):
            if batches == whole[first : first + len(batches)]:
                return f"{epoch}[{first}:]" if first else f"{epoch}"
    return f"no epoch has {batches}"


@pytest.mark.parametrize(("kind", "way", "options", "expected"), CASES)
def test_epochs_of_passes(kind, way, options, expected, monkeypatch):
    ranks = options.get("ranks", 1)
    epochs_of(kind, ranks)
    monkeypatch.setattr(notices, "_said", {"unpatched-model": None})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [epoch_of(batches, kind, ranks) for batches in way(partial(Made, kind, **options))]
    assert " ".join(found + ["warns"] * ("same-epoch" in notices._said)) == expected
