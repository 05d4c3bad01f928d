"""The commands and their options. Each command's work is done in a module of its own, imported when it runs."""

from __future__ import annotations

import importlib.util
import os
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import typer

import tritonpack
from tritonpack.cli.paths import require_path

app = typer.Typer(
    help="Packed (padding-free) training of language models.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)

# The base of everything that typer raises for a command line it can't accept, whether or not it brings its own click.
_UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]


Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16"]
BenchDType = Literal["auto", "float32", "bfloat16", "float16"]
Size = Literal["auto", "tiny", "small"]
Objective = Literal["quadratic", "linear", "cost"]
Tail = Literal["drop", "spread", "keep"]
Overlong = Literal["error", "truncate", "split", "drop"]


def _print_version(asked: bool) -> None:
    if asked:
        print(f"tritonpack {tritonpack.__version__}")
        raise typer.Exit


@app.callback()
def common(
    _: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Packed (padding-free) training of language models."""


class CheckedDType(str, Enum):  # a list of Literals is beyond typer
    """Data types that a backend may be checked in."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=3, help="Optimizer steps of each way.")] = 32,
    documents: Annotated[
        int | None, typer.Option(min=1, help="Documents per step.", show_default="8, 64 on a GPU")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=16, help="Split documents longer than this.", show_default="2048, 4096 on a GPU")
    ] = None,
    size: Annotated[Size, typer.Option(help="The model; auto: tiny, small on a GPU.")] = "auto",
    device: Annotated[Device, typer.Option(help="auto: the GPU where there is one.")] = "auto",
    dtype: Annotated[DType, typer.Option(help="auto: float32, bfloat16 on a GPU.")] = "auto",
    threads: Annotated[
        int, typer.Option(min=1, help="CPU threads of each way; one is disturbed the least by whatever else runs.")
    ] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Decides weights, documents and their order.")] = 0,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the picture.")] = Path("demo-out"),
) -> None:
    """Train a small Llama padded, naively concatenated and packed; compare speed, memory and loss; draw a picture."""
    for module, remedy in (("transformers", "transformers"), ("matplotlib", "'tritonpack[plots]'")):
        if importlib.util.find_spec(module) is None:
            raise typer.BadParameter(f"the demo needs {module}, which isn't installed; pip install {remedy}")
    from concurrent.futures.process import BrokenProcessPool

    from tritonpack.cli.demo import run_demo, settings_for

    try:
        settings = settings_for(device, dtype, size, max_length, threads, seed)
        out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    try:
        exact = run_demo(settings, steps, documents, out)
    except BrokenProcessPool as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    if not exact:
        raise typer.Exit(1)


@app.command()
def check_backend(
    function: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", show_default=False)] = "",
    device: Annotated[Device, typer.Option(help="auto: the GPU where there is one.")] = "auto",
    dtype: Annotated[
        list[CheckedDType] | None,
        typer.Option(help="Of q, k and v; repeatable.", show_default="float32 and bfloat16, bfloat16 on a GPU"),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Checks by pattern, as 'backward/*'; repeatable.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Checks to leave out, by pattern; repeatable.")] = None,
    json: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the results there as well.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Print the names of the checks and stop.")] = False,
) -> None:
    """Check a function of flash_attn_varlen_func's shape: exactness, isolation, slack, empty documents, ..."""
    from tritonpack.cli.check_backend import examine, list_checks

    try:
        if list_:
            list_checks(only or ["*"], skip or [])
            return
        passed = examine(function, device, [d.value for d in dtype or []], only or ["*"], skip or [], json)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    if not passed:
        raise typer.Exit(1)


@app.command()
def check(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model on the Hub, a folder, or a config.json.")],
    weights: Annotated[
        bool, typer.Option("--weights", help="Load the model, instead of building a small random copy of it.")
    ] = False,
    device: Annotated[Device, typer.Option(help="With --weights; auto: the GPU where there is one.")] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code that the model brings.")
    ] = False,
    json: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the findings there as well.")] = None,
) -> None:
    """Say whether packing a model is exact, refused or leaking, with stock transformers and with tritonpack.

    Exit code: 0 exact, 1 refused, 2 a command line that is wrong, 3 anything else.
    """
    if importlib.util.find_spec("transformers") is None:
        raise typer.BadParameter("the check needs transformers, which isn't installed; pip install transformers")
    try:
        require_path(model)  # before transformers is imported, which takes seconds
        from tritonpack.cli.check import examine

        code = examine(model, weights=weights, device=device, trust_remote_code=trust_remote_code, path=json)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(code)


