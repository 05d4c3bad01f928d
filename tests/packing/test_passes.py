"""Which epochs come out of the loaders that libraries make of ours: the next one in each pass, or a warning."""

import copy
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


def numbers(documents):
    return sorted({int(document["input_ids"][0]) - 1 for document in documents})


def of_bins(bins):
    return numbers(chain.from_iterable(bins))


def make(kind, ranks=1, loader=DataLoader, **options):
    """A loader of a process, the first of two ranks, and what it iterates over: a sampler, itself or a stream."""
    if kind == "stream":
        source = pack_stream(Shuffled(), 256, window=16, num_replicas=ranks, shard=False)
        return loader(source, batch_size=1, collate_fn=of_bins, **options), source
    if kind == "sampler":
        source = MultipackDistributedBatchSampler(256, LENGTHS, ranks, seed=0, tail="spread", shard=False)
        return loader(BinDataset(DOCUMENTS), batch_sampler=source, collate_fn=numbers, **options), source
    ours = dataloader(DOCUMENTS, 256, num_replicas=ranks, rank=0, seed=0, **options)
    if loader is DataLoader:
        return ours, ours
    source = ours.batch_sampler
    return loader(ours.dataset, batch_sampler=source, collate_fn=ours.collate_fn, **options), source


def one_pass(loader, batches=None):
    """The documents of each batch of a pass."""
    found = []
    for batch in islice(loader, batches):
        found.append(batch if isinstance(batch, list) else sorted(set((batch["input_ids"][0] - 1).tolist())))
    return found


def passes_of(steps, kind, ranks=1, **options):
    """The batches of each pass that these steps make, on one loader or on those that libraries make of it."""
    is_stateful, is_prepared, found = "stateful" in steps, "prepare" in steps, []
    if is_stateful:
        stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
        options |= {} if is_prepared else {"loader": stateful}

    def prepared(loader):
        prepare = pytest.importorskip("accelerate.data_loader").prepare_data_loader
        stateful = {"use_stateful_dataloader": True} if is_stateful else {}
        return prepare(loader, num_processes=ranks, process_index=0, put_on_device=False, **stateful)

    made, source = make(kind, ranks, **options)
    loader = made
    for step in steps.split():
        name, number = step.rstrip("0123456789"), int(step.lstrip("abcdefghijklmnopqrstuvwxyz") or 0)
        if name == "prepare":
            loader = prepared(made)
        elif name == "source":
            source.set_epoch(number)
        elif name == "sampler":  # as Lightning calls it, after an iterator that it doesn't use
            getattr(loader.batch_sampler, "set_epoch", source.set_epoch)(number)
        elif name == "iter":
            iter(loader)
        elif name == "resume":  # a loader of its own, from a state of another one that has yielded three batches
            again, own = make(kind, ranks, **options)
            if is_stateful:
                before, loader = made, again
                if is_prepared:
                    before, loader = prepared(make(kind, ranks, **options)[0]), prepared(again)
                    one_pass(before)
                batches = iter(before)
                list(islice(batches, 3))
                loader.load_state_dict(before.state_dict())
            else:  # of our own object, in which nothing was prepared
                list(islice(source, 3 if kind == "loader" else 3 * ranks))
                loader = prepared(again)
                own.load_state_dict(source.state_dict())
        elif name != "stateful":
            skip = pytest.importorskip("accelerate").skip_first_batches if name == "skip" else None
            taken = skip(loader, 2) if skip else copy.copy(loader) if name == "copy" else loader
            found.append(one_pass(taken, number or None))
    return found


