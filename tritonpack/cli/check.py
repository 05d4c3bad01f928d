"""`tritonpack check MODEL`: whether packed documents stay apart in a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from rich.console import Console
from rich.markup import escape

from tritonpack.cli.machine import console_beside, print_grid, require_writable, resolve_device, write_json
from tritonpack.errors import IsolationError, UnsupportedModelError
from tritonpack.patches import patch
from tritonpack.patches.forwards import installed
from tritonpack.patches.interface import use_eager_if_sdpa_differs
from tritonpack.patches.measuring import quiet
from tritonpack.patches.pipeline import ONE_RESULT
from tritonpack.patches.proof import one_line
from tritonpack.testing import check_isolation

EXIT_CODES = {"exact": 0, "refused": 1}  # 3 for "leak" and "unknown"; 2 is a wrong command line
# transformers' auto classes, in the order in which a model is looked for.
_AUTO = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText, transformers.AutoModel)


class Result(NamedTuple):
    """The verdict ("exact", "leak", "refused", "unknown") for the model, stock or patched, and the reason."""

    verdict: str
    reason: str


def examine(*, model: str, weights: bool, device: str, trust_remote_code: bool, json: Path | None) -> int:
    """Check a model, print the results, and write them as JSON; returns the exit code.

    Without `weights` the model is built on the meta device, and the result is what our tests have shown of its class.
    """
    if device == "cuda" and not weights:
        raise ValueError("--device is for --weights: nothing runs without them")
    require_writable(json, read=Path(model))
    with quiet(), Console(stderr=True).status(f"checking {escape(model)}"):
        built = load_model(model, resolve_device(device) if weights else None, trust_remote_code)
        stock = _run(built) if weights else None
        patched, report = _patched(built, runs=weights)
    kind, dtype = type(built).__name__, str(built.dtype).removeprefix("torch.")
    print_grid(console_beside(json), {
        "model": model,
        "class": f"{kind} in {dtype}",
        "patch": report or "none",
        "stock transformers": stock and ": ".join(stock),
        "tritonpack": ": ".join(patched),
    })  # fmt: skip
    write_json(json, {
        "model": model, "weights": weights, "model_type": built.config.model_type, "class": kind, "dtype": dtype,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "stock": stock and stock._asdict(), "tritonpack": {**patched._asdict(), "report": report},
    })  # fmt: skip
    return EXIT_CODES.get(patched.verdict, 3)


def _run(model: Any) -> Result:
    """Run documents, packed and alone, on a model with weights."""
    try:
        return Result("exact", str(check_isolation(model)))
    except IsolationError as error:
        return Result("leak", str(error))
    except UnsupportedModelError as error:
        return Result("refused", str(error))


def _patched(model: Any, *, runs: bool) -> tuple[Result, str]:
    """The result for a patched model, and the report of the patch."""
    try:
        with patch(model) as handle:
            report = str(handle.report)
            if runs:
                handle.prove()
                return _run(model), report
            head, proof = handle._applied.heads[0], handle._applied.proof
            if head.one_result:
                return Result("refused", f"{head.name} {ONE_RESULT}"), report
            if why := proof.why_unknown(head, trees=False):
                remedy = "Its first call proves that documents stay apart, or is refused; --weights proves it now."
                return Result("unknown", f"{why}. {remedy}"), report
            return Result("exact", f"shown by tritonpack's tests with transformers {installed()}."), report
    except UnsupportedModelError as error:
        return Result("refused", str(error)), ""


def load_model(name: str, device: torch.device | None, trust_remote_code: bool) -> Any:
    """A model with its weights, in their dtype, on a device; without a device it is built on "meta".

    Args:
        name: a model on the Hub, a folder with a config.json, or such a file.

    Raises:
        ValueError: there is none, or it can't be built or loaded.
    """
    path = Path(name).expanduser()
    if not path.exists() and (name.startswith((".", "/", "~")) or name.endswith(".json") or name.count("/") > 1):
        raise ValueError(f"there is no file or folder {name}")
    source = str(path) if path.exists() else name
    with _errors_as_one_line(f"the configuration of {name} can't be loaded"):
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    if device is not None and path.is_file():
        raise ValueError(f"{name} has no weights; name its folder, or leave out --weights")
    with _errors_as_one_line(f"the model {name} can't be {'built' if device is None else 'loaded'}"):
        own = (getattr(config, "auto_map", None) or {}) if trust_remote_code else {}  # the model brings its own code
        kinds = [auto for auto in _AUTO if auto.__name__ in own]
        kinds += [getattr(transformers, one) for one in (config.architectures or ())[:1] if not kinds]
        kinds += [auto._model_mapping[type(config)] for auto in _AUTO if type(config) in auto._model_mapping]
        if not kinds:
            raise ValueError(f"transformers has no model for a {type(config).__name__}")
        kind, options = kinds[0], {} if kinds[0] not in _AUTO else {"trust_remote_code": True}
        if device is not None:
            model = kind.from_pretrained(source, config=config, dtype="auto", **options).to(device).eval()
        else:
            with torch.device("meta"):
                model = kind.from_config(config, **options) if options else kind(config)
    use_eager_if_sdpa_differs(model)
    return model


@contextmanager
def _errors_as_one_line(what: str) -> Iterator[None]:
    """Turn errors of transformers, the Hub, or a configuration's or a model's own code into one, with our option."""
    try:
        yield
    except Exception as error:  # such code may raise anything
        remedy = ". Read its code first; --trust-remote-code runs it" if "trust_remote_code" in str(error) else ""
        raise ValueError(f"{what}: {one_line(error)}{remedy}") from error
