"""Other packers and samplers, as they are: loaded from files or packages that the user has, none of them part of this.

Looked for in a folder: `multipack_sampler.py` and `multipack_sampler_linear.py` of imoneoi/multipack_sampler, and
`multipack.py`, axolotl's `src/axolotl/utils/samplers/multipack.py`. Looked for among installed packages: trl,
binpacking.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import SequentialSampler

from tritonpack.packing.plan import Plan

Lengths = NDArray[np.int64]
Rows = Iterable[Sequence[int]]
_AXOLOTL_BIN_SIZE = 200  # its default for the documents of a row
_TRL_BATCH = 1000  # rows that datasets.map hands over at once


def _as_they_are(lengths: Lengths) -> Any:
    return lengths


@dataclass(frozen=True)
class Sampler:
    """Plans an epoch.

    Attributes:
        plan: from (lengths, capacity, ranks, seed, epoch) to a plan; makes what the peer gives into one.
        own_work: what each rank does in training, which is timed: the same from prepared lengths.
        prepare: lengths in the form that the peer takes, which isn't timed.
    """

    name: str
    plan: Callable[[Lengths, int, int, int, int], Plan]
    own_work: Callable[[Any, int, int, int, int], Any]
    prepare: Callable[[Lengths], Any] = _as_they_are


@dataclass(frozen=True)
class Packer:
    """Packs documents: from (prepared lengths, capacity) to rows of documents."""

    name: str
    pack: Callable[[Any, int], Any]
    prepare: Callable[[Lengths], Any] = _as_they_are


@dataclass(frozen=True)
class Peers:
    """What was found, and, by name, why the others weren't."""

    samplers: tuple[Sampler, ...]
    packers: tuple[Packer, ...]
    absent: dict[str, str]


def load(folder: Path | None) -> Peers:
    """The peers that are there."""
    samplers: list[Sampler] = []
    packers: list[Packer] = []
    absent: dict[str, str] = {}
    for name, loader in _LOADERS.items():
        try:
            found = loader(folder)
        except (FileNotFoundError, ImportError, AttributeError) as error:
            absent[name] = str(error)
            continue
        samplers += [each for each in found if isinstance(each, Sampler)]
        packers += [each for each in found if isinstance(each, Packer)]
    return Peers(tuple(samplers), tuple(packers), absent)