@app.command()
def plan(
    lengths: Annotated[
        Path,
        typer.Argument(
            metavar="LENGTHS",
            help="Tokens of each document: whole numbers or lists of token ids in a .json, .jsonl, .npy, .parquet, "
            ".csv or .txt file.",
        ),
    ],
    capacity: Annotated[int, typer.Option(min=1, help="Tokens that one GPU takes per step.", show_default=False)],
    ranks: Annotated[int, typer.Option(min=1, help="GPUs (data-parallel processes).")] = 1,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs to plan; the table has their means.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Decides the order of documents.")] = 0,
    objective: Annotated[
        Objective,
        typer.Option(
            help="What ranks of a step have alike: squared lengths (attention's load), tokens, or the model's cost."
        ),
    ] = "quadratic",
    tail: Annotated[
        Tail,
        typer.Option(help="What doesn't fill a last step: drop it, spread it over all steps, or keep a partial step."),
    ] = "drop",
    lookahead: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="What a step is offered beyond what it holds, a share of its tokens."),
    ] = 0.01,
    steps_together: Annotated[
        int, typer.Option(min=1, help="Steps planned at once: fuller rows where a step holds few documents.")
    ] = 1,
    overlong: Annotated[Overlong, typer.Option(help="What to do with documents longer than --capacity.")] = "error",
    model: Annotated[
        str | None,
        typer.Option(
            help="Whose cost counts: a model on the Hub, a folder, a config.json.", show_default="a Llama of 8B"
        ),
    ] = None,
    column: Annotated[str | None, typer.Option(help="Where the file has several: the one with the lengths.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the picture, or its name, ending in .png.")] = Path("plan-out"),
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the numbers there as well; - is standard output.")
    ] = None,
) -> None:
    """Show how full and how even packed batches of your documents are, beside padded and simpler ones; draw a picture.

    Example: tritonpack plan lengths.json --capacity 32768 --ranks 8
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("the plan needs matplotlib, which isn't installed; pip install 'tritonpack[plots]'")
    if model is not None and importlib.util.find_spec("transformers") is None:
        raise typer.BadParameter("--model needs transformers, which isn't installed; pip install transformers")
    from tritonpack.cli.plan import Options, as_options, examine

    options = Options(
        path=lengths,
        column=column,
        capacity=capacity,
        num_ranks=ranks,
        epochs=epochs,
        seed=seed,
        objective=objective,
        tail=tail,
        lookahead=lookahead,
        steps_together=steps_together,
        overlong=overlong,
        model=model,
        out=out,
        json=json,
    )
    try:
        examine(options)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(as_options(str(error))) from error


@app.command()
def doctor(
    json: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the findings there as well.")] = None,
) -> None:
    """Show versions and the device, and try everything that can run here: attention, models, packing, ...

    Exit code: 0 if all that can run is right, 1 if something that should work doesn't.
    """
    from tritonpack.cli.doctor import examine

    try:
        right = examine(json)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    if not right:
        raise typer.Exit(1)


@app.command()
def bench(
    tokens: Annotated[
        int | None, typer.Option(min=16, help="Tokens of a batch.", show_default="2048, 16384 on a GPU")
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option(
            min=1, help="Query heads; a quarter as many key heads, if that divides.", show_default="8, 32 on a GPU"
        ),
    ] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, show_default="64, 128 on a GPU")] = None,
    dtype: Annotated[BenchDType, typer.Option(help="auto: float32, bfloat16 on a GPU.")] = "auto",
    device: Annotated[Device, typer.Option(help="auto: the GPU where there is one.")] = "auto",
    repeats: Annotated[
        int | None, typer.Option(min=1, help="How often each call is timed.", show_default="5, 20 on a GPU")
    ] = None,
    threads: Annotated[
        int, typer.Option(min=1, help="CPU threads; one is disturbed the least by whatever else runs.")
    ] = 1,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the CSV and the picture.")] = Path("bench-out"),
) -> None:
    """Time attention on this machine beside sdpa, padded and with a dense mask, after checking what each computes.

    On a GPU torch's varlen_attn and FlexAttention take part. Exit code: 1 if our own results were wrong.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("the bench needs matplotlib, which isn't installed; pip install 'tritonpack[plots]'")
    from tritonpack.cli.bench.command import Options, examine

    options = Options(tokens, heads, head_dim, dtype, device, repeats, threads, out)
    try:
        right = examine(options)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    if not right:
        raise typer.Exit(1)


def run(arguments: list[str]) -> int:
    """Run one command line.

    Returns:
        The exit code: 0, 1 for what failed, 2 for what was asked wrongly, 130 for Ctrl-C, 141 for a closed pipe (as
        shells count signals).
    """
    try:
        code = app(arguments or ["--help"], prog_name="tritonpack", standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except (_UsageError, BrokenPipeError) as error:
        if isinstance(error, BrokenPipeError) or isinstance(error.__cause__, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more when it ends
            return 141
        print(f"error: {error.format_message()}", file=sys.stderr)
        return 2
    return code or 0
