"""Load configurations and models from the Hub, a folder or a config.json; errors are one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from tritonpack.cli.paths import require_path
from tritonpack.patches.trial.small_copy import AUTO, PARTS, Built, auto_class, model_class, one_line, part_of

NAMED = "the class that its configuration names"
_OWN_CODE = "brings code of its own, which isn't run unless you say --trust-remote-code; read it first"
_LOG_IN = "log in with `hf auth login` (or set HF_TOKEN)"

# Messages for the exceptions of huggingface_hub, by their names.
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
        ValueError: there is none, or transformers doesn't know it.
    """
    path = require_path(name)
    try:
        return transformers.AutoConfig.from_pretrained(
            str(path) if path.exists() else name, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # validators of a configuration may raise anything
        raise ValueError(_why(name, error)) from error


def named_class(config: Any, trust_remote_code: bool) -> tuple[Any, str]:
    """The model class that a configuration names in `architectures`.

    Returns:
        The class, or None if the class of an auto class is to be checked; the reason for that, as the end of a
        sentence, empty if it is the same class.
    """
    (name, *_) = getattr(config, "architectures", None) or [""]
    if not name or (trust_remote_code and getattr(config, "auto_map", None)):
        return None, ""
    with suppress(ValueError, KeyError):  # no auto class has a model for it
        if model_class(config).__name__ == name:
            return None, ""
    if config.model_type in PARTS:
        return None, f"{name}, which holds more than a language model"
    kind: Any = None
    with suppress(Exception):  # its module imports a package that isn't installed
        kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        return None, f"{name}, which isn't a model class of transformers {transformers.__version__}"
    taken = getattr(kind, "config_class", None)
    if not isinstance(config, taken or ()):
        takes = getattr(taken, "__name__", "another configuration")
        return None, f"{name}, which takes a {takes} and no {type(config).__name__}"
    return kind, ""


def instead_of(config: Any, built: Built) -> str:
    """The class that a configuration names, if the model is of another class; else empty."""
    names = getattr(config, "architectures", None) or [""]
    return "" if type(built.model).__name__ in names else names[0]


def with_note(built: Built, config: Any, why: str) -> Built:
    """The model, with a note that says why it is of another class than the configuration names, if it is."""
    named = instead_of(config, built)
    if not named:
        return built
    why = why or f"{named}, which AutoModel classes don't lead to"
    note = f"its configuration names the class {why}; {type(built.model).__name__} was checked instead"
    return replace(built, notes=(note, *built.notes))


def load_weights(name: str, config: Any, device: torch.device, trust_remote_code: bool) -> Built:
    """Load a model in the dtype of its weights.

    Args:
        name: a model on the Hub or a folder.
        config: the result of `load_config`.
        device: the device for the model.
        trust_remote_code: run the code that the model brings.

    Raises:
        ValueError: it can't be loaded.
    """
    if Path(name).expanduser().is_file():
        raise ValueError(f"{name} has no weights; name its folder, or leave out --weights")
    path = str(Path(name).expanduser()) if Path(name).expanduser().exists() else name
    try:
        kind, why = named_class(config, trust_remote_code)
        if kind is not None:
            model = kind.from_pretrained(path, config=config, dtype="auto").to(device).eval()
            return Built(model, f"{type(model).__name__}, {NAMED}")
        auto, part = auto_class(config), part_of(config)
        if part is config:
            model = auto.from_pretrained(path, config=config, dtype="auto", trust_remote_code=trust_remote_code)
        else:
            model = model_class(config).from_pretrained(path, config=part, dtype="auto")
        model = model.to(device).eval()
    except Exception as error:  # files, memory, packages and a model's own code may raise anything
        raise ValueError(_why(name, error)) from error
    return with_note(Built(model, f"{type(model).__name__}, {AUTO[auto.__name__]}"), config, why)


def _why(name: str, error: BaseException) -> str:
    """The reason for an exception of transformers or the Hub, in one line."""
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
        what = "names no model_type" if Path(name).is_file() else "has no config.json that names a model_type"
        return f"{name} {what}, so transformers can't tell what it is"
    return f"{name} can't be loaded: {one_line(error)}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
