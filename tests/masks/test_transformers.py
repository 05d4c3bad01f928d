"""Chunked attention and image spans against the masks that transformers builds for Llama 4 and Gemma 3."""

import pytest
import torch

pytest.importorskip("transformers")

from transformers import Gemma3TextConfig, Llama4TextConfig
from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model, get_block_sequence_ids_for_mask

from tritonpack import BlockDiagonalMask

NO_CACHE = None  # given by position, because versions of transformers name the argument differently

PADDING = {
    "none": [[1] * 12, [1] * 12],
    "left": [[0] * 3 + [1] * 9, [1] * 12],
    "right": [[1] * 12, [1] * 7 + [0] * 5],
    "both": [[0] * 2 + [1] * 7 + [0] * 3, [0] * 12],
}


def assert_rows_see(mask: BlockDiagonalMask, theirs: torch.Tensor, live: torch.Tensor) -> None:
    """Check that tokens see the same keys in both masks; rows of padding aren't compared."""
    (batch, tokens), dense = live.shape, mask.validate().to_dense()
    blocks = torch.stack([dense[b * tokens : (b + 1) * tokens, b * tokens : (b + 1) * tokens] for b in range(batch)])
    assert torch.equal(blocks[live], theirs.expand(batch, 1, tokens, tokens)[:, 0][live])
    assert int(dense.sum()) == int(blocks.sum())


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("chunk", [1, 4, 5, 12, 50])
def test_llama_4(chunk: int, padding: str) -> None:
    live = torch.tensor(PADDING[padding])
    config = Llama4TextConfig(attention_chunk_size=chunk, attn_implementation="sdpa")
    theirs = create_chunked_causal_mask(config, torch.zeros(2, 12, 8), live, NO_CACHE, allow_is_causal_skip=False)
    ours = BlockDiagonalMask.from_padding_mask(live, chunk_size=chunk)
    assert_rows_see(ours, theirs, live.bool())


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("window", [6, 8, 64])
def test_gemma_3(window: int, padding: str) -> None:
    """transformers' windows cut images, too, so both agree only for images that fit the window."""
    live = torch.tensor(PADDING[padding])
    images = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1], [1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0]]) * live
    config = Gemma3TextConfig(sliding_window=window, attn_implementation="sdpa")
    spans = get_block_sequence_ids_for_mask(images) + 1
    theirs = create_masks_for_vision_model(
        config, torch.zeros(2, 12, 8), live, NO_CACHE, position_ids=None, block_sequence_ids=spans - 1
    )
    full = BlockDiagonalMask.from_padding_mask(live, spans=spans)
    assert_rows_see(full, theirs["full_attention"], live.bool())
    sliding = BlockDiagonalMask.from_padding_mask(live, spans=spans, window=(window - 1, -1))
    assert_rows_see(sliding, theirs["sliding_attention"], live.bool())


def test_packed_images() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]])
    spans = torch.tensor([[0, 1, 1, 0, 0, 2, 2, 2, 0, 3, 3, 0]])
    theirs = create_causal_mask(
        Gemma3TextConfig(attn_implementation="sdpa"),
        torch.zeros(1, 12, 8),
        None,
        NO_CACHE,
        position_ids=positions,
        block_sequence_ids=spans - 1,
    )
    ours = BlockDiagonalMask.from_position_ids(positions, spans=spans)
    assert_rows_see(ours, theirs, torch.ones(1, 12, dtype=torch.bool))
