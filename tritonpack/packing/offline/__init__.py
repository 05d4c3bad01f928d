"""pack_to_disk: packs documents that don't fit in memory into a dataset of rows on disk."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tritonpack import __version__
from tritonpack.checks import check_choice
from tritonpack.packing.bins import ALGORITHMS, Algorithm, pack
from tritonpack.packing.lengths import MAX_INT64, POLICIES, Overlong, OverlongReport, check_integer, check_limit, count

_SHARD_BYTES = 128 * 2**20


@dataclass(frozen=True)
class PackedFolder:
    """What pack_to_disk has written.

    Attributes:
        path: the folder, for `datasets.load_from_disk`.
        documents: documents read.
        tokens: their tokens.
        rows: rows written.
        row_documents: documents, and pieces of documents, in the rows.
        row_tokens: tokens in the rows.
        capacity: tokens that fit into a row.
        lower_bound: a number of rows that no packing of these documents can go below.
        report: what was done with the documents that are longer than the capacity.
        columns: the columns of the rows.
        labels_from: the masks from which labels were made; such masks aren't in the rows.
        left_out: columns of the documents that aren't in the rows.
    """

    path: Path
    documents: int
    tokens: int
    rows: int
    row_documents: int
    row_tokens: int
    capacity: int
    lower_bound: int
    report: OverlongReport
    columns: tuple[str, ...]
    labels_from: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def efficiency(self) -> float:
        """The share of the capacity of all rows that holds tokens."""
        return self.row_tokens / (self.rows * self.capacity)


def pack_to_disk(
    dataset: Any,
    capacity: int,
    out: str | os.PathLike[str],
    *,
    split: str | None = None,
    columns: Sequence[str] | None = None,
    overlong: Overlong = "error",
    algorithm: Algorithm = "best_fit_decreasing",
    max_items: int | None = None,
    seed: int | None = 0,
    jobs: int = 1,
    shard_bytes: int = _SHARD_BYTES,
    progress: Callable[[str, int, int], Any] | None = None,
) -> PackedFolder:
    """Pack documents into rows of `capacity` tokens, and write the rows as a dataset on disk.

    `datasets.load_from_disk(out)` loads it, and PackingCollator and TRL's collator make batches of its rows. A row has:

    | column | holds |
    |---|---|
    | `input_ids`, `labels`, ... | the tokens of its documents, end to end: int32, masks int8 |
    | `seq_lengths` | the number of tokens of each document, int32 |
    | `position_ids` | the place of each token in its document, uint16, or int32 above a capacity of 65,536 |

    Documents are read and written in parts, and only their lengths are all in memory: about 50 bytes per document,
    and 4 times `shard_bytes` per job. While it works, the folder also holds a copy of the documents. If the process is
    killed, the same call goes on where it was and writes the same files. On a complete folder it returns at once.

    Args:
        dataset: a `datasets.Dataset` or `IterableDataset`, or a dictionary of its splits; a folder that `save_to_disk`
            wrote; a file of Arrow, Parquet or JSON lines, a folder of them, or a pattern such as "data/*.parquet"; a
            name on the Hub, which is streamed. Documents have a row of tokens as "input_ids".
        capacity: tokens per row, at least 1.
        out: the folder, new or empty, or one of an earlier call with the same arguments.
        split: which split of a folder or a dictionary with several, or of a dataset on the Hub ("train" if None).
        columns: the columns with one value per token that rows keep; None keeps all, and other columns than
            PackingCollator's are an error. `attention_mask` must be 1 everywhere, and is left out. If there are no
            labels, they are made from `completion_mask` and `assistant_masks`, which are left out, because trainers
            remove these columns. Given labels are combined with them, as PackingCollator does.
        overlong, algorithm, max_items: see `pack`.
        seed: decides the order of the rows; None keeps the order that the algorithm makes.
        jobs: threads.
        shard_bytes: about the bytes of a file of the result.
        progress: called with the name of a step, the parts done and the number of parts.

    Raises:
        ValueError: a wrong argument, a source that can't be read, a document that is empty, is missing, has padding,
            has a column of other values or of another length, or labels that contradict a mask; the message names the
            file, the document and the column. A folder that holds something else, or was begun with other arguments or
            documents.
        ImportError: pyarrow, datasets or numba can't be imported.
    """
    return _pack(
        dataset, capacity, out, split=split, columns=columns, overlong=overlong, algorithm=algorithm,
        max_items=max_items, seed=seed, jobs=jobs, shard_bytes=shard_bytes, progress=progress, wait=False,
    )  # fmt: skip


def packed_dataset(
    dataset: Any, capacity: int, *, overlong: Overlong, algorithm: Algorithm, max_items: int | None
) -> Any:
    """A `datasets.Dataset` of the rows of `pack_to_disk`, in the order of the bins, with the format of the given one.

    It lies beside the cache of the given dataset, where another call finds it, or in memory if that does.
    """
    options: dict[str, Any] = {
        "split": None, "columns": None, "overlong": overlong, "algorithm": algorithm, "max_items": max_items,
        "seed": None, "jobs": 1, "shard_bytes": _SHARD_BYTES, "progress": None, "wait": True,
    }  # fmt: skip
    import datasets

    if not dataset.cache_files:
        with TemporaryDirectory() as folder:
            path = _pack(dataset, capacity, Path(folder) / "rows", **options).path
            rows = datasets.load_from_disk(str(path), keep_in_memory=True)
    else:
        text = json.dumps([dataset._fingerprint, capacity, overlong, algorithm, max_items, __version__])
        name = f"packed-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        path = Path(dataset.cache_files[0]["filename"]).parent / name
        rows = datasets.load_from_disk(str(_pack(dataset, capacity, path, **options).path))
    return rows.with_format(dataset.format["type"], **dataset.format["format_kwargs"])


def _pack(
    dataset: Any,
    capacity: int,
    out: str | os.PathLike[str],
    *,
    split: str | None,
    columns: Sequence[str] | None,
    overlong: Overlong,
    algorithm: Algorithm,
    max_items: int | None,
    seed: int | None,
    jobs: int,
    shard_bytes: int,
    progress: Callable[[str, int, int], Any] | None,
    wait: bool,
) -> PackedFolder:
    """`pack_to_disk`; with `wait` another process that packs into the folder is waited for."""
    capacity = check_integer(capacity, "capacity")
    check_choice(overlong, POLICIES, "overlong")
    check_choice(algorithm, ALGORITHMS, "algorithm")
    check_limit(max_items, "max_items")
    jobs = check_integer(jobs, "jobs")
    shard_bytes = check_integer(shard_bytes, "shard_bytes", 1, None)
    if seed is not None:
        seed = check_integer(seed, "seed", 0, MAX_INT64)
    if columns is not None and (isinstance(columns, str) or not all(isinstance(name, str) for name in columns)):
        raise ValueError(f"columns must be a list of names, such as ['input_ids', 'labels']; got {columns!r:.100}.")
    try:
        import datasets  # noqa: F401
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"pack_to_disk reads and writes with pyarrow and datasets, which can't be imported here ({error}); run pip "
            "install datasets."
        ) from error

    from tritonpack.packing.offline import steps
    from tritonpack.packing.offline.documents import choose_columns
    from tritonpack.packing.offline.folder import Folder, made
    from tritonpack.packing.offline.open_source import Stream, open_source

    say = progress or (lambda step, done, parts: None)
    settings = {
        "capacity": capacity, "split": split, "columns": None if columns is None else list(columns),
        "overlong": overlong, "algorithm": algorithm, "max_items": max_items, "seed": seed, "shard_bytes": shard_bytes,
    }  # fmt: skip
    if isinstance(dataset, (str, os.PathLike)) and Path(out).resolve().is_relative_to(Path(dataset).resolve()):
        raise ValueError(f"out={out} lies in {dataset}, whose files are the documents; name a folder outside.")
    with made(Path(out)):  # before documents are read
        opened = open_source(dataset, split)
    folder = Folder(Path(out), settings, opened.digest)
    with folder.lock(wait):
        if folder.summary is None:
            source = opened.in_parts(folder, columns, say) if isinstance(opened, Stream) else opened
            if not source.parts:
                raise ValueError(f"{source.name} holds no document.")
            chosen = choose_columns(source.columns, columns, source.name)
            lengths = steps.measure(source, chosen, folder, jobs, say)
            say("plan", 0, 1)
            all_lengths = np.concatenate(lengths)
            try:
                packing = pack(all_lengths, capacity, algorithm=algorithm, max_items=max_items, overlong=overlong)
            except ValueError as error:  # documents that are too long
                raise ValueError(f"{error} {_longest(source, lengths)}") from error
            summary = {
                "documents": len(all_lengths),
                "tokens": packing.num_tokens + packing.report.tokens_lost,
                "rows": packing.num_bins,
                "row_documents": len(packing.items),
                "row_tokens": packing.num_tokens,
                "capacity": capacity,
                "lower_bound": packing.lower_bound,
                "report": asdict(packing.report),
                "labels_from": list(chosen.learned),
                "left_out": [name for name in source.columns if name not in (*chosen.kept.values(), *chosen.learned)],
            }
            description = f"{packing!r}. {packing.report}."
            layout = steps.lay_out(packing, seed, shard_bytes, chosen.token_bytes)
            del packing, all_lengths  # as large as the layout
            folder.begin_rows(layout.digest())
            say("plan", 1, 1)
            firsts = steps.sort(source, chosen, layout, lengths, capacity, folder, jobs, say)
            schema = steps.write_shards(layout, firsts, capacity, folder, jobs, say)
            folder.finish(schema, layout.num_shards, summary | {"columns": schema.names}, description)
    assert folder.summary is not None
    return _as_result(Path(out), folder.summary)


def _longest(source: Any, lengths: Sequence[Any]) -> str:
    """Which document is the longest, for messages."""
    longest, part = max((int(one.max()), -number) for number, one in enumerate(lengths))
    place = source.place(source.parts[-part], int(lengths[-part].argmax()))
    return f"The longest is {place}: {count(longest, 'token')}."


def _as_result(path: Path, summary: dict[str, Any]) -> PackedFolder:
    values = {field.name: summary[field.name] for field in fields(PackedFolder) if field.name != "path"}
    values |= {name: tuple(summary[name]) for name in ("columns", "labels_from", "left_out")}
    return PackedFolder(path=path, **values | {"report": OverlongReport(**summary["report"])})
