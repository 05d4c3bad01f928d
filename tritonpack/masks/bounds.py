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

# The fields that may hold tensors, and among them the fields with a number for each key instead of each query.
TENSORS = ("key_start", "key_stop", "diagonal", "document_source", "query_start", "query_stop", "key_places")
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
        for name in TENSORS:
            x = getattr(self, name)
            if not isinstance(x, Tensor):
                continue
            # The owner of tensors may write them again. To inference tensors torch counts no writes.
            if not trusted or (not compiling and x.is_inference()):
                x = outside_inference_mode(x.clone)
                object.__setattr__(self, name, x)
            if not compiling:
                versions.append((name, x, x._version))
        plain = type(self.key_start) is Tensor
        for name, value in (
            ("_computed", {}),
            ("_versions", versions),
            ("_captured", plain and is_capturing(self.key_start.device)),
            ("is_tree", self.query_stop is not None),
            ("origin", None),
        ):
            object.__setattr__(self, name, value)
        if trusted or compiling or not plain:
            return
        if not kernels.serve(self.key_start):
            self._require_valid(self.device)
        elif self.query_start is not None and self.query_stop is not None:
            from tritonpack.kernels.trees import assert_bounds

            assert_bounds(self.key_start, self.key_stop, self.query_start, self.query_stop)
        else:  # one launch asserts the values and builds the transpose, which every kernel of attention reads
            from tritonpack.kernels.intervals import transposed_intervals

            bounds = self.key_start, self.key_stop, self.num_keys
            self.cached("seen by", lambda: transposed_intervals(*bounds, checked=True))

    def _check_fields(self) -> None:
        """Raise ValueError unless all fields have the right types and shapes."""
        if not is_length(self.num_keys):
            raise ValueError(f"num_keys must be an integer from 0 to 2**31 - 1; got {describe(self.num_keys)}.")
        if self.max_documents is not None and not is_length(self.max_documents):
            raise ValueError(f"max_documents must be an integer of at least 0, or None; got {self.max_documents!r}.")
        needed = ["key_start", "key_stop"]
        if self.query_start is not None or self.query_stop is not None:
            needed += ["query_start", "query_stop"]
        for name in TENSORS:
            x = getattr(self, name)
            if name not in needed and (x is None or (name == "document_source" and callable(x))):
                continue
            if not isinstance(x, Tensor) or x.ndim != 1 or x.dtype != torch.int32:
                raise ValueError(f"{name} must be a one-dimensional int32 tensor; got {describe(x)}.")
            count, device = self.num_keys if name in OF_KEYS else self.key_start.shape[0], self.key_start.device
            if x.shape[0] != count or x.device != device:
                others = "keys" if name in OF_KEYS else "queries of key_start"
                raise ValueError(
                    f"{name} must hold a number for each of the {count} {others}, on {device}; got {describe(x)}."
                )

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
    def places(self) -> Tensor | None:
        """(num_keys,) int32, the place of each key, to which ALiBi counts distances; None if key j lies at place j."""
        return self.diagonal if self.key_places is None and self.is_tree else self.key_places

    @property
    def document(self) -> Tensor | None:
        """(num_queries,) int32, the number of each query's document in the order of the stream; None if it isn't known.
        Rows outside every document hold the number of some document."""
        self.check_unwritten()
        source = self.document_source
        return self.cached("document", source) if callable(source) else source

    def cached(self, key: Hashable, build: Callable[[], T]) -> T:
        """The value of `build()`, computed at the first call for a key and kept as long as the mask.

        It is computed outside of inference mode, whose tensors couldn't be saved for a backward pass later. What a CUDA
        graph computes has values only after a replay. So it is kept only if the mask was made in a capture, too.

        Raises:
            ValueError: tensors of the mask were overwritten since it was made.
        """
        self.check_unwritten()
        if key not in self._computed:
            value = outside_inference_mode(build)
            first = self.key_start
            if (type(first) is Tensor and is_capturing(first.device)) != self._captured:
                return value
            self._computed[key] = value
        return self._computed[key]

    def check_unwritten(self) -> None:
        """Raise ValueError if tensors of the mask or of its transpose were overwritten, as far as torch counts this."""
        if torch.compiler.is_compiling():
            return
        written = []
        for name, x, version in self._versions:  # a loop, because every layer comes here
            if x._version != version:
                written.append(name)
        if written:
            raise ValueError(
                f"a mask's tensors must not be overwritten, but {', '.join(written)} of this one changed after it was "
                "made. Its transpose, tile tables and documents belong to the old values. Make a new mask for new "
                "values."
            )
        if (transposed := self._computed.get("transpose")) is not None:
            transposed.check_unwritten()

    def __repr__(self) -> str:
        kind = ", tree" if self.is_tree else ""
        return (
            f"BlockDiagonalMask(num_queries={self.num_queries}, num_keys={self.num_keys}{kind}, device={self.device})"
        )

    def distances(self) -> Tensor:
        """(num_queries, num_keys), how far each key lies from each query's own place: in a tree, how many tokens up.

        Raises:
            ValueError: the mask has no `diagonal`.
        """
        if self.diagonal is None:
            raise ValueError("this mask has no distances, because it is a transpose; use the mask itself.")
        keys = torch.arange(self.num_keys, device=self.device) if self.places is None else self.places
        return (self.diagonal[:, None] - keys).abs()

    def transpose(self) -> Self:
        """The queries that see each key, again as a mask; computed once and kept with the mask.

        Key j is seen by the queries from the first with `key_stop` above j to the last with `key_start` of at most j.

        Raises:
            ValueError: tensors of the mask or of its transpose were overwritten since they were made.
        """
        return self.cached("transpose", self._transpose)

    def _transpose(self) -> Self:
        num_queries = self.key_start.shape[0]
        # Not `self`, which would be a reference cycle.
        source = self._computed.get("document", self.document_source)
        # The bounds of the transpose, (num_keys,) int32, if they were computed along with the mask.
        start, stop = self._computed.get("seen by", (self.query_start, self.query_stop))
        if (start is None or stop is None) and self.key_start.is_cuda and kernels.serve(self.key_start):
            from tritonpack.kernels.intervals import transposed_intervals

            start, stop = transposed_intervals(self.key_start, self.key_stop, self.num_keys)
        elif start is None or stop is None:
            keys = torch.arange(self.num_keys, device=self.key_start.device, dtype=torch.int32)
            start = torch.searchsorted(self.key_stop, keys, right=True, out_int32=True)
            stop = torch.searchsorted(self.key_start, keys, right=True, out_int32=True)
        if source is not None:
            source = partial(_document_of_keys, source, start) if num_queries else None
        return replace(
            self,
            key_start=start,
            key_stop=stop,
            num_keys=num_queries,
            diagonal=None,
            document_source=source,
            query_start=self.key_start if self.is_tree else None,
            query_stop=self.key_stop if self.is_tree else None,
            key_places=None,
            trusted=True,
        )

    def restrict(self, query_rows: Tensor | None = None, key_positions: Tensor | None = None) -> Self:
        """The mask between some of the queries and some of the keys, such as one rank's shard.

        Args:
            query_rows: (R,) int32 or int64, ascending indices into the query stream; None keeps all.
            key_positions: (K,) int32 or int64, ascending indices into the key stream; None keeps all.

        Returns:
            The mask of R queries and K keys, in the order of the arguments.

        Raises:
            ValueError: wrong dtype or shape; and, for indices in host memory, indices out of range or not ascending.

        >>> mask = BlockDiagonalMask.from_seqlens([4, 2])
        >>> mask.restrict(torch.tensor([1, 3, 5]), torch.tensor([0, 3, 4])).to_dense().int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
        """
        self.check_unwritten()
        part = {f.name: getattr(self, f.name) for f in fields(self)}
        part |= {"document_source": self.document, "key_places": self.places}

        def change(names: tuple[str, ...], function: Callable[[Tensor], Tensor]) -> None:
            part.update({name: function(part[name]) for name in names if part[name] is not None})

        if query_rows is not None:
            rows = check_indices(query_rows, "query_rows", self.num_queries, self.device)
            change(("key_start", "key_stop", "diagonal", "document_source"), lambda x: x[rows])
            change(("query_start", "query_stop"), partial(_count_below, rows))
        if key_positions is not None:
            keys = check_indices(key_positions, "key_positions", self.num_keys, self.device)
            change(("query_start", "query_stop", "key_places"), lambda x: x[keys])
            change(("key_start", "key_stop"), partial(_count_below, keys))
            if self.places is None and self.diagonal is not None:
                part["key_places"] = keys.int()
            # A document may have many runs of rows that see nothing, so the number of documents has no bound any more.
            part |= {"num_keys": keys.shape[0], "max_documents": None}
        return replace(self, **part, trusted=True)

    def to(self, device: torch.device | str) -> Self:
        """The same mask on another device."""
        self.check_unwritten()
        device = check_device(device)
        tensors = {f.name: getattr(self, f.name) for f in fields(self)} | {"document_source": self.document}
        moved: dict[str, Any] = outside_inference_mode(
            lambda: {name: x.to(device) for name, x in tensors.items() if isinstance(x, Tensor)}
        )
        mask = replace(self, **moved, trusted=True)
        object.__setattr__(mask, "origin", self)
        return mask

    def validate(self) -> Self:
        """Check the values; waits for the device.

        Returns:
            The mask itself.

        Raises:
            ValueError: an interval lies outside the keys (or queries), ends before it begins, or, in a mask without
                trees, begins or ends before the interval of the row above; the message names the first such row.
        """
        self._require_valid(torch.device("cpu"))
        return self

    def _require_valid(self, device: torch.device) -> None:
        """Check values in host memory, or on a device by an assertion there, which the host doesn't wait for."""
        sides = [(self.key_start, self.key_stop, self.num_keys, "row", "keys")]
        if self.query_start is not None and self.query_stop is not None:
            sides.append((self.query_start, self.query_stop, self.num_queries, "key", "queries"))
        for start, stop, size, own, other in sides:
            _require_intervals(start.to(device), stop.to(device), size, own, other, ascending=not self.is_tree)


