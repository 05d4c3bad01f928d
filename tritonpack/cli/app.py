"""The commands and their options. The work of each command is done in a module that is imported when it runs."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

import tritonpack
from tritonpack.cli.files import (
    make_folder,
    missing_folders,
    remove_empty,
    require_documents,
    require_lengths,
    require_model,
)
from tritonpack.errors import OutputError
from tritonpack.removed import REMOVED

app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]}, pretty_exceptions_enable=False)

# The base class of typer's exceptions for a wrong command line. It belongs to typer's own click or to click.
_UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]


def _number(option: str, text: str, least: int = 1, most: int = 2**31 - 1, kind: Any = int, **rest: Any) -> Any:
    """An option that must be a number from `least` to `most`; typer's own message wouldn't say what was given."""

    def number(given: str) -> float:
        try:
            value = kind(given)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            what = "an integer" if kind is int else "a number"
            raise _UsageError(f"{option} must be {what} from {least} to {most}; got {given}.")
        return value

    return Option(option, parser=number, help=text, **rest)


# Options that several commands have.
DeviceOption = Annotated[Literal["auto", "cpu", "cuda"], Option(help="auto: the GPU where there is one.")]
JsonOption = Annotated[
    Path | None, Option(dir_okay=False, help="Write the results as JSON there, too; - is standard output.")
]
CapacityOption = Annotated[int, _number("--capacity", "Tokens of a row, which one GPU takes per step.", most=2**30)]
SeedOption = Annotated[int, _number("--seed", "Decides the random order.", 0, 2**63 - 1)]
OverlongOption = Annotated[
    Literal["error", "truncate", "split", "drop"], Option(help="What to do with documents longer than --capacity.")
]
AlgorithmOption = Annotated[
    Literal["best_fit_decreasing", "first_fit", "next_fit", "windowed"],
    Option(help="How documents are chosen: best_fit_decreasing makes the fewest rows, next_fit keeps their order."),
]

# Python arguments in messages of tritonpack.packing, such as tail='keep' or columns=input_ids,labels.
_ARGUMENTS = re.compile(r"\b(objective|overlong|tail|columns|split|out)=('?[\w./-]+(?:,\w+)*'?(?:(?:, | or )'\w+')*)")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"tritonpack {tritonpack.__version__}")
        raise typer.Exit


@app.callback()
def common(
    _: Annotated[
        bool, Option("--version", help="Print the version and stop.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Packed (padding-free) training of language models."""


def _require(module: str, what: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"{what} needs {module}, which isn't installed; pip install {module}")


