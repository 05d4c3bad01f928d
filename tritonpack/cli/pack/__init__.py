"""`tritonpack pack`: packs documents into a dataset of rows on disk; prints what became of them, draws a picture."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
from rich.console import Console

from tritonpack.cli.files import STANDARD_OUTPUT, require_writable, write_json
from tritonpack.cli.pack.documents import open_documents
from tritonpack.cli.words import count, percent
from tritonpack.errors import OutputError
from tritonpack.packing.bins import Algorithm
from tritonpack.packing.columns import LEARNED
from tritonpack.packing.lengths import Overlong, OverlongReport
from tritonpack.packing.rows import choose_columns, packed_dataset

PICTURE = "packing.png"
_CACHE = ".packing"  # a folder of the rows that holds what is done, until they are complete

# Python arguments in error messages of tritonpack.packing, such as overlong='split' or columns=input_ids,labels.
_ARGUMENTS = re.compile(r"\b(overlong|columns|split|out)=('?[\w./-]+(?:,\w+)*'?(?:(?:, | or )'\w+')*)")


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
        ValueError: see `pack_dataset`, or documents or an output can't be read or written.
        OSError: a result can't be written.
    """
    from tritonpack.cli.pack.figure import draw

    require_writable(options.json, "--json")
    console = Console(stderr=options.json == STANDARD_OUTPUT)
    if not console.is_terminal:
        datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it also logs what it raises
    found = _pack(options)
    console.print(*_summary(found), sep="\n", markup=False, highlight=False, soft_wrap=True)
    if options.json is not None:
        write_json(options.json, {"options": asdict(options), **found})
    picture = options.out / PICTURE
    draw(picture, found)
    console.print(f"Picture: {picture}", markup=False, highlight=False, soft_wrap=True)


def _pack(options: Options) -> dict[str, Any]:
    """Write the rows; the numbers of the summary."""
    out, cache = options.out, options.out / _CACHE
    if out.resolve().is_relative_to(Path(options.dataset).resolve()):
        raise ValueError(f"out={out} lies in {options.dataset}, whose files are the documents; name a folder outside.")
    if out.exists() and not cache.exists() and any(out.iterdir()):
        raise ValueError(f"out={out} isn't empty; name another folder, or remove it.")
    new = [each for each in (out, *out.parents) if not each.exists()]
    cache.mkdir(parents=True, exist_ok=True)
    columns = None if options.columns is None else [name.strip() for name in options.columns.split(",")]
    try:
        documents, place = open_documents(options.dataset, options.split, cache)
        rows, packing = packed_dataset(
            documents, options.capacity, overlong=options.overlong, algorithm=options.algorithm,
            max_items=options.max_items, columns=columns, jobs=options.jobs, folder=cache, place=place,
        )  # fmt: skip
        names, total = documents.column_names, len(documents)
        del documents  # whose files are mapped into memory
        if options.shuffle:
            rows = rows.shuffle(seed=options.seed, keep_in_memory=True)
        for file in out.glob("data-*.arrow"):  # of a process that was killed
            file.unlink()
        processes = None if options.jobs == 1 else min(options.jobs, len(rows))
        rows.save_to_disk(str(out), max_shard_size=options.shard_mib * 2**20, num_proc=processes)
    except ValueError:
        shutil.rmtree(cache)
        with suppress(OSError):  # not empty, by another process
            for each in new:
                each.rmdir()
        raise
    except OSError as error:
        reason = f"{error.strerror or error}; free space in {out} and run the same command again"
        raise OutputError(error.errno, reason, str(out)) from error
    shutil.rmtree(cache)
    read, kept = choose_columns(names, columns)
    learned = [name for name in read if name in LEARNED and name not in kept.values()]
    return {
        "path": out,
        "documents": total,
        "tokens": packing.num_tokens + packing.report.tokens_lost,
        "rows": packing.num_bins,
        "row_documents": len(packing.items),
        "row_tokens": packing.num_tokens,
        "capacity": packing.capacity,
        "lower_bound": packing.lower_bound,
        "efficiency": packing.efficiency,
        "report": asdict(packing.report),
        "columns": rows.column_names,
        "labels_from": learned,
        "left_out": [name for name in names if name not in (*kept.values(), *learned)],
    }


def _summary(found: dict[str, Any]) -> Iterator[str]:
    """What became of the documents, in sentences."""
    report = OverlongReport(**found["report"])
    yield f"{count(found['documents'], 'document')} of {count(found['tokens'], 'token')}."
    if report.documents:
        yield f"{report}."
    pieces = "" if report.policy != "split" or not report.documents else " and pieces"
    holds = "holds" if found["rows"] == 1 else "hold"
    yield (
        f"{count(found['rows'], 'row')} of {count(found['capacity'], 'token')} {holds} "
        f"{count(found['row_documents'], 'document')}{pieces} of {count(found['row_tokens'], 'token')}: "
        f"{percent(found['efficiency'])} full. No packing needs fewer than {count(found['lower_bound'], 'row')}."
    )
    yield f"Columns: {', '.join(found['columns'])}."
    if found["labels_from"]:
        yield f"Labels are made from {' and '.join(found['labels_from'])}, which the rows don't keep."
    if found["left_out"]:
        yield f"Left out: {', '.join(found['left_out'])}."
    yield f"datasets.load_from_disk({str(found['path'])!r}) loads the rows."


def as_options(message: str) -> str:
    """An error message of tritonpack.packing with options in place of arguments: --overlong split."""
    return _ARGUMENTS.sub(lambda found: f"--{found[1]} {found[2].replace(chr(39), '')}", message)
