"""Where a model comes from: the Hub, a folder or a config.json; and one line on why it can't be had."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from tritonpack.patches.trial.small_copy import AUTO, Built, auto_class, model_class, one_line, part_of

_OWN_CODE = "brings code of its own, which isn't run unless you say --trust-remote-code; read it first"
_LOG_IN = "log in with `hf auth login` (or set HF_TOKEN)"

# What the exceptions of huggingface_hub mean, by their names.
_HUB = {
    "GatedRepoError": f"is gated: ask for access at https://huggingface.co/{{name}}, then {_LOG_IN}",
    "RepositoryNotFoundError": f"is neither a file or folder here nor a model on the Hub; if it is private, {_LOG_IN}",
    "HFValidationError": "is neither a file or folder here nor the name of a model on the Hub, such as owner/model",
    "LocalEntryNotFoundError": "isn't in the cache, and the Hub can't be reached; its config.json, saved to a file, "
    "can be checked instead",
}


def load_config(name: str, trust_remote_code: bool) -> Any:
    """The configuration of a model.

    Args:
        name: a model on the Hub, a folder with a config.json, or such a file.
        trust_remote_code: run the code that the model brings.

    Raises:
        ValueError: there is none, or transformers doesn't know it; the message is one line and says what to do.
    """
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"{name} has no config.json; name a folder that save_pretrained wrote, or a config.json")
    if not path.exists() and (name.startswith((".", "/", "~")) or name.endswith(".json") or name.count("/") > 1):
        raise ValueError(f"there is no file or folder {name}")
    try:
        return transformers.AutoConfig.from_pretrained(
            str(path) if path.exists() else name, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # also whatever the validators of a configuration raise
        raise ValueError(_why(name, error)) from error


def load_weights(name: str, config: Any, device: torch.device, trust_remote_code: bool) -> Built:
    """The model itself, in the dtype that its weights have.

    Args:
        name: a model on the Hub or a folder.
        config: as `load_config` gives it.
        device: where to put it.
        trust_remote_code: run the code that the model brings.

    Raises:
        ValueError: it can't be loaded; the message is one line.
    """
    if Path(name).expanduser().is_file():
        raise ValueError(f"{name} has no weights; name its folder, or leave out --weights")
    path = str(Path(name).expanduser()) if Path(name).expanduser().exists() else name
    try:
        auto, part = auto_class(config), part_of(config)
        if part is config:
            model = auto.from_pretrained(path, config=config, dtype="auto", trust_remote_code=trust_remote_code)
        else:
            model = model_class(config).from_pretrained(path, config=part, dtype="auto")
        model = model.to(device).eval()
    except Exception as error:  # files that are missing or broken, memory, packages, a model's own code
        raise ValueError(_why(name, error)) from error
    return Built(model, f"{type(model).__name__}, {AUTO[auto.__name__]}")


def _why(name: str, error: BaseException) -> str:
    """What an exception of transformers' or the Hub's means, in one line."""
    for cause in _chain(error):
        if hint := _HUB.get(type(cause).__name__):
            return f"{name} {hint.format(name=name)}"
    text = str(error)
    if "trust_remote_code" in text and "custom code" in text:
        return f"{name} {_OWN_CODE}"
    if found := re.search(r"model type `([^`]*)`", text):
        return (
            f"{name} is of the model type {found[1]!r}, which transformers {transformers.__version__} doesn't know; "
            "a newer version may, and models with code of their own need --trust-remote-code"
        )
    if "model_type" in text and "Unrecognized model" in text:
        return f"{name} has no config.json that names a model_type, so transformers can't tell what it is"
    return f"{name} can't be loaded: {one_line(error)}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those that it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
