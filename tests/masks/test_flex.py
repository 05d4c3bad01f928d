"""Block masks from intervals against those that torch finds by evaluating a mask function on every pair."""

import random

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tests.masks.test_block_diagonal import SEEDS, random_intervals, random_lengths
from tritonpack import BlockDiagonalMask, varlen_attention

BLOCKS: list[int | tuple[int, int]] = [1, 4, (8, 4), (4, 16), 128]
MASKS = {
    "one document": BlockDiagonalMask.from_seqlens([64]),
    "packed": BlockDiagonalMask.from_seqlens([13, 0, 40, 1, 7]),
    "bidirectional": BlockDiagonalMask.from_seqlens([16, 30, 18], causal=False),
    "window": BlockDiagonalMask.from_seqlens([50, 9], window=(12, 0)),
    "two-sided window": BlockDiagonalMask.from_seqlens([50, 9], window=(3, 20), causal=False),
    "chunks": BlockDiagonalMask.from_seqlens([50, 9], chunk_size=8),
    "slack": BlockDiagonalMask.from_cu_seqlens([0, 16, 21], total_q=50),
    "padding": BlockDiagonalMask.from_padding_mask(torch.tensor([[0] * 9 + [1] * 11, [1] * 17 + [0] * 3, [0] * 20])),
    "cross": BlockDiagonalMask.from_seqlens([20, 0, 9, 3], [3, 40, 30, 0]),
    "cross, bidirectional": BlockDiagonalMask.from_seqlens([20, 0, 9], [3, 40, 30], causal=False),
    "all": BlockDiagonalMask.from_seqlens([32], [16], causal=False),
    "none": BlockDiagonalMask.from_cu_seqlens([0], total_q=20),
    "one": BlockDiagonalMask.from_seqlens([1]),
}


def listed(number: torch.Tensor | None, indices: torch.Tensor | None) -> list[list[int]]:
    """The listed blocks of every row, up to the row's count."""
    assert number is not None
    assert indices is not None
    assert number.dtype == indices.dtype == torch.int32
    return [row[:n] for row, n in zip(indices[0, 0].tolist(), number[0, 0].tolist(), strict=True)]


def assert_same_blocks(mask: BlockDiagonalMask, block_size: int | tuple[int, int]) -> None:
    ours = mask.to_block_mask(block_size)
    theirs: BlockMask = create_block_mask(
        ours.mask_mod, None, None, mask.num_queries, mask.num_keys, device="cpu", BLOCK_SIZE=block_size
    )
    assert (ours.shape, ours.BLOCK_SIZE) == (theirs.shape, theirs.BLOCK_SIZE)
    for side in ("kv", "full_kv", "q", "full_q"):
        one, other = (listed(getattr(m, f"{side}_num_blocks"), getattr(m, f"{side}_indices")) for m in (ours, theirs))
        assert one == other, side


@pytest.mark.fast(
    "one document-1",
    "packed-(4, 16)",
    "two-sided window-128",
    "slack-4",
    "padding-(4, 16)",
    "cross, bidirectional-1",
    "all-(4, 16)",
    "one-(4, 16)",
)
@pytest.mark.parametrize("block_size", BLOCKS, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_the_blocks_that_torch_finds(name: str, block_size: int | tuple[int, int]) -> None:
    assert_same_blocks(MASKS[name], block_size)


@pytest.mark.fast("0", "5", "10", "16", "22", "28", "34", "39")
@pytest.mark.parametrize("seed", SEEDS)
def test_any_intervals(seed: int) -> None:
    rng = random.Random(seed)
    block_size = (rng.randint(1, 9), rng.randint(1, 9))
    mask = random_intervals(rng, 40)
    if mask.num_queries and mask.num_keys:
        assert_same_blocks(mask, block_size)
    lengths = [1, *random_lengths(rng, 8)]
    assert_same_blocks(BlockDiagonalMask.from_seqlens(lengths, window=(4, 0)), block_size)


@pytest.mark.parametrize("name", ["packed", "window", "slack", "cross"])
def test_the_mask_function(name: str) -> None:
    mask = MASKS[name]
    queries, keys = torch.arange(mask.num_queries), torch.arange(mask.num_keys)
    none = torch.zeros((), dtype=torch.int64)
    assert torch.equal(mask.to_block_mask().mask_mod(none, none, queries[:, None], keys), mask.to_dense())


@pytest.mark.fast("window")
@pytest.mark.parametrize("name", ["packed", "window", "slack"])
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_flex_attention_computes_what_we_do(name: str) -> None:
    mask = MASKS[name]
    q, k, v = torch.randn(3, mask.num_queries, 2, 16)
    ours = varlen_attention(q, k, v, mask, backend="reference")
    theirs = flex_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), block_mask=mask.to_block_mask(16))[
        0
    ].transpose(0, 1)
    torch.testing.assert_close(theirs, ours)


@pytest.mark.parametrize("block_size", [0, -1, 1.5, True, (4,), (4, 0), "128"])
def test_bad_block_sizes_are_refused(block_size: object) -> None:
    with pytest.raises(ValueError, match="BLOCK_SIZE must be an integer of at least 1, or two"):
        MASKS["one"].to_block_mask(block_size)


@pytest.mark.parametrize("mask", [BlockDiagonalMask.from_seqlens([0], [3]), BlockDiagonalMask.from_seqlens([3], [0])])
def test_a_mask_of_nothing_is_refused(mask: BlockDiagonalMask) -> None:
    with pytest.raises(ValueError, match="needs queries and keys; this mask has"):
        mask.to_block_mask()


def test_constructors_read_no_values() -> None:
    """Reading a value of a meta tensor raises; on a GPU it would wait."""
    mask = BlockDiagonalMask.from_seqlens([200, 100], device="meta")
    assert mask.to_block_mask().kv_indices.shape == (1, 1, 3, 3)
    assert mask.to_dense(torch.float16, additive=True).shape == (300, 300)
    assert mask.to_bits().shape == (300, 10)
