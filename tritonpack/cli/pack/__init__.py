"""`tritonpack pack`: packs documents into a dataset of rows on disk; prints what became of them, draws a picture."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tritonpack.cli.files import STANDARD_OUTPUT, require_writable, write_json
from tritonpack.cli.words import count, percent
from tritonpack.packing.bins import Algorithm
from tritonpack.packing.lengths import Overlong
from tritonpack.packing.offline import PackedFolder, pack_to_disk

PICTURE = "packing.png"

# Python arguments in error messages of tritonpack.packing, such as overlong='split' or columns=input_ids,labels.
_ARGUMENTS = re.compile(r"\b(overlong|columns|split|out)=('?[\w./-]+(?:,\w+)*'?(?:(?:, | or )'\w+')*)")
_STEPS = {
    "copy": "copying the stream",
    "measure": "checking documents",
    "plan": "planning rows",
    "sort": "sorting documents",
    "write": "writing rows",
}


@dataclass(frozen=True)
class Options:
    """The options of the command line; `shard_mib` is in MiB."""

    dataset: str
    capacity: int
    out: Path
    split: str | None
    columns: str | None
    overlong: Overlong
    algorithm: Algorithm
    max_items: int | None
    seed: int
    shuffle: bool
    jobs: int
    shard_mib: int
    json: Path | None


def examine(options: Options) -> None:
    """Pack, print the summary, write it as JSON, draw the picture.

    Raises:
        ValueError: see `pack_to_disk`, or an output can't be written.
        OSError: a result can't be written.
    """
    from tritonpack.cli.pack.figure import draw

    require_writable(options.json, "--json")
    console = Console(stderr=options.json == STANDARD_OUTPUT)
    with _progress(console) as progress:
        packed = pack_to_disk(
            options.dataset,
            options.capacity,
            options.out,
            split=options.split,
            columns=None if options.columns is None else [name.strip() for name in options.columns.split(",")],
            overlong=options.overlong,
            algorithm=options.algorithm,
            max_items=options.max_items,
            seed=options.seed if options.shuffle else None,
            jobs=options.jobs,
            shard_bytes=options.shard_mib * 2**20,
            progress=progress,
        )
    console.print(*summary(packed), sep="\n", markup=False, highlight=False, soft_wrap=True)
    if options.json is not None:
        write_json(options.json, {"options": asdict(options), **asdict(packed), "efficiency": packed.efficiency})
    picture = options.out / PICTURE
    draw(picture, packed)
    console.print(f"Picture: {picture}", markup=False, highlight=False, soft_wrap=True)


def summary(packed: PackedFolder) -> Iterator[str]:
    """What became of the documents, in sentences."""
    report = packed.report
    yield f"{count(packed.documents, 'document')} of {count(packed.tokens, 'token')}."
    if report.documents:
        yield f"{report}."
    pieces = "" if report.policy != "split" or not report.documents else " and pieces"
    holds = "holds" if packed.rows == 1 else "hold"
    yield (
        f"{count(packed.rows, 'row')} of {count(packed.capacity, 'token')} {holds} "
        f"{count(packed.row_documents, 'document')}{pieces} of {count(packed.row_tokens, 'token')}: "
        f"{percent(packed.efficiency)} full. No packing needs fewer than {count(packed.lower_bound, 'row')}."
    )
    yield f"Columns: {', '.join(packed.columns)}."
    if packed.labels_from:
        yield f"Labels are made from {' and '.join(packed.labels_from)}, which the rows don't keep."
    if packed.left_out:
        yield f"Left out: {', '.join(packed.left_out)}."
    yield f"datasets.load_from_disk({str(packed.path)!r}) loads the rows."


def as_options(message: str) -> str:
    """An error message of tritonpack.packing with options in place of arguments: --overlong split."""
    return _ARGUMENTS.sub(lambda found: f"--{found[1]} {found[2].replace(chr(39), '')}", message)


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each step, on a terminal."""
    columns: Sequence[Any] = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def progress(step: str, done: int, parts: int) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(_STEPS[step], total=parts)
            bars.update(tasks[step], completed=done, total=parts)

        yield progress
