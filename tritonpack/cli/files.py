"""Files of commands: inputs are checked before slow imports, results are written whole or not at all ("-": stdout)."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from tritonpack.errors import OutputError

STANDARD_OUTPUT = Path("-")
# The endings of the files that `plan` reads lengths from, and that `pack` reads documents from.
LENGTHS = (".json", ".jsonl", ".npy", ".parquet", ".csv", ".txt")
DOCUMENTS = (".arrow", ".parquet", ".jsonl", ".json", ".ndjson")


def require_model(name: str) -> Path:
    """The name of a model as a path, which doesn't exist if it is a name on the Hub.

    Raises:
        ValueError: the name can only be a path and doesn't exist, it is a folder without a config.json, or its
            configuration isn't a JSON object.
        OSError: the configuration can't be read.
    """
    path = Path(name).expanduser()
    config = path / "config.json" if path.is_dir() else path
    if not config.exists():
        if path.is_dir():
            raise ValueError(f"{name} has no config.json; name a folder that save_pretrained wrote, or a config.json")
        if name.startswith((".", "/", "~")) or name.endswith(".json") or name.count("/") > 1:
            raise ValueError(f"there is no file or folder {name}")
        return path
    try:
        content = json.loads(config.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{config} isn't JSON: {error}; name the config.json of a model, or correct it") from error
    if not isinstance(content, dict):
        raise ValueError(f"{config} holds {json.dumps(content)[:40]}, not a JSON object; write a model's configuration")
    return path


def require_lengths(path: Path) -> None:
    """ValueError unless lengths are read from files with this ending."""
    if path.suffix.lower() not in LENGTHS:
        raise ValueError(f"{path} ends in {path.suffix!r}; lengths are read from {', '.join(LENGTHS)}")


def require_documents(name: str) -> None:
    """ValueError for a dataset of `pack` that doesn't exist, and can't be a name on the Hub."""
    path = Path(name).expanduser()
    local = name.startswith((".", "/", "~")) or path.suffix in DOCUMENTS or name.count("/") > 1
    local = local or ("/" in name and path.parent.is_dir())
    if local and not path.exists() and not any(sign in name for sign in "*?["):
        raise ValueError(f"there is no file or folder {name}.")


def require_writable(path: Path | None, option: str = "--json", inputs: Sequence[Path] = ()) -> None:
    """Check before the work that results can be written to `path`, and make its folder. No file is changed.

    Args:
        path: the file; None or "-" (standard output) needs no check.
        option: the name of the option in messages.
        inputs: files that the command reads, or writes for another option.

    Raises:
        ValueError: the folder can't be made or is read-only, `path` is a folder, or the same file as one of `inputs`.
    """
    if path is None or path == STANDARD_OUTPUT:
        return
    failure = f"{option} {path} can't be written"
    for other in inputs:
        if path.resolve() == other.resolve() or (path.exists() and other.exists() and path.samefile(other)):
            raise ValueError(f"{failure}: it is the same file as {other}, which would be lost; name another file")
    if path.is_dir():
        raise ValueError(f"{failure}: it is a folder; name a file")
    if path.exists() and not path.is_file():
        return  # a device or a named pipe
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
    except OSError as error:
        raise ValueError(f"{failure}: {error.strerror}; name another file") from error


def make_folder(folder: Path, *names: str) -> None:
    """Make the folder of --out; ValueError if it can't be made, or files of these names can't be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {folder} can't be made: {error.strerror}; name another folder") from error
    for name in names:
        require_writable(folder / name, "--out")


def missing_folders(folder: Path) -> list[Path]:
    """The folders that have to be made for `folder` to exist, the innermost first."""
    return [each for each in (folder, *folder.parents) if not each.exists()]


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders up to the first that another process has filled."""
    with suppress(OSError):
        for each in folders:
            each.rmdir()


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file through a temporary one in its folder, so that readers find it whole, and a failure changes nothing.

    Raises:
        OutputError: it can't be written.
    """
    data = content.encode() if isinstance(content, str) else content
    target = path.resolve()  # a link stays, the file that it leads to is replaced
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        if path.exists() and not path.is_file():  # /dev/null must not be replaced by a file
            path.write_bytes(data)
            return
        temporary.write_bytes(data)
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, target)
    except OSError as error:
        raise OutputError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path | None, values: Any) -> None:
    """Write values, which may hold paths, as JSON to a file, or to standard output for "-"; None writes nothing."""
    text = json.dumps(values, indent=1, default=os.fspath) + "\n"
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text)
    elif path is not None:
        write_whole(path, text)


def write_figure(path: Path, figure: Any) -> None:
    """Write a figure of matplotlib as a PNG."""
    picture = BytesIO()
    figure.savefig(picture, format="png")
    write_whole(path, picture.getvalue())
