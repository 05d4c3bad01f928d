"""The commands and their options. The work of each command is done in a module that is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

import tritonpack

app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]}, pretty_exceptions_enable=False)


def _whole(least: int, most: int, *names: str, help: str) -> Any:
    """An option that takes whole numbers from `least` to `most`."""

    def parse(text: Any) -> int:
        if str(text).removeprefix("-").isdecimal() and least <= int(text) <= most:
            return int(text)
        raise typer.BadParameter(f"{text} is no whole number from {least} to {most}.")

    return Option(*names, parser=parse, metavar=f"{least} to {most}", help=help)


# Options that several commands have.
DeviceOption = Annotated[Literal["auto", "cpu", "cuda"], Option(help="auto: the GPU where there is one.")]
JsonOption = Annotated[Path | None, Option(dir_okay=False, help="Write results as JSON, too; - is standard output.")]
CapacityOption = Annotated[int, _whole(1, 2**30, help="Tokens of a row, which one GPU takes per step.")]
SeedOption = Annotated[int, _whole(0, 2**63 - 1, help="Decides the random order.")]
OverlongOption = Annotated[Literal["error", "truncate", "split", "drop"], Option(help="How to treat longer documents.")]


@app.callback(invoke_without_command=True)
def common(version: Annotated[bool, Option("--version", help="Print the version and stop.")] = False) -> None:
    """Packed (padding-free) training of language models."""
    if version:
        typer.echo(f"tritonpack {tritonpack.__version__}")
        raise typer.Exit


@app.command()
def check_backend(
    function: Annotated[str, Argument(metavar="MODULE:FUNCTION", show_default=False)] = "",
    device: DeviceOption = "auto",
    dtype: Annotated[list[str] | None, Option(help="float32, float16 or bfloat16, of q, k and v; repeatable.",
        show_default="float32 and bfloat16, bfloat16 on a GPU")] = None,
    only: Annotated[list[str] | None, Option(help="Checks by pattern, such as 'backward/*'; repeatable.")] = None,
    skip: Annotated[list[str] | None, Option(help="Checks to leave out, by pattern; repeatable.")] = None,
    json: JsonOption = None,
    list_: Annotated[bool, Option("--list", help="Print the names of the checks and stop.")] = False,
) -> None:  # fmt: skip
    """Check a function of flash_attn_varlen_func's shape: exactness, isolation, slack, empty documents, ...

    Exit code: 0 if a check passes and none fails, 1 if one fails or none passes.
    """
    from tritonpack.cli.check_backend import conformance, examine

    if list_:
        typer.echo("\n".join(one.name for one in conformance.checks(only or ["*"], skip or [])))
        raise typer.Exit
    raise typer.Exit(int(not examine(function, device, dtype or [], only or ["*"], skip or [], json)))


@app.command()
def check(
    model: Annotated[str, Argument(metavar="MODEL", help="A model on the Hub, a folder, or a config.json.")],
    weights: Annotated[bool, Option("--weights", help="Load the model on --device, and pack documents on it.")] = False,
    device: DeviceOption = "auto",
    trust_remote_code: Annotated[bool, Option("--trust-remote-code", help="Run the model's own code.")] = False,
    json: JsonOption = None,
) -> None:  # fmt: skip
    """Say whether packing a model is exact, refused, or unknown until its weights are loaded.

    Exit code: 0 exact, 1 refused, 2 a wrong command line, 3 a leak, or unknown.
    """
    options = locals()
    from tritonpack.cli.check import examine

    raise typer.Exit(examine(**options))


@app.command()
def plan(
    path: Annotated[Path, Argument(metavar="LENGTHS", exists=True, dir_okay=False, readable=True, help="Tokens of each "
        "document: whole numbers in a .txt or .npy file, or these or lists of token ids in .json, .jsonl, .parquet, "
        ".csv.")],
    capacity: CapacityOption,
    num_ranks: Annotated[int, _whole(1, 2**16, "--ranks", help="GPUs (data-parallel processes).")] = 1,
    seed: SeedOption = 0,
    objective: Annotated[Literal["quadratic", "linear"], Option(help="What the ranks of a step share evenly: "
        "squared lengths (attention's load) or tokens.")] = "quadratic",
    tail: Annotated[Literal["drop", "spread", "keep"], Option(help="Documents left for the last step: drop them, "
        "spread them over all steps, or keep a partial step.")] = "drop",
    overlong: OverlongOption = "error",
    column: Annotated[str | None, Option(help="The column with the lengths, if the file has several.")] = None,
    json: JsonOption = None,
) -> None:  # fmt: skip
    """Show how full and how even packed batches of your documents are, compared with padding and simpler ways.

    Example: tritonpack plan lengths.json --capacity 32768 --ranks 8
    """
    options = locals()
    from tritonpack.cli.plan import examine

    examine(**options)


@app.command()
def pack(
    dataset: Annotated[str, Argument(metavar="DATASET", help="A folder of save_to_disk; or a file, a folder or a "
        "pattern of .arrow, .parquet or .jsonl files.")],
    capacity: CapacityOption,
    out: Annotated[Path, Option(file_okay=False, help="Folder for the rows: new, empty, or of a command that was "
        "interrupted.")],
    split: Annotated[str | None, Option(help="The split, of a dataset with several.")] = None,
    columns: Annotated[str | None, Option(show_default="all", help="Columns with one value per token that rows keep, "
        "such as input_ids,labels.")] = None,
    overlong: OverlongOption = "error",
    algorithm: Annotated[Literal["best_fit_decreasing", "best_fit", "next_fit"], Option(help="How documents are "
        "chosen: best_fit_decreasing makes the fewest rows, next_fit keeps their order.")] = "best_fit_decreasing",
    seed: SeedOption = 0,
    shuffle: Annotated[bool, Option(help="Shuffle the rows.")] = True,
    jobs: Annotated[int, _whole(1, 1024, help="Processes.")] = 1,
    json: JsonOption = None,
) -> None:  # fmt: skip
    """Pack documents, which needn't fit in memory, into a dataset of rows on disk; print what became of them.

    After an interruption the same command goes on after what its processes had finished.

    Example: tritonpack pack data/documents --capacity 32768 --out rows --jobs 8
    """
    options = locals()
    from tritonpack.cli.pack import examine

    examine(**options)


@app.command()
def doctor(json: JsonOption = None) -> None:
    """Show versions and the device, and try everything that can run here: attention, models, packing, ...

    Exit code: 0 if all that can run is right, 1 if something that should work doesn't.
    """
    from tritonpack.cli.doctor import examine

    raise typer.Exit(int(not examine(json)))