WORKER, KEPT, TWO = {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}, {"ranks": 2}
# For each way the epochs of its passes, with the first batch if it isn't 0, and the warnings, of a second pass over an
# epoch for example. Samplers, loaders and streams differ only where nobody calls set_epoch.
WAYS = [
    ("pass pass pass", {}, "0 0 0 same-epoch", "0 1 2", "0 0 0 same-epoch"),
    ("pass pass pass", WORKER, "0 0 0 same-epoch", "0 1 2", "0 0 0"),  # the worker warns
    ("pass3 pass pass", {}, "0 0 0 same-epoch", "0 1 2", "0 0 0 same-epoch"),
    ("copy pass pass", {}, "0 0 0 same-epoch", "0 1 2", "0 0 0 same-epoch"),
    ("iter sampler0 pass sampler1 pass sampler2 pass", {}, *["0 1 2"] * 3),
    ("skip pass pass", {}, "0[2:] 0 0 same-epoch", "0[2:] 1 2", "0[2:] 0 0 same-epoch"),
    ("stateful pass pass pass", {}, "0 0 0 same-epoch", "0 1 2", "0 0 0 same-epoch"),
    ("stateful source1 resume pass pass pass", {}, "1[3:] 1 1 same-epoch", "1[3:] 2 3", "1[3:] 1 1 same-epoch"),
    ("stateful source1 resume pass pass pass", WORKER, "1[3:] 1 1 same-epoch", "1[3:] 2 3", "1[3:] 1 1"),
    *[
        (steps, options, *[expected] * 3)
        for steps, expected in (
            ("prepare pass pass pass", "0 1 2"),
            ("prepare pass3 pass pass", "0 1 2"),
            ("prepare skip pass pass", "0[2:] 1 2"),
            ("prepare pass prepare pass prepare pass", "0 1 2"),
            ("prepare source2 pass pass pass", "2 3 4"),
            ("source2 resume pass pass pass", "2[3:] 3 4"),
        )
        for options in ({}, TWO)
    ],
    ("prepare pass pass pass", KEPT, *["0 1 2"] * 3),
    ("prepare skip skip pass", {}, *["0[2:] 1[2:] 2"] * 3),
    # accelerate's skipping loader calls set_epoch of no sampler in several processes.
    ("prepare skip skip pass", TWO, "0[2:] 0[2:] 1 same-epoch", "0[2:] 1[2:] 2", "0[2:] 1[2:] 2"),
    ("stateful prepare pass pass pass", {}, *["0 1 2"] * 3),
    ("stateful prepare pass pass pass", TWO, *["0 1 2 stateful-loader"] * 3),
    ("stateful prepare resume pass pass pass", {}, *["1[3:] 2 3"] * 3),
    ("stateful prepare resume pass pass pass", WORKER, *["1[3:] 2 3"] * 3),
    ("stateful prepare resume pass", TWO, *["0[3:] stateful-loader"] * 3),  # it saves no epoch
]
CASES = [
    pytest.param(
        kind, way, options, expected[number],
        id="-".join([kind, way, *(f"{name}={value}" for name, value in options.items())]),
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
        loader, source = make(kind, ranks)
        source.set_epoch(epoch)
        epochs.append(one_pass(loader)[:: 1 if kind == "loader" else ranks])
    assert len({str(batches) for batches in epochs}) == len(epochs)
    return epochs


def epoch_of(batches, kind, ranks):
    """Which epoch these batches are of, and the first of them, such as "1" or "1[3:]"."""
    for epoch, whole in enumerate(epochs_of(kind, ranks)):
        for first in range(len(whole)):
            if batches == whole[first : first + len(batches)]:
                return f"{epoch}[{first}:]" if first else f"{epoch}"
    return f"no epoch has {batches}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "way", "options", "expected"), CASES)
def test_epochs_of_passes(kind, way, options, expected, monkeypatch):
    of = partial(epoch_of, kind=kind, ranks=options.get("ranks", 1))
    of([])
    monkeypatch.setattr(notices, "said", {"unpatched-model": None})
    found = [*map(of, passes_of(way, kind, **options))]
    assert " ".join(found + [*notices.said][1:]) == expected


@pytest.mark.parametrize(("made", "is_shuffled"), [
    (lambda: MultipackDistributedBatchSampler(256, LENGTHS, 1, 0, 0), True),
    (lambda: MultipackDistributedBatchSampler(256, LENGTHS, 1, 0, 0, shuffle=False), False),
    (lambda: MultipackBatchSampler(RandomSampler(DOCUMENTS), 2, 256, LENGTHS), True),
    (lambda: MultipackBatchSampler(range(60), 2, 256, LENGTHS), False),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::tritonpack.PackingWarning")
def test_second_pass_over_one_epoch_warns_where_epochs_differ(made, is_shuffled, monkeypatch):
    """Passes: "3" is set_epoch(3) and a pass, "+" a pass, "-" one that is broken off."""
    for passes in ("+", "+12", "01", "111", "-", "++", "3+", "-+"):
        monkeypatch.setattr(notices, "said", {})
        sampler = made()
        for each in passes:
            if each.isdecimal():
                sampler.set_epoch(int(each))
            next(iter(sampler)) if each == "-" else list(sampler)
        assert ("same-epoch" in notices.said) == (is_shuffled and len(passes) > 1 and passes[-1] == "+"), passes
