"""Blocks of keys that a tile of a schedule visits, counted from the mask alone."""

import torch
from torch import Tensor

from tritonpack import BlockDiagonalMask


def blocks_of(mask: BlockDiagonalMask, tiles: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """How many blocks of so many keys each tile (rows [first, end)) visits without masking them, and masking them."""
    first, last = tiles[:, 0].long(), tiles[:, 1].long() - 1
    start, stop = mask.key_start.long(), mask.key_stop.long()
    begin = start[first]
    blocks = (stop[last] - begin + block - 1) // block
    full = torch.minimum((start[last] - begin + block - 1) // block, blocks)
    full_end = torch.maximum((stop[first] - begin) // block, full)
    unmasked = full_end - full
    return unmasked, blocks - unmasked
