"""`tritonpack pack`: packs documents into a dataset of rows on disk, and prints what became of them."""

from __future__ import annotations

import errno
import glob
import os
import shutil
from bisect import bisect_right
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

import datasets

from tritonpack.cli.machine import console_beside, percent, print_grid, require_writable, write_json
from tritonpack.errors import OutputError
from tritonpack.packing.collator import LEARNED
from tritonpack.packing.lengths import count
from tritonpack.packing.rows import Place, choose_columns, packed_dataset

# The endings of files that are read -> the kind, as `datasets.load_dataset` names it.
KINDS = {".arrow": "arrow", ".parquet": "parquet", ".jsonl": "json", ".json": "json", ".ndjson": "json"}
_CACHE = ".packing"  # a folder of the rows that holds what is done, until they are complete


def examine(
    *, dataset: str, out: Path, split: str | None, columns: str | None, seed: int, shuffle: bool, json: Path | None,
    **options: Any,
) -> None:  # fmt: skip
    """Pack, print the summary, write it as JSON. The arguments are the command's options."""
    given = {name: value for name, value in locals().items() if name != "options"} | options
    require_writable(json)
    console = console_beside(json)
    if not console.is_terminal:
        datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it also logs what it raises
    cache = out / _CACHE
    if out.resolve().is_relative_to(Path(dataset).resolve()):
        raise ValueError(f"out={out} lies in {dataset}, whose files are the documents; name a folder outside.")
    if out.exists() and not cache.exists() and any(out.iterdir()):
        raise ValueError(f"out={out} isn't empty; name another folder, or remove it.")
    require_writable(cache / "rows.arrow", "--out")
    asked = None if columns is None else [name.strip() for name in columns.split(",")]
    try:
        documents, place = open_documents(dataset, split, cache)
        rows, packing = packed_dataset(documents, columns=asked, max_items=None, folder=cache, place=place, **options)
        names, total = documents.column_names, len(documents)
        del documents  # whose files are mapped into memory
        if shuffle:
            rows = rows.shuffle(seed=seed, keep_in_memory=True)
        for file in out.glob("data-*.arrow"):  # of a process that was killed
            file.unlink()
        processes = None if options["jobs"] == 1 else min(options["jobs"], len(rows))
        rows.save_to_disk(str(out), max_shard_size="128MiB", num_proc=processes)
    except ValueError:
        shutil.rmtree(cache)
        if not any(out.iterdir()):
            out.rmdir()
        raise
    except OSError as error:
        reason = f"{error.strerror or error}; free space in {out} and run the same command again"
        raise OutputError(error.errno, reason, str(out)) from error
    shutil.rmtree(cache)
    read, kept = choose_columns(names, asked)
    learned = [name for name in read if name in LEARNED and name not in kept]
    left_out = [name for name in names if name not in (*kept, *learned)]
    report, tokens = packing.report, packing.num_tokens + packing.report.tokens_lost
    print_grid(console, {
        "documents": f"{total:,} of {count(tokens, 'token')}",
        "longer": str(report) if report.documents else None,
        "rows": f"{packing.num_bins:,} of {count(packing.capacity, 'token')}, {percent(packing.efficiency)}% full; no "
        f"packing needs fewer than {packing.lower_bound:,}",
        "columns": ", ".join(rows.column_names),
        "labels are made from": ", ".join(learned),
        "left out": ", ".join(left_out),
        "to load the rows": f"datasets.load_from_disk({str(out)!r})",
    })  # fmt: skip
    write_json(json, {
        "options": given, "path": out, "documents": total, "tokens": tokens, "rows": packing.num_bins,
        "row_documents": len(packing.items), "row_tokens": packing.num_tokens, "capacity": packing.capacity,
        "lower_bound": packing.lower_bound, "efficiency": packing.efficiency, "report": asdict(report),
        "columns": rows.column_names, "labels_from": learned, "left_out": left_out,
    })  # fmt: skip


def open_documents(name: str, split: str | None, cache: Path) -> tuple[datasets.Dataset, Place]:
    """The documents, and where each is. Parquet and JSON lines are copied into files of Arrow in `cache`.

    Raises:
        ValueError: they can't be read, or there are none.
        OSError: the disk is full.
    """
    path = Path(name).expanduser()
    if not path.exists() and not glob.has_magic(name):
        hub = "download a dataset of the Hub first: datasets.load_dataset(name, split=...).save_to_disk(folder)"
        raise ValueError(f"there is no file or folder {name}; {hub}.")
    if any((path / file).is_file() for file in ("state.json", "dataset_dict.json")):
        found = _read(str(path), cache)
        splits: dict[Any, Any] = found if isinstance(found, datasets.DatasetDict) else {None: found}
        if split not in splits:
            has = f"no splits; leave out --split {split}"
            if None not in splits:
                has = f"the splits {', '.join(sorted(splits))}; name one of them by --split; got {split!r}"
            raise ValueError(f"{path} has {has}.")
        return splits[split], lambda number: f"{number} of {name}"
    if split is not None:
        raise ValueError(f"{name} has no splits; leave out --split {split}, or name the split's files.")
    parts = {file: part for file in _files(path) if (part := _read(file, cache))}
    if not parts:
        raise ValueError(f"{name} holds no document.")
    starts = [0, *accumulate(map(len, parts.values()))]
    documents = datasets.concatenate_datasets(list(parts.values()))

    def place(number: int) -> str:
        part = bisect_right(starts, number) - 1
        return f"{number - starts[part]} of {list(parts)[part]}"

    return documents, place


def _files(path: Path) -> list[str]:
    """The file, the files of a folder, or those that a pattern names."""
    if path.is_dir():
        files = [str(file) for file in path.rglob("*") if file.suffix in KINDS and not file.is_dir()]
    else:
        files = [str(path)] if path.exists() else glob.glob(str(path), recursive=True)
    endings = {Path(file).suffix.lower() for file in files}
    kinds = {KINDS.get(ending) for ending in endings}
    if len(kinds) != 1 or None in kinds:
        given = f"files that end in {', '.join(map(repr, sorted(endings)))}" if files else "no file that can be read"
        raise ValueError(f"{path} has {given}; name files of one format: {', '.join(KINDS)}.")
    return sorted(files)


def _read(file: str, cache: Path) -> Any:
    """The documents of a file; or the dataset, or its splits, in a folder of save_to_disk."""
    kind = KINDS.get(Path(file).suffix.lower())
    try:
        if os.path.isdir(file):
            return datasets.load_from_disk(file)
        if kind == "arrow":
            return datasets.Dataset.from_file(file)
        found = datasets.load_dataset(kind, data_files=glob.escape(file), split="train", cache_dir=str(cache))
        if found.column_names == ["text"] and found.features["text"] != datasets.Value("string"):
            raise ValueError("it holds no mappings with 'input_ids'")
        return found
    except Exception as error:  # of datasets or pyarrow, of many kinds by the format
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:  # the copy couldn't be written
            raise cause from None
        reason = " ".join(str(cause).split()) or type(cause).__name__
        if reason == "StopIteration" or "corresponds to no data" in reason:
            raise ValueError(f"{file} holds no document; remove it.") from error
        raise ValueError(f"{file} can't be read: {reason.rstrip('.')}. Write it again.") from error
