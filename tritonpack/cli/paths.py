"""Paths of models and documents. This module imports nothing that takes time, so wrong paths are reported at once."""

from __future__ import annotations

import json
from pathlib import Path


def require_path(name: str) -> Path:
    """The name of a model as a path. The path may not exist, because names of models on the Hub look like paths.

    Raises:
        ValueError: the name can only be a path and doesn't exist, it is a folder without a config.json, or its
            configuration isn't a JSON object.
        OSError: the configuration can't be read.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        path /= "config.json"
        if not path.is_file():
            raise ValueError(f"{name} has no config.json; name a folder that save_pretrained wrote, or a config.json")
    elif not path.exists():
        if name.startswith((".", "/", "~")) or name.endswith(".json") or name.count("/") > 1:
            raise ValueError(f"there is no file or folder {name}")
        return path
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} isn't JSON: {error}; name the config.json of a model, or correct the file") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {json.dumps(content)[:40]}, not a JSON object; write a model's configuration")
    return Path(name).expanduser()


# The files that `plan` reads lengths from, and that `pack` reads documents from, by their endings.
LENGTHS = (".json", ".jsonl", ".npy", ".parquet", ".csv", ".txt")
DOCUMENTS = (".arrow", ".parquet", ".jsonl", ".json", ".ndjson")


def require_lengths(path: Path) -> None:
    """ValueError for a path that `plan` can't read lengths from: a folder, a missing file, another ending."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name the file that holds the lengths: {', '.join(LENGTHS)}")
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    if path.suffix.lower() not in LENGTHS:
        raise ValueError(f"{path} ends in {path.suffix!r}; lengths are read from {', '.join(LENGTHS)}")


def require_documents(name: str) -> None:
    """ValueError for a dataset of `pack` that doesn't exist, and can't be a name on the Hub."""
    path = Path(name).expanduser()
    if path.exists() or any(sign in name for sign in "*?["):
        return
    if (
        name.startswith((".", "/", "~"))
        or path.suffix in DOCUMENTS
        or name.count("/") > 1
        or ("/" in name and path.parent.is_dir())
    ):
        raise ValueError(f"there is no file or folder {name}.")
