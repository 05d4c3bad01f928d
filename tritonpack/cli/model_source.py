"""Load configurations and models from the Hub, a folder or a config.json; errors are one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers

from tritonpack.patches.interface import use_eager_if_sdpa_differs
from tritonpack.patches.proof import one_line

# transformers' auto classes, in the order in which a model is looked for.
_AUTO = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModel")


def load_config(name: str, trust_remote_code: bool) -> Any:
    """The configuration of a model: one on the Hub, a folder with a config.json, or such a file.

    Raises:
        ValueError: there is none, or transformers refuses it.
    """
    source = find_source(name)
    with _errors_as_one_line(f"the configuration of {name} can't be loaded"):
        return transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)


def load_model(name: str, config: Any, device: torch.device | None, trust_remote_code: bool) -> tuple[Any, str]:
    """A model with its weights, in their dtype, on a device; without a device it is built on "meta".

    Returns:
        The model, and the class that its configuration names if the model is of another one; else "".

    Raises:
        ValueError: it can't be built or loaded.
    """
    source = find_source(name)
    if device is not None and Path(source).is_file():
        raise ValueError(f"{name} has no weights; name its folder, or leave out --weights")
    with _errors_as_one_line(f"the model {name} can't be {'built' if device is None else 'loaded'}"):
        kind = _class_of(config, trust_remote_code)
        own = {} if issubclass(kind, transformers.PreTrainedModel) else {"trust_remote_code": True}
        if device is not None:
            model = kind.from_pretrained(source, config=config, dtype="auto", **own).to(device).eval()
        else:
            with torch.device("meta"):
                model = kind.from_config(config, **own) if own else kind(config)
        named = list(config.architectures or [""])
    use_eager_if_sdpa_differs(model)
    return model, "" if type(model).__name__ in named else named[0]


def _class_of(config: Any, trust_remote_code: bool) -> Any:
    """The class that a configuration names in `architectures`, else the one of transformers' auto classes for it.

    It is an auto class if the model brings its own code.
    """
    own = (getattr(config, "auto_map", None) or {}) if trust_remote_code else {}
    autos = [getattr(transformers, name) for name in _AUTO]
    for auto in autos:
        if auto.__name__ in own:
            return auto
    kind: Any = None
    with suppress(Exception):  # none is named, or its module imports a package that isn't installed
        kind = getattr(transformers, config.architectures[0])
    if not isinstance(kind, type) or not isinstance(config, getattr(kind, "config_class", None) or ()):
        kind = next((auto._model_mapping[type(config)] for auto in autos if type(config) in auto._model_mapping), None)
    if kind is None:
        raise ValueError(f"transformers has no model for a {type(config).__name__}")
    return kind


def find_source(name: str) -> str:
    """The local path of a model, or its name on the Hub; ValueError for what can only be a path and isn't there."""
    path = Path(name).expanduser()
    if not path.exists() and (name.startswith((".", "/", "~")) or name.endswith(".json") or name.count("/") > 1):
        raise ValueError(f"there is no file or folder {name}")
    return str(path) if path.exists() else name


@contextmanager
def _errors_as_one_line(what: str) -> Iterator[None]:
    """Turn errors of transformers, the Hub, or a configuration's or a model's own code into one, with our option."""
    try:
        yield
    except Exception as error:  # such code may raise anything
        remedy = ". Read its code first; --trust-remote-code runs it" if "trust_remote_code" in str(error) else ""
        raise ValueError(f"{what}: {one_line(error)}{remedy}") from error
