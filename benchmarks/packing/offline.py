"""Time and peak memory of `tritonpack pack` on generated documents.

    python -m benchmarks.packing.offline --documents 10000000 --folder /data/offline

It writes documents of log-normal lengths to the folder, packs them in a process of their own, checks that every token
is in the rows, prints the time and the memory of the largest process, and removes what it wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import ipc

_SHARD = 250_000  # documents of a generated file
_VOCABULARY = 32_000


def generate(folder: Path, documents: int, mean: int, longest: int, seed: int) -> tuple[int, int]:
    """Write documents of log-normal lengths with random tokens; returns the number of tokens and their sum."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    tokens = total = 0
    for number, start in enumerate(range(0, documents, _SHARD)):
        count = min(_SHARD, documents - start)
        lengths = np.clip(generator.lognormal(np.log(mean) - 0.5, 1.0, count), 1, longest).astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        values = generator.integers(1, _VOCABULARY, offsets[-1], dtype=np.int32)
        tokens, total = tokens + len(values), total + int(values.sum(dtype=np.int64))
        table = pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))})
        path = folder / f"data-{number:05d}.arrow"
        with pa.OSFile(str(path), "wb") as file, ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=1000)
    return tokens, total


def check(out: Path, tokens: int, total: int) -> None:
    """AssertionError unless the rows hold every token."""
    found = found_total = 0
    for path in sorted(out.glob("data-*.arrow")):
        with pa.memory_map(str(path)) as file:
            for batch in ipc.open_stream(file):
                values = batch.column("input_ids").flatten().to_numpy()
                found, found_total = found + len(values), found_total + int(values.sum(dtype=np.int64))
                assert batch.column("seq_lengths").flatten().to_numpy().sum() == len(values)
    assert (found, found_total) == (tokens, total)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Generate, pack, check, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--mean", type=int, default=150, help="mean tokens of a document")
    parser.add_argument("--capacity", type=int, default=32_768)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--folder", type=Path, required=True, help="a new folder; about 40 bytes a token for a while")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    if given.folder.exists():
        parser.error(f"{given.folder} exists; name a new folder")
    source, out = given.folder / "documents", given.folder / "rows"
    try:
        began = time.perf_counter()
        tokens, total = generate(source, given.documents, given.mean, given.capacity, given.seed)
        print(f"{given.documents:,} documents, {tokens:,} tokens, made in {time.perf_counter() - began:.0f} s")
        command = [sys.executable, "-m", "tritonpack", "pack", source, "--out", out, "--json", given.folder / "numbers"]
        options = [f"--capacity={given.capacity}", f"--jobs={given.jobs}"]
        began = time.perf_counter()
        subprocess.run([*map(str, command), *options], check=True)
        seconds, peak = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        found = json.loads((given.folder / "numbers").read_text())
        check(out, tokens, total)
    finally:
        shutil.rmtree(given.folder, ignore_errors=True)
    print(f"{seconds:.1f} s; peak {peak:,.0f} MiB; load {os.getloadavg()[0]:.1f}")
    return found


if __name__ == "__main__":
    main()
