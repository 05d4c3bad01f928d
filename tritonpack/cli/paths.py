"""Names of models that can only be paths; this module imports nothing that takes time."""

from __future__ import annotations

from pathlib import Path


def require_path(name: str) -> Path:
    """The name of a model as a path, which may not exist: names of models on the Hub look like paths.

    Raises:
        ValueError: the name is a folder without a config.json, or can only be a path and doesn't exist.
    """
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"{name} has no config.json; name a folder that save_pretrained wrote, or a config.json")
    if not path.exists() and (name.startswith((".", "/", "~")) or name.endswith(".json") or name.count("/") > 1):
        raise ValueError(f"there is no file or folder {name}")
    return path
