"""Chunked attention and image spans against the masks that transformers builds for Llama 4 and Gemma 3."""

import pytest
import torch

pytest.importorskip("transformers")

from transformers import Gemma3TextConfig, Llama4TextConfig
from transformers.masking_utils import create_chunked_causal_mask
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model, get_block_sequence_ids_for_mask

from tritonpack import BlockDiagonalMask

PADDING = {
    "none": [[1] * 12, [1] * 12],
    "left": [[0] * 3 + [1] * 9, [1] * 12],
    "right": [[1] * 12, [1] * 7 + [0] * 5],
    "both": [[0] * 2 + [1] * 7 + [0] * 3, [0] * 12],
}
IMAGES = [[0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1], [1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0]]
EMBEDS, NO_CACHE = (
    torch.zeros(2, 12, 8),
    None,
)  # given by position, because versions of transformers name it differently


@pytest.mark.parametrize("padding", PADDING)
def test_tokens_see_the_same_keys(padding: str) -> None:
    """transformers' windows cut images, too, so both agree only for images that fit the window."""
    live = torch.tensor(PADDING[padding])
    pairs = []
    for chunk in (1, 4, 5, 12, 50):
        llama = Llama4TextConfig(attention_chunk_size=chunk, attn_implementation="sdpa")
        theirs = create_chunked_causal_mask(llama, EMBEDS, live, NO_CACHE, allow_is_causal_skip=False)
        pairs.append((BlockDiagonalMask.from_padding_mask(live, chunk_size=chunk), theirs))
    spans = get_block_sequence_ids_for_mask(torch.tensor(IMAGES) * live) + 1
    for window in (6, 8, 64):
        gemma = Gemma3TextConfig(sliding_window=window, attn_implementation="sdpa")
        both = create_masks_for_vision_model(
            gemma, EMBEDS, live, NO_CACHE, position_ids=None, block_sequence_ids=spans - 1
        )
        for name, reach in (("full_attention", (-1, -1)), ("sliding_attention", (window - 1, -1))):
            pairs.append((BlockDiagonalMask.from_padding_mask(live, spans=spans, window=reach), both[name]))
    for ours, theirs in pairs:
        blocks = ours.to_dense().view(2, 12, 2, 12)[[0, 1], :, [0, 1]]
        assert torch.equal(blocks[live.bool()], theirs.expand(2, 1, 12, 12)[:, 0][live.bool()])
        assert int(ours.to_dense().sum()) == int(blocks.sum())
