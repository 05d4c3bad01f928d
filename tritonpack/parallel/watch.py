"""Tells the ranks of a group when one of them can't go on, so that no rank waits for it in vain.

All ranks of a group start the same exchanges in the same order. Each rank counts them. At a boundary (before a batch,
after an error in a batch, on leaving a context) it posts a record with its count in the store of torch.distributed. A
rank that has started more exchanges than the record of another rank counts is waiting for an exchange that the other
rank never joins. A thread of each rank looks for such records while the rank makes no progress. If it finds one, it
posts a record for its own rank, then aborts the group, which ends the wait. That record stops the other ranks, too.
"""

from __future__ import annotations

import pickle
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeAlias
from uuid import uuid4

import torch
import torch.distributed as dist

from tritonpack.errors import RankFailedError

PERIOD = 0.5  # seconds between two looks of the thread
SILENCE = 30  # seconds without a sign of life after which a process counts as ended; longer than any pause of Python
POLL = 0.005  # seconds between two looks at a boundary, at most, while other ranks are on their way

UNUSED_TAG = 2**30  # of messages that nobody sends

WENT_ON = "went on to batch"  # begins the event of a batch

AWAY = b"away"  # sign of life of a rank that has left its contexts: it has no thread, and nobody waits for it

ABORTED = (
    "Every rank of the group raises this. The group was aborted, so that no rank waits in it. Leave the context. To "
    "share batches again, make a new group on every rank (torch.distributed.new_group, or destroy_process_group and "
    "init_process_group), and wrap the model anew if DDP or FSDP used the old one."
)
INTACT = (
    "Every rank of the group raises this. No exchange was left unfinished, so the group still works: leave the context "
    "on every rank, and enter it again."
)

_WATCHES: weakref.WeakKeyDictionary[dist.ProcessGroup, Watch] = weakref.WeakKeyDictionary()
_OF_DIMENSIONS: weakref.WeakKeyDictionary[dist.ProcessGroup, Watch] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Record:
    """What a rank posts at a boundary.

    Attributes:
        event: what happens at this boundary; equal on all ranks that are in step.
        exchanges: how many exchanges the rank has started.
        error: why the rank can't go on, or None.
        value: what the rank compares with others, or None.
        aborted: whether the rank aborts the group, so that no other rank can go on either.
        cause: the rank whose record made this one stop, and that record, which has no cause of its own; or None.
    """

    event: str
    exchanges: int
    error: str | None = None
    value: Any = None
    aborted: bool = False
    cause: Cause | None = None


Cause: TypeAlias = tuple[int, Record]


