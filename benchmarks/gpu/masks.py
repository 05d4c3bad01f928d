"""Time on a GPU how masks are built and written out, by device events, after a check of their values.

    python3 -m benchmarks.gpu.masks [--out DIR] [--tokens 131072] [--dense-tokens 16384]

Dense masks (of --dense-tokens) are compared with a plain fill of the same number of bytes, and FlexAttention's block
mask with the one that torch builds from a mask function. Rows are appended to DIR/masks.csv.
`--device cpu` tries the program where there is no GPU; its times mean nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask

from benchmarks.harness.ledger import RESULTS, Ledger, environment
from benchmarks.harness.registry import OURS, Call, Case
from benchmarks.harness.run import Budget, run, table
from tests.lengths import distributions
from tests.trees import tree_batches
from tritonpack import BlockDiagonalMask
from tritonpack.backends.tile_table import Cut, tile_tables
from tritonpack.testing.cases import parents_of

BUILT = (
    "from_cu_seqlens", "from_position_ids", "from_segment_ids", "from_tree", "from_tree, one chain", "transpose",
    "tile_tables",
)  # fmt: skip
WRITTEN = ("bool", "additive bfloat16", "block mask")


def cases(device: torch.device, tokens: int, dense_tokens: int) -> list[Case]:
    """Yield the measured cases. Masks of `dense_tokens` have a memory that is quadratic in tokens."""
    building = cache(partial(builders, tokens, device))
    writing = cache(partial(writers, dense_tokens, device))

    def built(form: str) -> dict[str, Any]:
        return {OURS: building()[form]}

    def written(form: str) -> dict[str, Any]:
        return {**writing()[form]}

    names = (f"masks, {tokens} tokens", f"masks written out, {dense_tokens} tokens")
    return [
        Case(__name__, [name], {"mask": form}, partial(make, form))
        for name, make, forms in zip(names, (built, written), (BUILT, WRITTEN), strict=True)
        for form in forms
    ]


def builders(tokens: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Functions that build a mask, its transpose and its tile table, as a training step does once."""
    lengths = torch.tensor(distributions(tokens)["stdlib"])
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(device, torch.int32)
    positions = torch.cat([torch.arange(int(n)) for n in lengths]).to(device)
    segments = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), lengths).to(device)[None]
    agents = torch.tensor(parents_of(*tree_batches()["agent, 6 turns"] * 8)[:tokens])
    chain = torch.arange(-1, tokens - 1)
    rows = BlockDiagonalMask.from_seqlens(lengths.tolist())
    made = {
        "from_cu_seqlens": (partial(BlockDiagonalMask.from_cu_seqlens, cu_seqlens, total_q=tokens), rows),
        "from_position_ids": (partial(BlockDiagonalMask.from_position_ids, positions), rows),
        "from_segment_ids": (partial(BlockDiagonalMask.from_segment_ids, segments), rows),
        "from_tree": (partial(BlockDiagonalMask.from_tree, agents.to(device)), BlockDiagonalMask.from_tree(agents)),
        "from_tree, one chain": (
            partial(BlockDiagonalMask.from_tree, chain.to(device)),
            BlockDiagonalMask.from_tree(chain),
        ),
    }
    for name, (make, expected) in made.items():
        mask = make()
        for field in ("key_start", "key_stop", "diagonal", *["query_stop"] * mask.is_tree):
            assert torch.equal(getattr(mask, field).cpu(), getattr(expected, field)), f"{name}: {field}"
    make = made["from_cu_seqlens"][0]
    cuts = Cut(32, 64, 128), Cut(128, of_keys=True), Cut(16, 64, 64)
    return {
        **{name: make for name, (make, _) in made.items()},
        "transpose": lambda: make().transpose(),
        "tile_tables": lambda: tile_tables(make(), *cuts),
    }


def writers(tokens: int, device: torch.device) -> dict[str, dict[str, Call]]:
    """Calls that write masks in the forms of other kernels, ours and others."""
    lengths = distributions(tokens)["stdlib"]
    mask = BlockDiagonalMask.from_seqlens(lengths, device=device)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
    expected = BlockDiagonalMask.from_seqlens(lengths).to_dense().to(device)
    assert torch.equal(mask.to_dense(), expected)

    def causal_document(b: object, h: object, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (document[q] == document[k]) & (q >= k)

    target = torch.empty(tokens, tokens, dtype=torch.bfloat16, device=device)
    given, pairs = (causal_document, None, None, tokens, tokens, device), tokens**2
    block_masks = {OURS: Call(mask.to_block_mask), "create_block_mask": Call(partial(create_block_mask, *given))}
    if device.type == "cuda":
        block_masks["create_block_mask, compiled"] = Call(partial(torch.compile(create_block_mask), *given))
    additive = Call(partial(mask.to_dense, torch.bfloat16, additive=True), nbytes=2 * pairs)
    return {
        "bool": {OURS: Call(mask.to_dense, nbytes=pairs)},
        "additive bfloat16": {OURS: additive, "torch's fill": Call(partial(target.fill_, 1.0), nbytes=2 * pairs)},
        "block mask": block_masks,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help=f"folder of the CSV (default: {RESULTS})")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--dense-tokens", type=int, default=16384)
    parser.add_argument("--commit", help="a name of the code (default: its commit, or a digest)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cpu" and options.out is None:
        parser.error("--device cpu needs --out: rows of a smoke run don't belong beside measured ones.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu.masks needs a GPU, and torch sees none here.")
    ledger = Ledger((options.out or RESULTS) / "masks.csv", environment(device, options.commit))
    run(cases(device, options.tokens, options.dense_tokens), ledger, Budget(60), device)
    print("", *table(ledger.rows()), sep="\n")


if __name__ == "__main__":
    main()
