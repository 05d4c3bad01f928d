"""The fields of a mask, which say which pairs are visible: checks, transpose, some rows and some keys, devices."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import InitVar, dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from tritonpack import kernels
from tritonpack.checks import check_device, check_indices, describe, is_length, on_host, require

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

# The fields that may hold tensors, with a number for each query and for each key.
OF_QUERIES = ("key_start", "key_stop", "diagonal", "document_source")
OF_KEYS = ("query_start", "query_stop", "key_places")


@dataclass(frozen=True, eq=False)
class Bounds:
    """The base of `BlockDiagonalMask`, whose docstring explains the fields."""

    key_start: Tensor
    key_stop: Tensor
    num_keys: int
    diagonal: Tensor | None = None
    document_source: Tensor | Callable[[], Tensor] | None = None
    max_documents: int | None = None
    query_start: Tensor | None = None
    query_stop: Tensor | None = None
    key_places: Tensor | None = None
    trusted: InitVar[bool] = False
    # No fields, so that copies start with their own.
    _computed: ClassVar[dict[Any, Any]]
    _versions: ClassVar[list[tuple[str, Tensor, int]]]
    _captured: ClassVar[bool]  # whether it was made in the capture of a CUDA graph
    origin: ClassVar[Any]  # the mask that `to` made this one of, or None
    is_tree: ClassVar[bool]  # whether the keys, too, have intervals of queries that may see them

    def __post_init__(self, trusted: bool) -> None:
        if not trusted:
            self._check_fields()
        compiling, versions = torch.compiler.is_compiling(), []
        for name in OF_QUERIES + OF_KEYS:
            x = getattr(self, name)
            if not isinstance(x, Tensor):
                continue
            # The owner of tensors may write them again. To inference tensors torch counts no writes.
            if not trusted or (not compiling and x.is_inference()):
                x = outside_inference_mode(x.clone)
                object.__setattr__(self, name, x)
            if not compiling:
                versions.append((name, x, x._version))
        plain = type(self.key_start) is Tensor  # is_capturing fails for fake tensors on a machine without a GPU
        captured = plain and is_capturing(self.key_start.device)
        own: dict[str, Any] = {"_computed": {}, "_versions": versions, "_captured": captured}
        for name, value in (own | {"is_tree": self.query_stop is not None, "origin": None}).items():
            object.__setattr__(self, name, value)
        if trusted or compiling or not plain:
            return
        if not kernels.serve(self.key_start):
            self._check_values()
        elif self.query_start is not None and self.query_stop is not None:
            from tritonpack.kernels.trees import assert_bounds

            assert_bounds(self.key_start, self.key_stop, self.query_start, self.query_stop)
        else:  # one launch asserts the values and builds the transpose, which every kernel of attention reads
            from tritonpack.kernels.intervals import transposed_intervals

            bounds = self.key_start, self.key_stop, self.num_keys
            self.cached("seen by", lambda: transposed_intervals(*bounds, checked=True))

    def _check_fields(self) -> None:
        """Raise ValueError unless all fields have the right types and shapes."""
        for name, number in (("num_keys", self.num_keys), ("max_documents", self.max_documents)):
            if not is_length(number) and (number is not None or name == "num_keys"):
                raise ValueError(f"{name} must be an integer from 0 to 2**31 - 1; got {describe(number)}.")
        needed = ["key_start", "key_stop"]
        if self.query_start is not None or self.query_stop is not None:
            needed += OF_KEYS if self.diagonal is not None else OF_KEYS[:2]
        for name in OF_QUERIES + OF_KEYS:
            x = getattr(self, name)
            if name not in needed and (x is None or (name == "document_source" and callable(x))):
                continue
            if not isinstance(x, Tensor) or x.ndim != 1 or x.dtype != torch.int32:
                raise ValueError(f"{name} must be a one-dimensional int32 tensor; got {describe(x)}.")
            count, of = (self.num_keys, "keys") if name in OF_KEYS else (self.num_queries, "queries of key_start")
            if x.shape[0] != count or x.device != self.device:
                rule = f"{name} must hold a number for each of the {count} {of}, on {self.device}"
                raise ValueError(f"{rule}; got {describe(x)}.")

    def _check_values(self) -> None:
        """Check values in host memory, or on a device by an assertion there, which the host doesn't wait for."""
        sides = [(self.key_start, self.key_stop, self.num_keys, "row", "keys")]
        if self.query_start is not None and self.query_stop is not None:
            sides.append((self.query_start, self.query_stop, self.num_queries, "key", "queries"))
        for start, stop, size, own, others in sides:
            good = (start >= 0) & (start <= stop) & (stop <= size)
            rule = f"intervals must lie within the {size} {others} and end at or after their begin"
            if not self.is_tree:
                good[1:] &= (start[1:] >= start[:-1]) & (stop[1:] >= stop[:-1])
                rule += ", and neither their begins nor their ends may decrease"
            require(good.all(), partial(_wrong_interval, good, start, stop, own, others, rule))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles have the fields alone, not what was computed from them."""
        return partial(type(self), trusted=True), tuple(getattr(self, f.name) for f in fields(self))

    @property
    def num_queries(self) -> int:
        return self.key_start.shape[0]

    @property
    def device(self) -> torch.device:
        return self.key_start.device

    @property
    def document(self) -> Tensor | None:
        """(num_queries,) int32, the number of each query's document in the order of the stream; None if it isn't known.
        Rows outside every document hold the number of some document."""
        self.check_unwritten()
        source = self.document_source
        return self.cached("document", source) if callable(source) else source

    def cached(self, key: Hashable, build: Callable[[], T]) -> T:
        """The value of `build()`, computed at the first call for a key and kept as long as the mask. What a CUDA graph
        computes has values only after a replay. So it is kept only if the mask was made in a capture, too."""
        self.check_unwritten()
        if key in self._computed:
            return self._computed[key]
        value = outside_inference_mode(build)
        first = self.key_start
        if (type(first) is Tensor and is_capturing(first.device)) == self._captured:
            self._computed[key] = value
        return value

    def check_unwritten(self) -> None:
        """Raise ValueError if tensors of the mask or of its transpose were overwritten, as far as torch counts this."""
        if torch.compiler.is_compiling():
            return
        for name, x, version in self._versions:
            if x._version != version:
                raise ValueError(
                    f"a mask's tensors must not be overwritten, but {name} of this one changed after it was made. Its "
                    "transpose, tile tables and documents belong to the old values. Make a new mask."
                )
        if (transposed := self._computed.get("transpose")) is not None:
            transposed.check_unwritten()

    def __repr__(self) -> str:
        numbers = f"num_queries={self.num_queries}, num_keys={self.num_keys}, is_tree={self.is_tree}"
        return f"BlockDiagonalMask({numbers}, device={self.device})"

    def transpose(self) -> Self:
        """The queries that see each key, again as a mask; computed once and kept with the mask: from the first query
        with `key_stop` above the key to the last with `key_start` of at most the key."""
        return self.cached("transpose", self._transpose)

    def _transpose(self) -> Self:
        rows = self.key_start.shape[0]
        start, stop = self._computed.get("seen by", (self.query_start, self.query_stop))
        if start is None and self.key_start.is_cuda and kernels.serve(self.key_start):
            from tritonpack.kernels.intervals import transposed_intervals

            start, stop = transposed_intervals(self.key_start, self.key_stop, self.num_keys)
        elif start is None:
            keys = torch.arange(self.num_keys, device=self.key_stop.device, dtype=torch.int32)
            start = torch.searchsorted(self.key_stop, keys, right=True, out_int32=True)
            stop = torch.searchsorted(self.key_start, keys, right=True, out_int32=True)
        source = self._computed.get("document", self.document_source)  # a function of `self` would be a cycle
        if source is not None:
            source = partial(_document_of_keys, source, start) if rows else None
        of_keys: dict[str, Any] = {"query_start": self.key_start, "query_stop": self.key_stop} if self.is_tree else {}
        return type(self)(start, stop, rows, None, source, self.max_documents, **of_keys, trusted=True)

    def restrict(self, query_rows: Tensor | None = None, key_positions: Tensor | None = None) -> Self:
        """The mask between some of the queries and some of the keys, such as one rank's shard.

        `query_rows` (R,) and `key_positions` (K,) are indices into the streams, int32 or int64, which ascend (else
        ValueError, if they lie in host memory); None keeps all.

        >>> mask = BlockDiagonalMask.from_seqlens([4, 2])
        >>> mask.restrict(torch.tensor([1, 3, 5]), torch.tensor([0, 3, 4])).to_dense().int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
        """
        part = {f.name: getattr(self, f.name) for f in fields(self)} | {"document_source": self.document}
        rows = (query_rows, "query_rows", self.num_queries, OF_QUERIES, OF_KEYS[:2])
        keys = (key_positions, "key_positions", self.num_keys, OF_KEYS, OF_QUERIES[:2])
        for given, name, size, own, other in (rows, keys):
            if given is None:
                continue
            indices = check_indices(given, name, size, self.device)
            part |= {name: part[name][indices] for name in own if part[name] is not None}
            # A bound of the other side becomes the number of kept indices below it.
            below = partial(torch.searchsorted, indices.to(torch.int32), out_int32=True)
            part |= {name: below(part[name]) for name in other if part[name] is not None}
            if own is OF_KEYS:
                # A document may have many runs of rows that see nothing, so the number of documents has no bound.
                part |= {"num_keys": indices.shape[0], "max_documents": None}
                if self.key_places is None and self.diagonal is not None:
                    part["key_places"] = indices.int()
        return replace(self, **part, trusted=True)

    def to(self, device: torch.device | str) -> Self:
        """The same mask on another device."""
        device = check_device(device)
        part = {f.name: getattr(self, f.name) for f in fields(self)} | {"document_source": self.document}
        tensors = {name: x for name, x in part.items() if isinstance(x, Tensor)}
        moved: Any = outside_inference_mode(lambda: {name: x.to(device) for name, x in tensors.items()})
        mask = replace(self, **moved, trusted=True)
        object.__setattr__(mask, "origin", self)
        return mask

    def validate(self) -> Self:
        """Return the mask, or raise ValueError with the first row whose interval lies outside the keys (or queries),
        ends before it begins, or, without trees, begins or ends before the interval above. Waits for the device."""
        self.to("cpu")._check_values()
        return self


def _wrong_interval(good: Tensor, start: Tensor, stop: Tensor, own: str, others: str, rule: str) -> str:
    """The message about intervals that aren't good; it names the first one in host memory."""
    if not on_host(start):
        return f"a mask's {rule}. mask.validate() names the first wrong one, from a copy in host memory."
    row = int((~good).nonzero()[0])
    found = f"{own} {row} of the mask has the {others} [{int(start[row])}, {int(stop[row])}); {rule}"
    return f"{found}. Check the offsets, ids or indices that the mask was built from."