class Watch:
    """The records of a group's ranks, and the thread that looks at them while a context is entered.

    Attributes:
        rank, size: this process's number within the group, and how many ranks it has.
        exchanges: how many exchanges this rank has started.
        batch: the number of the last batch since the last entry of a context.
        failure: why this rank can't go on; None if it can.
        cause: the rank whose record made this one stop, and that record; None if no record did.
        aborted: whether this rank has aborted the group.
        undecided: whether this rank has failed in a batch, and doesn't know yet whether the others have, too.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)  # a group that is destroyed ends
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.exchanges = self.batch = 0
        self.failure: str | None = None
        self.cause: Cause | None = None
        self.aborted = self.undecided = False
        self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]  # torch's threads use the original
        names: list[Any] = [None] * self.size
        dist.all_gather_object(names, uuid4().hex, group=group)
        self._name = f"tritonpack/{names[0]}"  # torch gives the names of groups that were destroyed to new ones
        self._entries = self._posted = self._read = 0  # posted in this entry; compared with the other ranks
        self._keys: list[tuple[tuple[int, int], str]] = []  # in the store: (entry, number of the record), key
        self._lock = threading.Lock()
        self._users, self._stop = 0, threading.Event()
        self._dimensions: list[weakref.ref[dist.ProcessGroup]] = []
        self._signs: dict[int, tuple[bytes, float]] = {}  # the last sign of life of a rank, and since when

    def enter(self, error: str | None, value: Any) -> list[Record]:
        """Meet all ranks at the entry of a context, and return their records. `leave` must follow, also after an error.

        Raises:
            RankFailedError: on every rank, if a rank has aborted the group, or if ranks are out of step.
        """
        with self._lock:
            self._entries += 1
            self.batch = self._posted = self._read = 0
            self.undecided = False
            if not self.aborted:
                self.failure = self.cause = None
        if self.aborted:
            self._post_failure("can't enter a context with an aborted group", aborted=True)
        self._begin()
        return self.meet("entered the context", error, value)

    def cover(self, dimensions: Sequence[dist.ProcessGroup]) -> None:
        """Count exchanges along the dimensions of a mesh, too, until every context is left, and abort them with it."""
        for group in dimensions:
            if _OF_DIMENSIONS.setdefault(group, self) is self:
                self._dimensions.append(weakref.ref(group))

    def next_batch(self, error: str | None, value: Any) -> list[Record]:
        """Meet all ranks before a batch, and return their records; raises as `meet` does."""
        self.batch += 1
        return self.meet(f"{WENT_ON} {self.batch}", error, value)

    def meet(self, event: str, error: str | None = None, value: Any = None) -> list[Record]:
        """Wait until every rank has come to this boundary, and return the records of all ranks.

        Raises:
            RankFailedError: on every rank, if ranks have come to different boundaries or have started different
                numbers of exchanges, also at earlier boundaries; on this rank, if another one doesn't come.
        """
        self.check()
        met = self._read
        self._post(event, error, value)
        records: list[Record] = []
        while self._read < self._posted:
            records = self._collect(self._read)
            mine = records[self.rank]
            for rank, record in enumerate(records):
                if (record.event, record.exchanges) != (mine.event, mine.exchanges):
                    unfinished = any(one.exchanges != mine.exchanges for one in records)
                    self.cause = _cause(rank, record)
                    self._fail(self._reason(rank, record, mine), abort=unfinished)
            self._read += 1
        self.undecided = False
        for place, key in self._keys:
            if place < (self._entries, met):  # all ranks have posted a later record since they read it
                self._store.delete_key(key)
        self._keys = [one for one in self._keys if one[0] >= (self._entries, met)]
        return records

    def fail(self, error: BaseException) -> None:
        """Post that this rank failed in its batch, unless another rank made it fail."""
        if self.failure is None and not self.undecided:
            self.undecided = True
            with suppress(RuntimeError):  # as in `leave`
                self._post(f"failed in batch {self.batch}", text_of(error), alarm=True)

    def leave(self, error: BaseException | None) -> None:
        """Post that this rank leaves a context."""
        event = f"left the context at batch {self.batch}"
        with suppress(RuntimeError):  # if the process that serves the store has ended, nobody can read it
            if isinstance(error, RankFailedError) and self.failure is not None:
                self._post_failure(event, alarm=True)
            else:
                self._post(event, text_of(error), alarm=True)
        self._end()

    def _post_failure(self, event: str, *, alarm: bool = False, aborted: bool = False) -> None:
        """Post a record of this rank after a failure."""
        event = event if self.cause else f"{event}: {self.failure}"
        self._post(event, alarm=alarm, aborted=aborted, cause=self.cause)

    def started(self) -> None:
        """Count an exchange, before it starts."""
        self.check()
        self.exchanges += 1

    def check(self) -> None:
        """Raise if this rank can't go on.

        Raises:
            RankFailedError: it can't.
        """
        if self.failure is not None:
            raise RankFailedError(f"{self.failure} {ABORTED if self.aborted else INTACT}")

    def interrupted(self, error: RuntimeError) -> None:
        """Raise for an exchange that has failed.

        Raises:
            RankFailedError: with the reason, if another rank has posted one.
        """
        self._look()
        if self.failure is None:
            self._stop_here(
                f"An exchange in batch {self.batch} failed, because another rank or the network did: {error}"
            )
        raise RankFailedError(f"{self.failure} {ABORTED}") from error

    def _key(self, number: int, who: int | str) -> str:
        return f"{self._name}/{self._entries}/{number}/{who}"

    def _post(
        self, event: str, error: str | None = None, value: Any = None, *, alarm: bool = False, aborted: bool = False,
        cause: Cause | None = None,
    ) -> None:  # fmt: skip
        with self._lock:
            self._write(Record(event, self.exchanges, error, value, aborted, cause), alarm or aborted)

    def _write(self, record: Record, alarm: bool) -> None:
        self._set(self._posted, self.rank, pickle.dumps(record))
        if alarm:
            self._set(self._posted, "alarm", b"")
        self._posted += 1

    def _set(self, number: int, who: int | str, value: bytes) -> None:
        key = self._key(number, who)
        self._store.set(key, value)
        self._keys.append(((self._entries, number), key))

    def _collect(self, number: int) -> list[Record]:
        """The records of all ranks with this number; waits for them."""
        keys = [self._key(number, rank) for rank in range(self.size)]
        start, alarmed = time.monotonic(), False
        while not self._store.check(keys):
            waited = time.monotonic() - start
            if waited > PERIOD:
                if not alarmed:  # let the threads of other ranks see whether they wait for this rank
                    self._set(number, "alarm", b"")
                    alarmed = True
                self._require_life([rank for rank, key in enumerate(keys) if not self._store.check([key])], waited)
            time.sleep(min(waited / 8, POLL if waited < PERIOD else 10 * POLL))
        return [pickle.loads(one) for one in self._store.multi_get(keys)]

    def _require_life(self, missing: list[int], waited: float) -> None:
        """Raise if ranks that are missing at a boundary have ended, or don't come for longer than the group waits."""
        if ended := self._ended(missing):
            silence = f"no sign of life for {SILENCE} seconds"
            self._stop_here(f"{_names(ended)} ended or stopped before batch {self.batch}: {silence}.")
        elif waited > self._store.timeout.total_seconds():
            self._stop_here(f"{_names(missing)} didn't come to batch {self.batch} within {waited:.0f} seconds.")
        self.check()

    def _stop_here(self, reason: str) -> None:
        """Post that this rank can't go on, and abort the group."""
        self._post(f"stopped in batch {self.batch}: {reason}", aborted=True)
        self._fail(reason, abort=True)

    def _fail(self, reason: str, *, abort: bool) -> None:
        """Remember why this rank can't go on.

        Raises:
            RankFailedError: always.
        """
        if self.failure is None:
            self.failure = reason
            if abort:
                self._abort()
        self.check()

    def _abort(self) -> None:
        self.aborted = True
        for one in (self._group, *self._dimensions):
            if (group := one()) is not None:
                abort_group(group)

    def _begin(self) -> None:
        self._users += 1
        if self._users == 1 and self.size > 1:
            self._stop = threading.Event()
            threading.Thread(target=self._run, args=[self._stop], name="tritonpack watch", daemon=True).start()

    def _end(self) -> None:
        self._users -= 1
        if not self._users:
            self._stop.set()
            for one in self._dimensions:
                if (group := one()) is not None:
                    _OF_DIMENSIONS.pop(group, None)
            self._dimensions = []

    def _run(self, stop: threading.Event) -> None:
        """What the thread does until the last context is left."""
        beats, seen, sign = 0, -1, f"{self._name}/alive/{self.rank}"
        try:
            while not stop.is_set():
                self._store.set(sign, str(beats).encode())
                if seen == self.exchanges:  # no progress since the last look
                    self._look()
                beats, seen = beats + 1, self.exchanges
                stop.wait(PERIOD)
            self._store.set(sign, AWAY)
        except RuntimeError:  # the process that serves the store has ended; boundaries raise for themselves
            pass

    def _look(self) -> None:
        """Stop this rank if the record of another one shows that it won't join an exchange that this rank has begun."""
        number = self._posted
        if self.failure is not None or not self._store.check([self._key(number, "alarm")]):
            return
        for rank in range(self.size):
            key = self._key(number, rank)
            if rank == self.rank or not self._store.check([key]):
                continue
            record: Record = pickle.loads(self._store.get(key))
            with self._lock:
                in_vain = record.aborted or record.exchanges < self.exchanges
                if not in_vain or self._posted != number or self.failure is not None:
                    continue
                self.cause = _cause(rank, record)
                mine = Record(f"stopped in batch {self.batch}", self.exchanges, aborted=True, cause=self.cause)
                self.failure = self._reason(rank, record, mine)
                self._write(mine, alarm=True)
            self._abort()

    def _reason(self, rank: int, record: Record, mine: Record) -> str:
        """Why this rank, with the record `mine`, can't go on after the record of another rank.

        It names the rank at fault, which may be a third one or this one, and a rank that waited for it in vain.
        """
        culprit, fault = _cause(rank, record)
        other, stopped = (rank, record) if culprit == self.rank else (self.rank, mine)
        event = fault.event
        if event.startswith(WENT_ON) and fault.exchanges < stopped.exchanges:
            event += (
                " before the end of the batch before: it skipped the backward, its program caught an error, or ranks "
                "compute other gradients (requires_grad, or a second backward)"
            )
        because = "" if fault.error is None else f", because of {fault.error}"
        who, waiting = ("This rank" if one == self.rank else _names([one]) for one in (culprit, other))
        return (
            f"{who} {event}{because}".rstrip(".") + f". It had begun {fault.exchanges} exchanges. {waiting} "
            f"{stopped.event}, where it had begun {stopped.exchanges}."
        )

    def _ended(self, ranks: list[int]) -> list[int]:
        """Those of the ranks that have given no sign of life for a long time."""
        now, ended = time.monotonic(), []
        for rank in ranks:
            key = f"{self._name}/alive/{rank}"
            sign = self._store.get(key) if self._store.check([key]) else AWAY
            if self._signs.get(rank, (b"", now))[0] != sign:
                self._signs[rank] = sign, now
            elif sign != AWAY and now - self._signs[rank][1] > SILENCE:
                ended.append(rank)
        return ended


