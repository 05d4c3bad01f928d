"""Time on a GPU how masks are built and written out, by device events, after a check of their values.

    python3 -m benchmarks.gpu.masks [--out DIR] [--tokens 131072] [--dense-tokens 16384]

Dense masks (of --dense-tokens) are compared with a plain fill of the same number of bytes, and FlexAttention's block
mask with the one that torch builds from a mask function. Rows are appended to DIR/masks.csv.
`--device cpu` tries the program where there is no GPU; its times mean nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch.nn.attention.flex_attention import create_block_mask

from benchmarks.harness.ledger import append, environment
from benchmarks.harness.measure import quantiles, time_alternating
from tests.lengths import distributions
from tests.trees import tree_batches
from tritonpack import BlockDiagonalMask
from tritonpack.backends.tile_table import Cut, tile_tables
from tritonpack.testing.cases import parents_of

RESULTS = Path("benchmarks/results")


def builders(tokens: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Functions that build a mask, its transpose and its tile table, as a training step does once."""
    lengths = torch.tensor(distributions(tokens)["stdlib"])
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(device, torch.int32)
    positions = torch.cat([torch.arange(int(n)) for n in lengths]).to(device)
    segments = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), lengths).to(device)[None]
    expected = BlockDiagonalMask.from_seqlens(lengths.tolist())
    made = {
        "from_cu_seqlens": lambda: BlockDiagonalMask.from_cu_seqlens(cu_seqlens, total_q=tokens),
        "from_position_ids": lambda: BlockDiagonalMask.from_position_ids(positions),
        "from_segment_ids": lambda: BlockDiagonalMask.from_segment_ids(segments),
    }
    for name, make in made.items():
        mask = make()
        for field in ("key_start", "key_stop", "diagonal"):
            assert torch.equal(getattr(mask, field).cpu(), getattr(expected, field)), f"{name}: {field}"
    agents = torch.tensor(parents_of(*tree_batches()["agent, 6 turns"] * 8)[:tokens])
    for name, parents in {"from_tree": agents, "from_tree, one chain": torch.arange(-1, tokens - 1)}.items():
        made[name] = partial(BlockDiagonalMask.from_tree, parents.to(device))
        mask, expected = made[name](), BlockDiagonalMask.from_tree(parents)
        for field in ("key_start", "key_stop", "query_stop", "diagonal"):
            assert torch.equal(getattr(mask, field).cpu(), getattr(expected, field)), f"{name}: {field}"
    return {
        **made,
        "transpose": lambda: made["from_cu_seqlens"]().transpose(),
        "tile_tables": lambda: tile_tables(
            made["from_cu_seqlens"](), Cut(32, 64, 128), Cut(128, of_keys=True), Cut(16, 64, 64)
        ),
    }


def writers(tokens: int, device: torch.device) -> tuple[dict[str, Callable[[], object]], dict[str, int]]:
    """Functions that write masks in the forms of other kernels, and the bytes of some of these masks."""
    lengths = distributions(tokens)["stdlib"]
    mask = BlockDiagonalMask.from_seqlens(lengths, device=device)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
    expected = BlockDiagonalMask.from_seqlens(lengths).to_dense().to(device)
    assert torch.equal(mask.to_dense(), expected)

    def causal_document(b: object, h: object, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (document[q] == document[k]) & (q >= k)

    target = torch.empty(tokens, tokens, dtype=torch.bfloat16, device=device)
    compiled = torch.compile(create_block_mask)
    pairs = tokens**2
    calls: dict[str, Callable[[], object]] = {
        "to_dense bool": mask.to_dense,
        "to_dense additive bf16": lambda: mask.to_dense(torch.bfloat16, additive=True),
        "to_bits": mask.to_bits,
        "fill bf16 (torch)": lambda: target.fill_(1.0),
        "to_block_mask": mask.to_block_mask,
        "create_block_mask (torch)": lambda: create_block_mask(causal_document, None, None, tokens, tokens, device),
        "create_block_mask compiled": lambda: compiled(causal_document, None, None, tokens, tokens, device),
    }
    sizes = {"to_dense bool": pairs, "to_dense additive bf16": 2 * pairs, "to_bits": pairs // 8}
    return calls, sizes | {"fill bf16 (torch)": 2 * pairs}


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
    path, about = (options.out or RESULTS) / "masks.csv", environment(device, options.commit)
    calls, sizes = writers(options.dense_tokens, device)
    for tokens, timed in ((options.tokens, builders(options.tokens, device)), (options.dense_tokens, calls)):
        for name, times in time_alternating(timed, device).items():
            if times.error is not None:
                print(f"{name:28} {times.error}", flush=True)
                continue
            median = quantiles(times.device)[1]
            rate = round(sizes[name] / median / 1e6) if name in sizes else ""
            row = {"what": name, "tokens": tokens, "p50_us": round(1000 * median, 1), "gb_per_s": rate} | about
            append(path, list(row), [row])
            print(f"{name:28} {tokens:7} tokens  {row['p50_us']:9} us  {rate} GB/s", flush=True)


if __name__ == "__main__":
    main()
