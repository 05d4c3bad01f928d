"""`tritonpack check MODEL`: whether packed documents stay apart in a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from rich.console import Console
from rich.markup import escape

from tritonpack.cli.machine import console_beside, print_grid, require_writable, resolve_device, write_json
from tritonpack.cli.model_source import load_config, load_model
from tritonpack.errors import IsolationError, UnsupportedModelError
from tritonpack.patches import patch
from tritonpack.patches.forwards import installed
from tritonpack.patches.measuring import quiet
from tritonpack.patches.pipeline import ONE_RESULT
from tritonpack.testing import check_isolation

EXIT_CODES = {"exact": 0, "refused": 1}  # 3 for "leak" and "unknown"; 2 is a wrong command line


class Result(NamedTuple):
    """The verdict ("exact", "leak", "refused", "unknown") for the model, stock or patched, and the reason."""

    verdict: str
    reason: str


def examine(name: str, *, weights: bool, device: str, trust_remote_code: bool, path: Path | None) -> int:
    """Check a model, print the results, and write them to `path` as JSON. The arguments are the command's options.

    Without `weights` the model is built on the meta device: what is said then is what the tests of tritonpack have
    shown of its class.

    Returns:
        The exit code: 0 if packing with tritonpack is exact, 1 if refused, 3 for anything else.

    Raises:
        ValueError: no such model, or it can't be built or loaded; `path` can't be written.
    """
    if device == "cuda" and not weights:
        raise ValueError("--device is for --weights: nothing runs without them")
    where = resolve_device(device)
    require_writable(path, inputs=[Path(name)])
    with quiet(), Console(stderr=True).status(f"reading the configuration of {escape(name)}") as status:
        config = load_config(name, trust_remote_code)
        status.update(f"loading {escape(name)}")
        model, instead = load_model(name, config, where if weights else None, trust_remote_code)
        status.update("packing documents, with stock transformers and patched")
        stock = _run(model) if weights else None
        patched, report = _patched(model, runs=weights)
    kind, dtype = type(model).__name__, str(model.dtype).removeprefix("torch.")
    print_grid(console_beside(path), {
        "model": name,
        "class": f"{kind} in {dtype}" + (f", in place of {instead}" if instead else ""),
        "patch": report or "none",
        **({"stock transformers": f"{stock.verdict}: {stock.reason}"} if stock else {}),
        "tritonpack": f"{patched.verdict}: {patched.reason}",
    })  # fmt: skip
    write_json(path, {
        "model": name, "weights": weights, "model_type": model.config.model_type, "class": kind,
        "instead_of": instead or None, "dtype": dtype,
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
