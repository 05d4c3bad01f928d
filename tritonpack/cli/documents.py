"""Documents of `tritonpack pack`: files, folders, or a name on the Hub, as one `datasets.Dataset`."""

from __future__ import annotations

import errno
import glob
import os
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

import datasets
from datasets.fingerprint import Hasher

from tritonpack.packing.rows import Place

# The endings of files that are read -> the kind, as `datasets.load_dataset` names it.
KINDS = {".arrow": "arrow", ".parquet": "parquet", ".jsonl": "json", ".json": "json", ".ndjson": "json"}


def open_documents(name: str, split: str | None, cache: Path) -> tuple[Any, Place]:
    """The documents, and where each is. Parquet and JSON lines are copied into files of Arrow in `cache`.

    Raises:
        ValueError: they can't be read, or there are none.
        OSError: the disk is full.
    """
    path = Path(name).expanduser()
    if any((path / file).is_file() for file in ("state.json", "dataset_dict.json")):
        return _saved(path, split), lambda number: f"{number} of {name}"
    if not path.exists() and not glob.has_magic(name):
        within = path.parent.name != "" and path.parent.is_dir()
        if name.startswith((".", "/", "~")) or path.suffix in KINDS or within:
            raise ValueError(f"there is no file or folder {name}.")
        try:
            return datasets.load_dataset(name, split=split or "train"), lambda number: f"{number} of {name}"
        except Exception as error:  # of many kinds, by what is wrong with the name, the dataset or the network
            what = f"there is no file or folder {name}, and datasets.load_dataset can't load it"
            raise ValueError(f"{what} ({type(error).__name__}: {str(error).partition(chr(10))[0]}).") from error
    if split is not None:
        raise ValueError(f"{name} has no splits; leave out split={split!r}, or name the split's files.")
    parts: dict[str, Any] = {}
    for file in _files(path):
        try:
            if part := _read(file, cache):
                parts[file] = part
        except Exception as error:
            raise _unreadable(file, error) from error
    if not parts:
        raise ValueError(f"{name} holds no document.")
    names, starts = list(parts), [0, *accumulate(map(len, parts.values()))]
    documents = datasets.concatenate_datasets(list(parts.values()))
    states = [(os.path.abspath(file), os.path.getsize(file), os.path.getmtime(file)) for file in parts]
    documents._fingerprint = Hasher.hash(repr(states))  # the same in the next process

    def place(number: int) -> str:
        part = bisect_right(starts, number) - 1
        return f"{number - starts[part]} of {names[part]}"

    return documents, place


def _saved(path: Path, split: str | None) -> Any:
    """The dataset in a folder of save_to_disk."""
    try:
        found = datasets.load_from_disk(str(path))
    except Exception as error:
        raise _unreadable(path, error) from error
    splits = sorted(found) if isinstance(found, datasets.DatasetDict) else []
    if splits and split not in splits:
        raise ValueError(f"{path} has the splits {', '.join(splits)}; name one of them by --split; got {split!r}.")
    if not splits and split is not None:
        raise ValueError(f"{path} has no splits; leave out split={split!r}.")
    return found[split] if splits else found


def _files(path: Path) -> list[str]:
    """The file, the files of a folder, or those that a pattern names."""
    if path.is_dir():
        files = [str(file) for file in path.rglob("*") if file.suffix in KINDS and not file.is_dir()]
    else:
        files = [str(path)] if path.exists() else glob.glob(str(path), recursive=True)
    endings = {Path(file).suffix.lower() for file in files}
    if not endings <= {*KINDS} or len({KINDS[ending] for ending in endings}) != 1:
        given = f"files that end in {', '.join(map(repr, sorted(endings)))}" if files else "no file that can be read"
        raise ValueError(f"{path} has {given}; name files of one format: {', '.join(KINDS)}.")
    return sorted(files)


def _read(file: str, cache: Path) -> Any:
    """The documents of a file; None if it holds none."""
    kind = KINDS[Path(file).suffix.lower()]
    if kind == "arrow":
        return datasets.Dataset.from_file(file)
    with open(file, "rb") as lines:
        if kind == "json" and not any(line.strip() for line in lines):
            return None
    return datasets.load_dataset(kind, data_files=glob.escape(file), split="train", cache_dir=str(cache))


def _unreadable(path: object, error: Exception) -> Exception:
    """The error to raise for one of datasets' or pyarrow's, of many kinds by the format."""
    cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
    if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:  # the copy couldn't be written
        return cause
    reason = " ".join(str(cause).split()) or type(cause).__name__
    return ValueError(f"{path} can't be read: {reason.rstrip('.')}. Write it again.")
