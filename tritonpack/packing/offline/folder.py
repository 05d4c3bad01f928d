"""The folder that pack_to_disk writes: its state between interruptions, and the form that `datasets` loads."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from tritonpack.errors import OutputError
from tritonpack.packing.lengths import count
from tritonpack.packing.offline import sources

_RECORD = "packing.json"  # settings, source, summary and sizes of files; without a summary it isn't complete
_WORK = ".packing"  # what is needed until the folder is complete


class Folder:
    """A folder of packed rows, and what is known of it.

    Until rows are planned the folder holds only temporary files, and other settings or documents begin anew. From then
    on it belongs to its settings and documents.

    Attributes:
        path: the folder.
        work: its folder of temporary files.
        summary: what the folder holds; None while it isn't complete.
    """

    def __init__(self, path: Path, settings: dict[str, Any], source: dict[str, Any]) -> None:
        """Begin in a new or empty folder, or go on in one that was begun with the same settings and documents.

        Raises:
            ValueError: the folder holds something else, or was begun with other settings or documents.
        """
        self.path = path
        self.work = path / _WORK
        self.summary: dict[str, Any] | None = None
        self._record: dict[str, Any] = {"settings": settings, "source": source}
        self._read()

    def _read(self) -> None:
        path = self.path
        if (path / _RECORD).exists():
            try:
                found = json.loads((path / _RECORD).read_text(encoding="utf-8"))
                self._compare(found["settings"], found["source"], found["summary"])
                self._check_files(found.get("files", {}))
            except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path / _RECORD} isn't of pack_to_disk; name another folder as out.") from error
        elif path.exists() and any(file.name != _WORK for file in path.iterdir()):
            raise ValueError(f"out={path} isn't empty and holds no packing that could be continued; name another.")

    def _compare(self, settings: dict[str, Any], source: dict[str, Any], summary: dict[str, Any] | None) -> None:
        given = json.loads(json.dumps(self._record))
        changed = [
            f"{name} was {settings.get(name)!r} and is {value!r}"
            for name, value in given["settings"].items()
            if settings.get(name) != value
        ]
        if source != given["source"]:
            files = _changed_files(source.get("files", []), given["source"].get("files", []))
            changed.append(f"the documents aren't those that it was begun with{files}")
        if changed:
            state = "holds" if summary else "holds the beginning of"
            raise ValueError(
                f"out={self.path} {state} another packing: {'; '.join(changed)}. Give the same again, name another "
                "folder, or remove this one."
            )
        self.summary = summary

    def _check_files(self, sizes: dict[str, int]) -> None:
        """ValueError for a file of a complete folder that is missing or has another size."""
        for name, size in sizes.items():
            file = self.path / name
            found = file.stat().st_size if file.exists() else None
            if found != size:
                state = "is missing" if found is None else f"has {count(found, 'byte')}, but was written with {size:,}"
                raise ValueError(f"{file} {state}; remove the folder {self.path} and pack again.")

    @contextmanager
    def lock(self, wait: bool) -> Iterator[None]:
        """Keep other processes out until the folder is complete; the kernel opens the lock when the process ends.

        Args:
            wait: wait for another process that packs into the folder.

        Raises:
            ValueError: another process packs into the folder.
        """
        if self.summary is None:
            self.work.mkdir(parents=True, exist_ok=True)
            with open(self.work / "lock", "wb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                except BlockingIOError as error:
                    raise ValueError(
                        f"another process packs into {self.path}; wait for it, or name another."
                    ) from error
                self._read()  # the other process may have completed it
                if self.summary is None:
                    self._keep_what_belongs()
                yield
        else:
            yield
        if self.summary is not None:
            shutil.rmtree(self.work, ignore_errors=True)

    def _keep_what_belongs(self) -> None:
        """Remove temporary files of a process that was killed, and those that belong to other documents or columns."""
        measured = json.dumps([self._record["source"], self._record["settings"]["columns"], sources.PART_BYTES])
        known = self.work / "measured.json"
        same = known.exists() and known.read_text(encoding="utf-8") == measured
        for left in self.work.iterdir():
            if left.name != "lock" and (left.suffix == ".tmp" or not same):
                left.unlink()
        if not same:
            write(known, lambda path: path.write_text(measured, encoding="utf-8"))

    def shard(self, number: int, count: int) -> Path:
        """The file of a shard."""
        return self.path / f"data-{number:05d}-of-{count:05d}.arrow"

    def begin_rows(self, plan: str) -> None:
        """Bind the folder to its settings, its documents and the digest of its rows.

        Raises:
            ValueError: the folder was begun with another digest.
        """
        self._record["plan"] = plan
        if not (self.path / _RECORD).exists():
            write(self.path / _RECORD, self._json(None))
        elif json.loads((self.path / _RECORD).read_text(encoding="utf-8"))["plan"] != plan:
            raise ValueError(
                f"{self.path} was begun by a version of tritonpack or NumPy that makes other rows; go on with that "
                "one, or remove the folder."
            )

    def finish(self, schema: pa.Schema, num_shards: int, summary: dict[str, Any], description: str) -> None:
        """Write what makes the folder a dataset that `datasets.load_from_disk` reads, then the summary."""
        from datasets import DatasetInfo, Features

        text = json.dumps(self._record, sort_keys=True) + str(summary["rows"])
        state: dict[str, Any] = {
            "_data_files": [{"filename": self.shard(number, num_shards).name} for number in range(num_shards)],
            "_fingerprint": hashlib.sha256(text.encode()).hexdigest()[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        info = io.BytesIO()
        DatasetInfo(description, features=Features.from_arrow_schema(schema))._dump_info(info)
        write(self.path / "dataset_info.json", lambda path: path.write_bytes(info.getvalue()))
        write(self.path / "state.json", lambda path: path.write_text(json.dumps(state, indent=2, sort_keys=True)))
        names = [file["filename"] for file in state["_data_files"]]
        files = {name: (self.path / name).stat().st_size for name in (*names, "dataset_info.json", "state.json")}
        self._record["files"] = files
        write(self.path / _RECORD, self._json(summary))
        self.summary = summary

    def _json(self, summary: dict[str, Any] | None) -> Callable[[Path], Any]:
        text = json.dumps(self._record | {"summary": summary}, indent=1) + "\n"
        return lambda path: path.write_text(text, encoding="utf-8")


@contextmanager
def made(path: Path) -> Iterator[None]:
    """Make the folder of the rows; if an error leaves the context, remove it again.

    Raises:
        ValueError: it can't be made.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"out={path} is a file; name a folder.")
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"out={path} can't be made: {error.strerror}; name another folder.") from error
    try:
        yield
    except BaseException:
        with suppress(OSError):  # not empty, by another process
            for folder in new:
                folder.rmdir()
        raise


def _changed_files(before: list[list[Any]], now: list[list[Any]]) -> str:
    """Which of the files of documents, each with its size and its time of change, aren't those of before."""
    old, new = ({name: (size, time) for name, size, time in files} for files in (before, now))
    for name in sorted(old.keys() ^ new.keys()):
        return f" ({name} is {'new' if name in new else 'gone'})"
    for name in new:
        if old[name][0] != new[name][0]:
            return f" ({name} had {count(old[name][0], 'byte')} and has {new[name][0]:,})"
        if old[name] != new[name]:
            return (
                f" ({name} has the same size, but was written again or touched at another time, so its documents may "
                "differ; if they don't, datasets.load_from_disk still loads a complete folder)"
            )
    return ""


def write(path: Path, content: Callable[[Path], Any]) -> None:
    """Write a file whole or not at all: `content` writes a temporary file, which then gets the name.

    Raises:
        OutputError: the file can't be written; the message names it and says how to go on.
    """
    work = path.parent if path.parent.name == _WORK else path.parent / _WORK
    temporary = work / f"{path.name}.tmp"
    try:
        content(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        reason = f"{error.strerror or error}; free space in {path.parent} and run the same command again"
        raise OutputError(error.errno or errno.EIO, reason, str(path)) from error