def _require_intervals(start: Tensor, stop: Tensor, size: int, own: str, other: str, *, ascending: bool) -> None:
    """Raise, or assert on the device, unless intervals lie within `size` others, and ascend if they must."""
    good = (start >= 0) & (start <= stop) & (stop <= size)
    if ascending:
        good[1:] &= (start[1:] >= start[:-1]) & (stop[1:] >= stop[:-1])
    rule = f"intervals must lie within the {size} {other} and end at or after their begin" + (
        ", and neither their begins nor their ends may decrease" if ascending else ""
    )

    def message() -> str:
        if not on_host(start):
            return f"a mask's {rule}. mask.validate() names the first wrong one, from a copy in host memory."
        wrong = int((~good).nonzero()[0])
        found = f"{own} {wrong} of the mask has the {other} [{int(start[wrong])}, {int(stop[wrong])}); {rule}"
        return f"{found}. Check the offsets, ids or indices that the mask was built from."

    require(good.all(), message)


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
    """(num_queries,) bool, True where a document, a branch of a tree or a run of rows that see nothing begins.

    A row that has no key in common with the row above counts as a begin, in a tree a row that doesn't see the key of
    the row above. With `exact` the numbers of the documents decide instead, if the mask has them.
    """
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


def _count_below(indices: Tensor, bound: Tensor) -> Tensor:
    """Count the ascending indices below each bound: the bound among them."""
    return torch.searchsorted(indices.to(torch.int32), bound, out_int32=True)