class CheckedDType(str, Enum):  # typer doesn't take a list of Literals
    """Data types that a backend can be checked in."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


@app.command()
def check_backend(
    function: Annotated[str, Argument(metavar="MODULE:FUNCTION", show_default=False)] = "",
    device: DeviceOption = "auto",
    dtype: Annotated[list[CheckedDType] | None, Option(
        help="Of q, k and v; repeatable.", show_default="float32 and bfloat16, bfloat16 on a GPU")] = None,
    only: Annotated[list[str] | None, Option(help="Checks by pattern, such as 'backward/*'; repeatable.")] = None,
    skip: Annotated[list[str] | None, Option(help="Checks to leave out, by pattern; repeatable.")] = None,
    json: JsonOption = None,
    list_: Annotated[bool, Option("--list", help="Print the names of the checks and stop.")] = False,
) -> int:  # fmt: skip
    """Check a function of flash_attn_varlen_func's shape: exactness, isolation, slack, empty documents, ...

    Exit code: 0 if a check passes and none fails, 1 if one fails or none passes.
    """
    from tritonpack.cli.check_backend import conformance, examine

    if list_:
        print(*(one.name for one in conformance.checks(only or ["*"], skip or [])), sep="\n")
        return 0
    return int(not examine(function, device, [one.value for one in dtype or []], only or ["*"], skip or [], json))


@app.command()
def check(
    model: Annotated[str, Argument(metavar="MODEL", help="A model on the Hub, a folder, or a config.json.")],
    weights: Annotated[bool, Option("--weights", help="Load the model, on --device, and pack documents on it.")
                       ] = False,
    device: DeviceOption = "auto",
    trust_remote_code: Annotated[bool, Option("--trust-remote-code", help="Run code that comes with the model.")
                                 ] = False,
    json: JsonOption = None,
) -> int:  # fmt: skip
    """Say whether packing a model is exact, refused, or unknown until its weights are loaded.

    Exit code: 0 exact, 1 refused, 2 a wrong command line, 3 a leak, or unknown.
    """
    _require("transformers", "the check")
    require_model(model)  # before transformers is imported, which takes seconds
    from rich.console import Console

    with Console(stderr=True).status("importing transformers"):
        from tritonpack.cli.check import examine
    return examine(model, weights=weights, device=device, trust_remote_code=trust_remote_code, path=json)


@app.command()
def plan(
    path: Annotated[Path, Argument(metavar="LENGTHS", exists=True, dir_okay=False, help="Tokens of each document: "
        "whole numbers or lists of token ids in a .json, .jsonl, .npy, .parquet, .csv or .txt file.")],
    capacity: CapacityOption,
    num_ranks: Annotated[int, _number("--ranks", "GPUs (data-parallel processes).", most=2**20)] = 1,
    epochs: Annotated[int, _number("--epochs", "Epochs to plan; the table has their means.")] = 1,
    seed: SeedOption = 0,
    objective: Annotated[Literal["quadratic", "linear", "cost"], Option(help="What the ranks of a step share evenly: "
        "squared lengths (attention's load), tokens, the model's cost.")] = "quadratic",
    tail: Annotated[Literal["drop", "spread", "keep"], Option(help="Documents left for the last step: drop them, "
        "spread them over all steps, or keep a partial step.")] = "drop",
    lookahead: Annotated[float, _number("--lookahead", "Tokens beyond a full step that a step may choose from, as a "
        "share of its tokens, from 0 to 1.", 0, 1, float)] = 0.01,
    steps_together: Annotated[int | None, _number("--steps-together", "Steps planned at once: fuller rows where a step "
        "holds few documents.", show_default="as many as needed")] = None,
    overlong: OverlongOption = "error",
    model: Annotated[str | None, Option(show_default="a Llama of 8B", help="The model whose cost counts: on the Hub, a "
        "folder, a config.json.")] = None,
    column: Annotated[str | None, Option(help="The column with the lengths, if the file has several.")] = None,
    out: Annotated[Path, Option(help="Folder for the picture, or its name, ending in .png.")] = Path("plan-out"),
    json: JsonOption = None,
) -> None:  # fmt: skip
    """Show how full and how even packed batches of your documents are, compared with padding and simpler ways.

    Example: tritonpack plan lengths.json --capacity 32768 --ranks 8
    """
    options = locals()
    _require("matplotlib", "the plan")
    require_lengths(path)  # before imports that take seconds
    if model is not None:
        _require("transformers", "--model")
        require_model(model)
    from tritonpack.cli.plan import examine

    examine(**options)


@app.command()
def pack(
    dataset: Annotated[str, Argument(metavar="DATASET", help="A folder of save_to_disk; a file, a folder or a pattern "
        "of .arrow, .parquet or .jsonl files; a name on the Hub.")],
    capacity: CapacityOption,
    out: Annotated[Path, Option(help="Folder for the rows: new, empty, or of a command that was interrupted.")],
    split: Annotated[str | None, Option(help="The split, of a dataset with several.")] = None,
    columns: Annotated[str | None, Option(show_default="all", help="Columns with one value per token that rows keep, "
        "such as input_ids,labels.")] = None,
    overlong: OverlongOption = "error",
    algorithm: AlgorithmOption = "best_fit_decreasing",
    max_items: Annotated[int | None, _number("--max-items", "Most documents of a row.", show_default="any")] = None,
    seed: SeedOption = 0,
    shuffle: Annotated[bool, Option(help="Shuffle the rows.")] = True,
    jobs: Annotated[int, _number("--jobs", "Processes.", most=1024)] = 1,
    shard_mib: Annotated[int, _number("--shard-mib", "MiB of a file of the result, about.", most=2**20)] = 128,
    json: JsonOption = None,
) -> None:  # fmt: skip
    """Pack documents, which needn't fit in memory, into a dataset of rows on disk; print what became of them.

    After an interruption the same command goes on after what its processes had finished.

    Example: tritonpack pack data/documents --capacity 32768 --out rows --jobs 8
    """
    options = locals()
    _require("datasets", "packing to disk")
    require_documents(dataset)  # before imports that take seconds
    new = missing_folders(out)
    make_folder(out)
    remove_empty(new)
    from tritonpack.cli.pack import examine

    examine(**options)


@app.command()
def doctor(json: JsonOption = None) -> int:
    """Show versions and the device, and try everything that can run here: attention, models, packing, ...

    Exit code: 0 if all that can run is right, 1 if something that should work doesn't.
    """
    from tritonpack.cli.doctor import examine

    return int(not examine(json))


def run(arguments: list[str]) -> int:
    """Run one command line.

    Returns:
        The exit code of the command; 1 if output can't be written, or for another error of the system; 2 for a wrong
        command line, 130 for Ctrl-C, 141 for a closed pipe (as shells count signals).
    """
    if arguments and arguments[0] in REMOVED:
        print(f"error: the command {arguments[0]} was removed: {REMOVED[arguments[0]]}", file=sys.stderr)
        return 2
    try:
        code = app(arguments or ["--help"], prog_name="tritonpack", standalone_mode=False)
        if sys.stdout is not None:  # None if it was closed before the start
            sys.stdout.flush()
        return code or 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except (_UsageError, ValueError, OSError, SystemExit) as error:
        if any(isinstance(one, BrokenPipeError) for one in (error, error.__cause__, error.__context__)):
            _discard_output()
            return 141  # typer raises SystemExit for a closed pipe
        if isinstance(error, SystemExit):
            raise
        text = error.format_message() if isinstance(error, _UsageError) else str(error)
        text = text.replace("Value error, ", "")  # typer's, before the choices of an option
        unwritten = isinstance(error, OutputError)
        if isinstance(error, OSError) and (unwritten or error.filename is None):  # not an input that can't be read
            what = "output can't be written: " if unwritten or _is_output_full() else ""
            print(f"error: {what}{text}", file=sys.stderr)
            _discard_output()
            return 1
        text = _ARGUMENTS.sub(lambda found: f"--{found[1]} {found[2].replace(chr(39), '')}", text)
        print(f"error: {text}", file=sys.stderr)
        return 2


def _is_output_full() -> bool:
    """Whether standard output still holds text that can't be written."""
    try:
        sys.stdout.write("")  # without it a second flush says nothing
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _discard_output() -> None:
    """Point standard output at the null device, because Python flushes it again when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