def watch_of(group: dist.ProcessGroup) -> Watch:
    """The watch of a group. Every rank calls this once, before any other exchange of a context."""
    if group not in _WATCHES:
        _WATCHES[group] = Watch(group)
    return _WATCHES[group]


def known_watch(group: dist.ProcessGroup) -> Watch | None:
    """The watch of a group, or of the mesh that it is a dimension of; None if no context has been entered with it."""
    return _OF_DIMENSIONS.get(group) or _WATCHES.get(group)


def abort_group(group: dist.ProcessGroup) -> None:
    """End all that waits for collectives of a group, on this rank and, with gloo, on all others."""
    if group.size() == 1:  # nobody waits
        return
    with suppress(RuntimeError):  # collectives of a backend that can't abort end at their timeout
        group.abort()
    if "cpu:gloo" not in dist.get_backend_config(group):
        return
    # gloo's abort does nothing. But a receive that times out closes the connections, and then all that waits raises.
    for tag in range(8):  # each network interface that gloo uses has its own connections; tags go round them
        try:
            work = group.recv([torch.empty(1, device="cpu")], (group.rank() + 1) % group.size(), UNUSED_TAG + tag)
            work.wait(timedelta(milliseconds=1))
        except RuntimeError:
            pass


def text_of(error: BaseException | None) -> str | None:
    """The type and the message of an error; None without one."""
    return None if error is None else f"{type(error).__name__}: {error}".removesuffix(": ")


def _names(ranks: list[int]) -> str:
    return f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of the sequence-parallel group"


def _cause(rank: int, record: Record) -> Cause:
    """The rank at fault and its record, if the record of a rank says that it can't go on."""
    return record.cause or (rank, replace(record, value=None))
