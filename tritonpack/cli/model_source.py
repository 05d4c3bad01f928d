"""Load configurations and models from the Hub, a folder or a config.json; errors are one line."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers

from tritonpack.cli.files import require_model
from tritonpack.patches.interface import use_eager_if_sdpa_differs
from tritonpack.patches.proof import one_line

# transformers' auto classes, in the order in which a model is looked for.
_AUTO = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModel")
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
    """The configuration of a model: one on the Hub, a folder with a config.json, or such a file.

    Raises:
        ValueError: there is none, or transformers refuses it.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(_source(name), trust_remote_code=trust_remote_code)
    except Exception as error:  # validators of a configuration may raise anything
        raise ValueError(_why(name, error, refused=not isinstance(error, (OSError, ImportError)))) from error
    named = getattr(config, "architectures", None) or []
    if not isinstance(named, list) or not all(isinstance(one, str) for one in named):
        raise ValueError(f"the configuration of {name} has architectures={named!r}; write a list of class names")
    return config


def load_model(name: str, config: Any, device: torch.device | None, trust_remote_code: bool) -> tuple[Any, str]:
    """A model with its weights, in their dtype, on a device; without a device it is built on "meta".

    Returns:
        The model, and if it isn't of the class that its configuration names, that class and the reason; else "".

    Raises:
        ValueError: it can't be built or loaded.
    """
    source = _source(name)
    if device is not None and Path(source).is_file():
        raise ValueError(f"{name} has no weights; name its folder, or leave out --weights")
    try:
        kind, why = _class_of(config, trust_remote_code)
        own = {} if issubclass(kind, transformers.PreTrainedModel) else {"trust_remote_code": True}
        if device is not None:
            model = kind.from_pretrained(source, config=config, dtype="auto", **own).to(device).eval()
        else:
            with torch.device("meta"):
                model = kind.from_config(config, **own) if own else kind(config)
    except Exception as error:  # a configuration's or a model's own code may raise anything
        if device is not None:
            raise ValueError(_why(name, error)) from error
        raise ValueError(f"{name}: no model can be built: {one_line(error)}; correct its configuration") from error
    use_eager_if_sdpa_differs(model)
    names = config.architectures or [""]
    return model, "" if type(model).__name__ in names else names[0] and f"in place of {names[0]}: {why}"


def _class_of(config: Any, trust_remote_code: bool) -> tuple[Any, str]:
    """The class that a configuration names in `architectures`, else one of transformers' auto classes, and the reason.

    It is an auto class if the model brings its own code.
    """
    (name, *_) = config.architectures or [""]
    own = (getattr(config, "auto_map", None) or {}) if trust_remote_code else {}
    for auto in (getattr(transformers, x) for x in _AUTO if x in own):
        return auto, "its own code leads to this one"
    kind: Any = None
    with suppress(Exception):  # its module imports a package that isn't installed
        kind = getattr(transformers, name, None) if name else None
    if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
        if isinstance(config, getattr(kind, "config_class", None) or ()):
            return kind, ""
        why = f"that class takes no {type(config).__name__}"
    else:
        why = f"{_VERSION} has no such model class"
    for auto in (getattr(transformers, x) for x in _AUTO):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)], why
    raise ValueError(f"transformers has no model for a {type(config).__name__}")


def _source(name: str) -> str:
    """The local path of a model, or its name on the Hub."""
    path = require_model(name)
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
        newer = "a newer version may, and models with code of their own need --trust-remote-code"
        return f"{name} is of the model type {found[1]!r}, which {_VERSION} doesn't know; {newer}"
    if "model_type" in text and "Unrecognized model" in text:
        return f"the configuration of {name} names no model_type, so transformers can't tell what it is; add one"
    if not refused:
        return f"{name} can't be loaded: {one_line(error)}"
    while error.__cause__ is not None:  # the validator of a field, without the classes that report on it
        error = error.__cause__
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{_VERSION} refuses the configuration of {name}: {reason}; correct its config.json"
