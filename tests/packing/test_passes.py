"""Which epochs come out of the loaders that libraries make of ours: the next one in each pass, or a warning."""

import copy
import warnings
from functools import cache, partial
from itertools import chain, islice

import numpy as np
import pytest
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

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
            self.source = MultipackDistributedBatchSampler(256, LENGTHS, self.ranks, seed=0, tail="spread", shard=False)
            self.loader = loader(BinDataset(DOCUMENTS), batch_sampler=self.source, collate_fn=numbers, **options)

    def prepare(self, **options):
        data_loader = pytest.importorskip("accelerate.data_loader")
        return data_loader.prepare_data_loader(
            self.loader, num_processes=self.ranks, process_index=0, put_on_device=False, **options
        )


def numbers(documents):
    return sorted({int(document["input_ids"][0]) - 1 for document in documents})


def of_bins(bins):
    return numbers(chain.from_iterable(bins))


def one_pass(loader, batches=None):
    """The documents of each batch of a pass."""
    found = []
    for batch in islice(loader, batches):
        found.append(batch if isinstance(batch, list) else sorted(set((batch["input_ids"][0] - 1).tolist())))
    return found


def stateful_loader():
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader


def passes_of(steps, make):
    """The batches of each pass that these steps make, on one loader or on those that libraries make of it."""
    stateful = "stateful" in steps
    made = make(loader=stateful_loader()) if stateful and "prepare" not in steps else make()
    loader, found = made.loader, []
    for step in steps.split():
        name, number = step.rstrip("0123456789"), int(step.lstrip("abcdefghijklmnopqrstuvwxyz") or 0)
        if name == "prepare":
            loader = made.prepare(**{"use_stateful_dataloader": True} if stateful else {})
        elif name == "set":  # as Trainer calls it
            loader.set_epoch(number)
        elif name == "source":
            made.source.set_epoch(number)
        elif name == "sampler":  # as Lightning calls it, after an iterator that it doesn't use
            getattr(loader.batch_sampler, "set_epoch", made.source.set_epoch)(number)
        elif name == "iter":
            iter(loader)
        elif name == "resume":  # a loader of its own, from a state of another one that has yielded three batches
            source, loader = loader, resumed(make, made, stateful, "prepare" in steps)
            assert source is not loader
        elif name != "stateful":
            taken = {"copy": copy.copy, "skip": skipping}.get(name, lambda loader: loader)(loader)
            found.append(one_pass(taken, number or None))
    return found


def skipping(loader):
    return pytest.importorskip("accelerate").skip_first_batches(loader, 2)


def resumed(make, made, stateful, prepared):
    if not stateful:  # a state of our own object, in which nothing was prepared
        if hasattr(made.source, "num_bins"):
            list(islice(made.source, 3 * made.ranks))
            state = made.source.state_dict()
        else:
            state = made.source.state_dict(3 if made.source is made.loader else 3 * made.ranks)
        again = make()
        loader = again.prepare()
        again.source.load_state_dict(state)
        return loader
    stateful_loader()
    if prepared:
        before, loader = (make().prepare(use_stateful_dataloader=True) for _ in range(2))
        one_pass(before)
    else:
        before, loader = made.loader, make(loader=stateful_loader()).loader
    batches = iter(before)
    list(islice(batches, 3))
    loader.load_state_dict(before.state_dict())
    return loader


def second_iterator(make):
    loader = make().loader
    first = iter(loader)
    next(first)
    return [one_pass(loader), list(first)[-1:], one_pass(loader)][::2]


@pytest.mark.parametrize("kind", ["sampler", "loader", "stream"])
def test_stateful_loaders_of_several_processes_save_no_epoch(kind, monkeypatch):
    """They say so, and which call chooses the epoch of a resumed pass."""
    monkeypatch.setattr(notices, "said", {"unpatched-model": None})
    make = partial(Made, kind, ranks=2)
    with pytest.warns(UserWarning, match=r"stateful-loader: .* Call set_epoch\(number\) on the prepared loader"):
        assert epoch_of(passes_of("stateful prepare resume pass", make)[0], kind, 2) == "0[3:]"


