"""How even layouts are, and how long exchanges would take, on batches of drawn lengths. No time here is measured.

    python -m benchmarks.parallel.simulate [--lengths FILE.json] [--tokens 32768 131072 1048576] [--ranks 4 8 16 ...]

Imbalance is exact: the visible pairs of the rank with most of them over the mean; blocks are those of 128 x 128 pairs
that the rank with most visits, over its even share of the undivided batch's. Times are `tritonpack.parallel.plan`'s
predictions for the shape of a Llama-3-8B (32 layers, 32 and 8 heads of 128) in bfloat16: attention and its exchange,
forward and backward, at 400 TFLOP/s and two bandwidths.

Takes five minutes on one core. Writes benchmarks/results/layout-imbalance.csv and exchange-times.csv, which the
picture is drawn from:

    python -m benchmarks.parallel.draw
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np

from tests.lengths import fill, lookalike
from tritonpack import BlockDiagonalMask
from tritonpack.parallel.exchange import Exchange, key_heads_per_step, refusal
from tritonpack.parallel.layouts import LayoutName, divide
from tritonpack.parallel.planning import LATENCY
from tritonpack.parallel.prediction import Kind, Model, Shards
from tritonpack.parallel.shape import AttentionShape

LLAMA = SimpleNamespace(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
BANDWIDTHS = {"NVLink, 350 GB/s": 350e9, "network, 45 GB/s": 45e9}
FLOPS = 400e12
RESULTS = Path(__file__).parents[1] / "results"

# Lengths in the order in which packs take them; log-normal by median and sigma, as in supervised fine-tuning data, and
# with a long tail.
LOG_NORMAL = {"short (median 700)": (700, 1.0), "long tail (median 2,000)": (2000, 1.6)}
CONVERSATIONS, ONE = "conversations (mean 1,550)", "one document"


def packs(tokens: int, count: int, conversations: np.ndarray) -> Iterator[tuple[str, list[int]]]:
    """Names of distributions with lengths that sum to `tokens`, `count` times each but for the single document."""
    for seed in range(count):
        rng = np.random.default_rng(seed)
        for name, (median, sigma) in LOG_NORMAL.items():
            yield name, fill(np.maximum(rng.lognormal(np.log(median), sigma, tokens // 64), 1), tokens)
        yield (
            CONVERSATIONS,
            fill(rng.permutation(np.tile(conversations, -(-tokens // int(conversations.sum())))), tokens),
        )
    yield ONE, [tokens]


def simulate(tokens: int, ranks: int, count: int, conversations: np.ndarray) -> tuple[list[dict], list[dict]]:
    """Rows of both tables for one size of batch and group."""
    shape = AttentionShape.from_config(LLAMA)
    models = {
        name: Model(shape, bandwidth, FLOPS, LATENCY, key_heads_per_step(None, shape.kv_heads), checkpointing=False)
        for name, bandwidth in BANDWIDTHS.items()
    }
    possible = [name for name in get_args(Exchange) if not refusal(name, shape.heads, ranks, alibi=False)]
    pairs, blocks, times = (defaultdict[Any, list[float]](list) for _ in range(3))
    for name, lengths in packs(tokens, count, conversations):
        kinds = [Kind.of(BlockDiagonalMask.from_seqlens(lengths), shape.layers)]
        for layout in get_args(LayoutName):
            shards = Shards.of(layout, divide(layout, kinds[0].mask, ranks), kinds)
            work = shards.tiles[0]
            pairs[name, layout].append(work.pairs.max() * ranks / work.pairs.sum())
            blocks[name, layout].append(work.blocks().max() * ranks / kinds[0].tiles.blocks().sum())
            for network, model in models.items():
                for exchange in possible:
                    predicted = model.predict(exchange, shards, kinds)
                    times[name, network, f"{exchange} {layout}"].append(1e3 * predicted.seconds)
    about: dict[str, Any] = {"tokens": tokens, "ranks": ranks}
    imbalance = [
        {
            **about,
            "lengths": name,
            "packs": len(drawn),
            "layout": layout,
            "pairs_mean": _short(np.mean(drawn)),
            "pairs_worst": _short(max(drawn)),
            "blocks_mean": _short(np.mean(blocks[name, layout])),
        }
        for (name, layout), drawn in pairs.items()
    ]
    schemes = [f"{exchange} {layout}" for exchange in get_args(Exchange) for layout in get_args(LayoutName)]
    predicted_ms = []
    for name in (*LOG_NORMAL, CONVERSATIONS, ONE):
        for network in BANDWIDTHS:
            means = {scheme: times[name, network, scheme] for scheme in schemes}
            cells = {scheme: _short(np.mean(drawn)) if drawn else "" for scheme, drawn in means.items()}
            predicted_ms.append({**about, "lengths": name, "network": network, **cells})
    return imbalance, predicted_ms


def _short(value: Any) -> str:
    return f"{value:.4g}"


def print_imbalance(rows: list[dict]) -> None:
    """A line per lengths, tokens and ranks."""
    print(
        "\nmax/mean visible pairs (worst pack); the busiest rank's blocks over an even share of the undivided batch's\n"
    )
    layouts = get_args(LayoutName)
    print("| lengths | tokens | ranks | " + " | ".join(layouts) + " |\n|---|---|---|" + "---|" * len(layouts))
    for first in range(0, len(rows), len(layouts)):
        group = rows[first : first + len(layouts)]
        cells = [
            f"{float(row['pairs_mean']):.2f} ({float(row['pairs_worst']):.2f}); {float(row['blocks_mean']):.2f}"
            for row in group
        ]
        head = group[0]
        print(f"| {head['lengths']} | {head['tokens']:,} | {head['ranks']:,} | " + " | ".join(cells) + " |")


def print_times(rows: list[dict]) -> None:
    """A line per lengths, tokens, ranks and network: each exchange with its best layout."""
    exchanges = get_args(Exchange)
    print("\npredicted (not measured) ms of attention and its exchange in a step, each exchange with its best layout\n")
    print(
        "| lengths | tokens | ranks | network | "
        + " | ".join(exchanges)
        + " |\n|---|---|---|---|"
        + "---|" * len(exchanges)
    )
    for row in rows:
        cells = []
        for exchange in exchanges:
            found = [(float(row[key]), key.split()[1]) for key in row if key.startswith(f"{exchange} ") and row[key]]
            cells.append("{:,.1f} {}".format(*min(found, key=lambda pair: pair[0])) if found else "can't")
        print(
            f"| {row['lengths']} | {row['tokens']:,} | {row['ranks']:,} | {row['network']} | "
            + " | ".join(cells)
            + " |"
        )


def write(path: Path, rows: list[dict]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, help="a JSON list of token counts in place of the look-alike")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072, 1048576])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16, 64, 256, 1024])
    parser.add_argument("--packs", type=int, default=40, help="per distribution; a tenth for large batches and groups")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    conversations = lookalike()
    if options.lengths is not None:
        conversations = np.array(json.loads(options.lengths.read_text(encoding="utf-8")), dtype=np.int64)
    imbalance: list[dict] = []
    times: list[dict] = []
    for tokens in options.tokens:
        for ranks in options.ranks:
            small = tokens * ranks <= 131072 * 64
            rows = simulate(tokens, ranks, options.packs if small else -(-options.packs // 10), conversations)
            imbalance += rows[0]
            times += rows[1]
    print_imbalance(imbalance)
    print_times(times)
    options.out.mkdir(parents=True, exist_ok=True)
    write(options.out / "layout-imbalance.csv", imbalance)
    write(options.out / "exchange-times.csv", times)


if __name__ == "__main__":
    main()
