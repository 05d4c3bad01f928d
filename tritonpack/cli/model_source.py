"""Load configurations and models from the Hub, a folder or a config.json; errors are one line."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from tritonpack.cli.paths import require_path
from tritonpack.cli.small_copies.small_copy import AUTO, PARTS, Built, auto_class, model_class, one_line, part_of
from tritonpack.patches.interface import use_eager_if_sdpa_differs

NAMED = "the class that its configuration names"
_VERSION = f"transformers {transformers.__version__}"
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
        ValueError: there is none, or transformers refuses it.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(_source(name), trust_remote_code=trust_remote_code)
    except (OSError, ImportError) as error:
        raise ValueError(_why(name, error)) from error
    except Exception as error:  # validators of a configuration may raise anything
        raise ValueError(_why(name, error, refused=True)) from error
    named = getattr(config, "architectures", None) or []
    if not isinstance(named, list) or not all(isinstance(one, str) for one in named):
        raise ValueError(f"the configuration of {name} has architectures={named!r}; write a list of class names")
    return config


def named_class(config: Any, trust_remote_code: bool) -> tuple[Any, str]:
    """The model class that a configuration names in `architectures`.

    Returns:
        The class, or None if the class of an auto class is to be checked; the reason for that, as the end of a
        sentence, empty if it is the same class.
    """
    (name, *_) = config.architectures or [""]
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
        return None, f"{name}, which isn't a model class of {_VERSION}"
    taken = getattr(kind, "config_class", None)
    if not isinstance(config, taken or ()):
        takes = getattr(taken, "__name__", "another configuration")
        return None, f"{name}, which takes a {takes} and no {type(config).__name__}"
    return kind, ""


def instead_of(config: Any, built: Built) -> str:
    """The class that a configuration names, if the model is of another class; else empty."""
    names = config.architectures or [""]
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
    source = _source(name)
    if Path(source).is_file():
        raise ValueError(f"{name} has no weights; name its folder, or leave out --weights")
    try:
        kind, why = named_class(config, trust_remote_code)
        part, what = config, NAMED
        options: dict[str, Any] = {}
        if kind is None:
            kind, part = auto_class(config), part_of(config)
            what = AUTO[kind.__name__]
            if part is config:
                options = {"trust_remote_code": trust_remote_code}
            else:
                kind = model_class(config)
        model = kind.from_pretrained(source, config=part, dtype="auto", **options).to(device).eval()
        use_eager_if_sdpa_differs(model)
    except Exception as error:  # files, memory, packages and a model's own code may raise anything
        raise ValueError(_why(name, error)) from error
    return with_note(Built(model, f"{type(model).__name__}, {what}"), config, why)


def _source(name: str) -> str:
    """The local path of a model, or its name on the Hub."""
    path = require_path(name)
    return str(path) if path.exists() else name


def _why(name: str, error: BaseException, refused: bool = False) -> str:
    """The reason for an exception of transformers or the Hub, in one line; `refused`: of reading a configuration."""
    cause: BaseException | None = error
    while cause is not None:
        if hint := _HUB.get(type(cause).__name__):
            return f"{name} {hint.format(name=name)}"
        cause = cause.__cause__ or cause.__context__
    text = str(error)
    if "trust_remote_code" in text and "custom code" in text:
        return f"{name} brings code of its own, which isn't run unless you say --trust-remote-code; read it first"
    if found := re.search(r"model type `([^`]*)`", text):
        return (
            f"{name} is of the model type {found[1]!r}, which {_VERSION} doesn't know; "
            "a newer version may, and models with code of their own need --trust-remote-code"
        )
    if "model_type" in text and "Unrecognized model" in text:
        return f"the configuration of {name} names no model_type, so transformers can't tell what it is; add one"
    if not refused:
        return f"{name} can't be loaded: {one_line(error)}"
    while error.__cause__ is not None:  # the validator of a field, without the classes that report on it
        error = error.__cause__
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{_VERSION} refuses the configuration of {name}: {reason}; correct its config.json"