WORKER, KEPT, TWO = {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}, {"ranks": 2}
# For each way the epochs of its passes, with the first batch if it isn't 0; "warns": of a second pass over an epoch.
# Samplers, loaders and streams differ only where nobody calls set_epoch.
WAYS = [
    ("pass pass pass", {}, "0 0 0 warns", "0 1 2", "0 0 0 warns"),
    ("pass pass pass", WORKER, "0 0 0 warns", "0 1 2", "0 0 0"),  # the worker warns
    ("pass3 pass pass", {}, "0 0 0 warns", "0 1 2", "0 0 0 warns"),
    (second_iterator, {}, "0 0 warns", "1 2", "0 0 warns"),
    ("copy pass pass", {}, "0 0 0 warns", "0 1 2", "0 0 0 warns"),
    ("iter sampler0 pass sampler1 pass sampler2 pass", {}, *["0 1 2"] * 3),
    ("skip pass pass", {}, "0[2:] 0 0 warns", "0[2:] 1 2", "0[2:] 0 0 warns"),
    ("stateful pass pass pass", {}, "0 0 0 warns", "0 1 2", "0 0 0 warns"),
    ("stateful source1 resume pass pass pass", {}, "1[3:] 1 1 warns", "1[3:] 2 3", "1[3:] 1 1 warns"),
    ("stateful source1 resume pass pass pass", WORKER, "1[3:] 1 1 warns", "1[3:] 2 3", "1[3:] 1 1"),
    *[
        (steps, options, *[expected] * 3)
        for steps, expected in (
            ("prepare pass pass pass", "0 1 2"),
            ("prepare pass3 pass pass", "0 1 2"),
            ("prepare skip pass pass", "0[2:] 1 2"),
            ("prepare pass prepare pass prepare pass", "0 1 2"),
            ("prepare source2 pass pass pass", "2 3 4"),
            ("source2 resume pass pass pass", "2[3:] 3 4"),
            ("stateful prepare pass pass pass", "0 1 2"),
        )
        for options in ({}, TWO)
    ],
    ("prepare pass pass pass", KEPT, *["0 1 2"] * 3),
    ("prepare skip skip pass", {}, *["0[2:] 1[2:] 2"] * 3),
    # accelerate's skipping loader calls set_epoch of no sampler in several processes.
    ("prepare skip skip pass", TWO, "0[2:] 0[2:] 1 warns", "0[2:] 1[2:] 2", "0[2:] 1[2:] 2"),
    ("stateful prepare resume pass pass pass", {}, *["1[3:] 2 3"] * 3),
    ("stateful prepare resume pass pass pass", WORKER, *["1[3:] 2 3"] * 3),
]
CASES = [
    pytest.param(
        kind, way, options, expected[number],
        id="-".join([kind, str(way).split(" at ")[0], *(f"{name}={value}" for name, value in options.items())]),
        marks=[pytest.mark.slow] if options and way != "prepare skip pass pass" else [],
    )
    for way, options, *expected in WAYS
    for number, kind in enumerate(("sampler", "loader", "stream"))
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
            epochs.append([numbers([DOCUMENTS[one] for one in batch]) for batch in made.source][::ranks])
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
    monkeypatch.setattr(notices, "said", {"unpatched-model": None})
    make = partial(Made, kind, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [epoch_of(batches, kind, ranks) for batches in (way(make) if callable(way) else passes_of(way, make))]
    assert " ".join(found + ["warns"] * ("same-epoch" in notices.said)) == expected


@pytest.mark.parametrize(
    ("make", "is_shuffled"),
    [
        (lambda: MultipackDistributedBatchSampler(256, LENGTHS, 1, 0, 0), True),
        (lambda: MultipackDistributedBatchSampler(256, LENGTHS, 1, 0, 0, shuffle=False), False),
        (lambda: MultipackBatchSampler(RandomSampler(DOCUMENTS), 2, 256, LENGTHS), True),
        (lambda: MultipackBatchSampler(DistributedSampler(DOCUMENTS, 1, 0), 2, 256, LENGTHS), True),
        (lambda: MultipackBatchSampler(range(60), 2, 256, LENGTHS), False),
    ],
)
def test_second_pass_over_one_epoch_warns_where_epochs_differ(make, is_shuffled, monkeypatch):
    """Passes: "3" is set_epoch(3) and a pass, "+" a pass, "-" one that is broken off."""
    for passes in ("+", "+12", "01", "111", "-", "++", "3+", "-+"):
        monkeypatch.setattr(notices, "said", {})
        sampler = make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for each in passes:
                if each.isdecimal():
                    sampler.set_epoch(int(each))
                next(iter(sampler)) if each == "-" else list(sampler)
        assert ("same-epoch" in notices.said) == (is_shuffled and len(passes) > 1 and passes[-1] == "+"), passes
