"""Files of results: checked before the work, then written whole or not at all. "-" is standard output."""

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
from typing import TYPE_CHECKING, Any

from tritonpack.errors import OutputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STANDARD_OUTPUT = Path("-")


def require_writable(path: Path | None, option: str = "--json", inputs: Sequence[Path] = ()) -> None:
    """Check before the work that its results can be written to `path`, and make its folder. No file is changed.

    Args:
        path: the file; None or "-" (standard output) needs no check.
        option: the name of the option in messages.
        inputs: files that the command reads, or writes for another option.

    Raises:
        ValueError: the folder can't be made or is read-only, `path` is a folder, or it is the same file as one of
            `inputs`.
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
    """Make the folder of --out, and check before the work that files of these names can be written to it.

    Raises:
        ValueError: they can't.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {folder} can't be made: {error.strerror}; name another folder") from error
    for name in names:
        require_writable(folder / name, "--out")


def require_folder(folder: Path, *names: str) -> None:
    """Check before the work what `make_folder` checks, and leave no new folder."""
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    make_folder(folder, *names)
    with suppress(OSError):  # not empty, by another process
        for each in new:
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


def write_json(path: Path, values: Any) -> None:
    """Write values, which may hold paths, as JSON to a file, or to standard output for "-"."""
    text = json.dumps(values, indent=1, default=os.fspath) + "\n"
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text)
    else:
        write_whole(path, text)


def write_figure(path: Path, figure: Figure) -> None:
    """Write a figure as a PNG."""
    picture = BytesIO()
    figure.savefig(picture, format="png")
    write_whole(path, picture.getvalue())
