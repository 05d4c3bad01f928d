"""`tritonpack pack`: packs documents into a dataset of rows on disk, and prints what became of them."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets

from tritonpack.cli.documents import open_documents
from tritonpack.cli.machine import console_beside, percent, print_grid, require_writable, write_json
from tritonpack.errors import OutputError
from tritonpack.packing.collator import LEARNED
from tritonpack.packing.lengths import count
from tritonpack.packing.rows import choose_columns, packed_dataset

_SHARD_BYTES = 128 * 2**20  # of a file of rows, about
_CACHE = ".packing"  # a folder of the rows that holds what is done, until they are complete


def examine(
    *, dataset: str, out: Path, split: str | None, columns: str | None, seed: int, shuffle: bool, json: Path | None,
    **options: Any,
) -> None:  # fmt: skip
    """Pack, print the summary, write it as JSON. The arguments are the command's options."""
    given = {**locals(), **options}
    del given["options"]
    require_writable(json)
    console = console_beside(json)
    if not console.is_terminal:
        datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it also logs what it raises
    cache = out / _CACHE
    if out.resolve().is_relative_to(Path(dataset).resolve()):
        raise ValueError(f"out={out} lies in {dataset}, whose files are the documents; name a folder outside.")
    if out.exists() and not cache.exists() and any(out.iterdir()):
        raise ValueError(f"out={out} isn't empty; name another folder, or remove it.")
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out} can't be made: {error.strerror}; name another folder") from error
    asked = None if columns is None else [name.strip() for name in columns.split(",")]
    try:
        documents, place = open_documents(dataset, split, cache)
        rows, packing = packed_dataset(documents, columns=asked, max_items=None, folder=cache, place=place, **options)
        names, total = documents.column_names, len(documents)
        del documents  # whose files are mapped into memory
        if shuffle:
            rows = rows.shuffle(seed=seed, keep_in_memory=True)
        for file in out.glob("data-*.arrow"):  # of a process that was killed
            file.unlink()
        processes = None if options["jobs"] == 1 else min(options["jobs"], len(rows))
        rows.save_to_disk(str(out), max_shard_size=_SHARD_BYTES, num_proc=processes)
    except ValueError:
        shutil.rmtree(cache)
        with suppress(OSError):  # it holds more
            out.rmdir()
        raise
    except OSError as error:
        reason = f"{error.strerror or error}; free space in {out} and run the same command again"
        raise OutputError(error.errno, reason, str(out)) from error
    shutil.rmtree(cache)
    read, kept = choose_columns(names, asked)
    learned = [name for name in read if name in LEARNED and name not in kept]
    left_out = [name for name in names if name not in (*kept, *learned)]
    report, tokens = packing.report, packing.num_tokens + packing.report.tokens_lost
    print_grid(console, {
        "documents": f"{total:,} of {count(tokens, 'token')}",
        "longer": str(report) if report.documents else None,
        "rows": f"{packing.num_bins:,} of {count(packing.capacity, 'token')}, {percent(packing.efficiency)}% full; no "
        f"packing needs fewer than {packing.lower_bound:,}",
        "columns": ", ".join(rows.column_names),
        "labels are made from": ", ".join(learned),
        "left out": ", ".join(left_out),
        "to load the rows": f"datasets.load_from_disk({str(out)!r})",
    })  # fmt: skip
    write_json(json, {
        "options": given, "path": out, "documents": total, "tokens": tokens, "rows": packing.num_bins,
        "row_documents": len(packing.items), "row_tokens": packing.num_tokens, "capacity": packing.capacity,
        "lower_bound": packing.lower_bound, "efficiency": packing.efficiency, "report": asdict(report),
        "columns": rows.column_names, "labels_from": learned, "left_out": left_out,
    })  # fmt: skip