def plan_of(rows: Rows, num_ranks: int, capacity: int) -> Plan:
    """A plan of rows dealt out to the ranks one after the other; those that don't make a whole step are left out."""
    kept = list(rows)
    kept = kept[: len(kept) // num_ranks * num_ranks]
    offsets = np.cumsum([0, *map(len, kept)])
    items = np.fromiter((int(item) for row in kept for item in row), dtype=np.int32, count=int(offsets[-1]))
    return Plan(items, offsets, num_ranks, capacity)


def _module(folder: Path | None, name: str) -> ModuleType:
    if folder is None:
        raise FileNotFoundError(f"{name} is looked for in the folder that --peers names")
    path = folder / name
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}")
    spec = importlib.util.spec_from_file_location(f"peers_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # numba looks for it there
    spec.loader.exec_module(module)
    return module


def _multipack(folder: Path | None) -> list[Sampler | Packer]:
    classes = {
        "multipack quadratic": _module(folder, "multipack_sampler.py").MultipackDistributedBatchSampler,
        "multipack linear": _module(
            folder, "multipack_sampler_linear.py"
        ).MultipackDistributedBatchSampler_LinearAttention,
    }

    def sampler(name: str, kind: Any) -> Sampler:
        def batches(lengths: Lengths, capacity: int, ranks: int, seed: int, epoch: int, rank: int = 0) -> Any:
            one = kind(batch_max_length=capacity, lengths=lengths, num_replicas=ranks, rank=rank, seed=seed)
            one.set_epoch(epoch)
            return one.generate_batches()

        def plan(lengths: Lengths, capacity: int, ranks: int, seed: int, epoch: int) -> Plan:
            of_ranks = [batches(lengths, capacity, ranks, seed, epoch, rank) for rank in range(ranks)]
            return plan_of((row for step in zip(*of_ranks, strict=True) for row in step), ranks, capacity)

        return Sampler(name, plan, batches)

    return [sampler(name, kind) for name, kind in classes.items()]


class _Order(SequentialSampler):
    """Gives the indices it was given. It is sequential by name because axolotl's sequential packing warns otherwise."""

    def __iter__(self) -> Iterator[int]:
        return iter(self.data_source)  # type: ignore[call-overload]


def _axolotl(folder: Path | None) -> list[Sampler | Packer]:
    stubs: dict[str, Any] = {name: ModuleType(name) for name in ("axolotl", "axolotl.utils")}
    stubs["axolotl.utils.distributed"] = mock.Mock()
    stubs["axolotl.utils.logging"] = mock.Mock(get_logger=logging.getLogger)
    with mock.patch.dict(sys.modules, stubs):
        module = _module(folder, "multipack.py")

    def sampler(name: str, sequential: bool) -> Sampler:
        def rows(lengths: Lengths, capacity: int, ranks: int, seed: int, epoch: int) -> Any:
            order = np.random.default_rng([seed, epoch]).permutation(len(lengths)).tolist()
            one = module.MultipackBatchSampler(
                _Order(order),
                batch_size=1,
                batch_max_len=capacity,
                lengths=lengths,
                bin_size=_AXOLOTL_BIN_SIZE,
                sequential=sequential,
                num_processes=1,
            )
            return [row for batch in one.generate_batches() for row in batch]

        def plan(lengths: Lengths, capacity: int, ranks: int, seed: int, epoch: int) -> Plan:
            return plan_of(rows(lengths, capacity, ranks, seed, epoch), ranks, capacity)

        return Sampler(name, plan, rows)

    def first_fit(lengths: Lengths, capacity: int) -> Any:
        return module.pack_parallel(lengths, capacity, 100_000, _AXOLOTL_BIN_SIZE, num_processes=1)

    return [
        sampler("axolotl first-fit, strided", False),
        sampler("axolotl sequential, strided", True),
        Packer("axolotl first-fit", first_fit),
        Packer("axolotl sequential", lambda lengths, capacity: module.allocate_sequentially(lengths, 0, capacity, 1)),
    ]


def _trl(folder: Path | None) -> list[Sampler | Packer]:
    import pyarrow

    packed = importlib.import_module("trl.data_utils")._pack_bfd

    def table(lengths: Lengths, tokens: NDArray[Any]) -> Any:
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return pyarrow.table({"input_ids": pyarrow.ListArray.from_arrays(offsets, pyarrow.array(tokens))})

    def without_tokens(lengths: Lengths) -> Any:
        return table(lengths, np.zeros(int(lengths.sum()), np.int8))

    def parts(whole: Any, capacity: int, batch: int | None) -> list[Any]:
        if batch is None:
            return [packed(whole, capacity)]
        # A slice would be packed with the offsets of the whole; datasets.map hands over tables of their own.
        indices = np.split(np.arange(len(whole)), range(batch, len(whole), batch))
        return [packed(whole.take(part), capacity) for part in indices]

    def sampler(name: str, batch: int | None) -> Sampler:
        def plan(lengths: Lengths, capacity: int, ranks: int, seed: int, epoch: int) -> Plan:
            numbered = table(lengths, np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))
            rows: list[NDArray[np.int32]] = []
            for part in parts(numbered, capacity, batch):  # rows of document numbers, one per token
                column = part["input_ids"].combine_chunks()
                tokens, starts = column.values.to_numpy(), column.offsets.to_numpy()
                begins = np.flatnonzero(np.diff(tokens, prepend=-1))
                rows += np.split(tokens[begins], np.searchsorted(begins, starts[1:-1]))
            order = np.random.default_rng([seed, epoch]).permutation(len(rows))
            return plan_of((rows[index] for index in order), ranks, capacity)

        def own_work(whole: Any, capacity: int, ranks: int, seed: int, epoch: int) -> Any:
            return parts(whole, capacity, batch)

        return Sampler(name, plan, own_work, without_tokens)

    return [
        sampler("trl bfd per 1,000, shuffled", _TRL_BATCH),
        sampler("trl bfd of all, shuffled", None),
        Packer(
            "trl bfd, copying a byte per token", lambda whole, capacity: parts(whole, capacity, None), without_tokens
        ),
    ]


def _binpacking(folder: Path | None) -> list[Sampler | Packer]:
    to_constant_volume = importlib.import_module("binpacking").to_constant_volume
    return [
        Packer(
            "binpacking, as ms-swift does",
            lambda pairs, capacity: to_constant_volume(pairs, capacity, weight_pos=1),
            lambda lengths: list(enumerate(lengths.tolist())),
        )
    ]


_LOADERS: dict[str, Callable[[Path | None], list[Sampler | Packer]]] = {
    "multipack": _multipack,
    "axolotl": _axolotl,
    "trl": _trl,
    "binpacking": _binpacking,
}
