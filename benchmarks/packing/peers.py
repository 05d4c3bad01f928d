"""Samplers of other projects, unchanged, loaded from the user's files or packages.

Files in the given folder: `multipack_sampler.py` and `multipack_sampler_linear.py` of imoneoi/multipack_sampler, and
`multipack.py`, which is axolotl's `src/axolotl/utils/samplers/multipack.py`. Package: trl.
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

from tritonpack.packing.planning.plan import Plan

Lengths = NDArray[np.int64]
Rows = Iterable[Sequence[int]]
_AXOLOTL_BIN_SIZE = 200  # axolotl's default for the largest number of documents in a row
_TRL_BATCH = 1000  # the rows per call of datasets.map


def _unchanged(lengths: Lengths) -> Any:
    return lengths


@dataclass(frozen=True)
class Sampler:
    """A sampler that plans an epoch.

    Attributes:
        plan: (lengths, capacity, ranks, seed, epoch) to a plan.
        own_work: the part that each rank computes in training, from prepared lengths; it is timed.
        prepare: lengths to the form that the peer takes; it isn't timed.
    """

    name: str
    plan: Callable[[Lengths, int, int, int, int], Plan]
    own_work: Callable[[Any, int, int, int, int], Any]
    prepare: Callable[[Lengths], Any] = _unchanged


def load(folder: Path | None) -> tuple[list[Sampler], dict[str, str]]:
    """The samplers that can be found, and the reasons why others weren't, by name."""
    samplers: list[Sampler] = []
    absent: dict[str, str] = {}
    for name, loader in _LOADERS.items():
        try:
            samplers += loader(folder)
        except (FileNotFoundError, ImportError, AttributeError) as error:
            absent[name] = str(error)
    return samplers, absent


def plan_of(rows: Rows, num_ranks: int, capacity: int) -> Plan:
    """A plan of rows that are dealt out to the ranks in turn; rows that don't make a whole step are left out."""
    kept = list(rows)
    kept = kept[: len(kept) // num_ranks * num_ranks]
    offsets = np.cumsum([0, *map(len, kept)])
    items = np.fromiter((int(item) for row in kept for item in row), dtype=np.int32, count=int(offsets[-1]))
    return Plan(items, offsets, num_ranks, capacity)


def _module(folder: Path | None, name: str) -> ModuleType:
    if folder is None:
        raise FileNotFoundError(f"{name} is read from the folder that --peers names")
    path = folder / name
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}")
    spec = importlib.util.spec_from_file_location(f"peers_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # numba reads it there
    spec.loader.exec_module(module)
    return module


def _multipack(folder: Path | None) -> list[Sampler]:
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
    """Yields the given indices. A SequentialSampler, because axolotl's sequential packing warns about others."""

    def __iter__(self) -> Iterator[int]:
        return iter(self.data_source)  # type: ignore[call-overload]


def _axolotl(folder: Path | None) -> list[Sampler]:
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

    return [sampler("axolotl first-fit, strided", False), sampler("axolotl sequential, strided", True)]


def _trl(folder: Path | None) -> list[Sampler]:
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
        # take() copies, as datasets.map does; a slice would keep the offsets of the whole table.
        indices = np.split(np.arange(len(whole)), range(batch, len(whole), batch))
        return [packed(whole.take(part), capacity) for part in indices]

    def sampler(name: str, batch: int | None) -> Sampler:
        def plan(lengths: Lengths, capacity: int, ranks: int, seed: int, epoch: int) -> Plan:
            numbered = table(lengths, np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))
            rows: list[NDArray[np.int32]] = []
            for part in parts(numbered, capacity, batch):  # rows with the document number of each token
                column = part["input_ids"].combine_chunks()
                tokens, starts = column.values.to_numpy(), column.offsets.to_numpy()
                begins = np.flatnonzero(np.diff(tokens, prepend=-1))
                rows += np.split(tokens[begins], np.searchsorted(begins, starts[1:-1]))
            order = np.random.default_rng([seed, epoch]).permutation(len(rows))
            return plan_of((rows[index] for index in order), ranks, capacity)

        def own_work(whole: Any, capacity: int, ranks: int, seed: int, epoch: int) -> Any:
            return parts(whole, capacity, batch)

        return Sampler(name, plan, own_work, without_tokens)

    return [sampler("trl bfd per 1,000, shuffled", _TRL_BATCH), sampler("trl bfd of all, shuffled", None)]


_LOADERS: dict[str, Callable[[Path | None], list[Sampler]]] = {
    "multipack": _multipack,
    "axolotl": _axolotl,
    "trl": _trl,
}