def is_capturing(device: torch.device) -> bool:
    """Return whether work on a device becomes part of a CUDA graph now."""
    return device.type == "cuda" and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()


def outside_inference_mode(build: Callable[[], T]) -> T:
    """The value of `build()`, with tensors whose writes torch counts and that can be saved for a backward pass."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return build()
    with torch.inference_mode(False):
        return build()


def document_begins(mask: Bounds, *, exact: bool = False) -> Tensor:
    """(num_queries,) bool, True where a document, a branch of a tree or a run of rows that see nothing begins: where a
    row has no key in common with the row above, or in a tree doesn't see its key. With `exact` the numbers of documents
    decide instead, if the mask has them."""
    start, stop = mask.key_start, mask.key_stop
    live = start < stop
    differs = start[1:] >= stop[:-1]
    if mask.query_stop is not None and mask.num_queries == mask.num_keys:
        rows = torch.arange(mask.num_queries, device=mask.device)[1:]
        differs = differs | (mask.query_stop[:-1] <= rows)
    if exact and mask.document is not None:
        differs = mask.document[1:] != mask.document[:-1]
    differs = differs & (live[1:] | live[:-1])
    return torch.cat([live.new_ones(1), differs | (live[1:] != live[:-1])])


def _document_of_keys(source: Tensor | Callable[[], Tensor], query_start: Tensor) -> Tensor:
    """The document of each key: the document of the first query that sees it."""
    document = source() if callable(source) else source
    return document[query_start.clamp(max=document.shape[0] - 1)]
