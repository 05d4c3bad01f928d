"""What is measured, the most telling first, and the tensors of each shape.

Sizes are those of models: 32 query and 8 key heads of 128 (Llama 3 8B) and of 64 (Llama 3.2 1B), 16 and 8 of 256
(Gemma), and 2,048 columns in all without groups, as FlashAttention's published figures have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from tritonpack import BlockDiagonalMask
from tritonpack.cli.bench.batch import NO_WINDOW, Batch


@dataclass(frozen=True)
class Shape:
    """One row of the list.

    Attributes:
        distribution: of document lengths, as `tests.lengths.distributions` names them.
        tokens: of all documents together.
        heads, kv_heads, head_dim: of q; of k and v; of all three.
        causal: whether a query sees no later key.
        window: how many keys before and after itself a query sees, besides itself; -1 is without limit.
        dtype: by torch's name.
    """

    distribution: str
    tokens: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    causal: bool = True
    window: tuple[int, int] = NO_WINDOW
    dtype: str = "bfloat16"

    def columns(self) -> dict[str, str]:
        """The shape as a row of the ledger has it."""
        return {name: str(value) for name, value in asdict(self).items()} | {
            "window": "" if self.window == NO_WINDOW else "{} {}".format(*self.window)
        }

    def __str__(self) -> str:
        kind = "causal" if self.causal else "bidirectional"
        window = "" if self.window == NO_WINDOW else f", window {self.window[0]}"
        sizes = f"{self.heads}/{self.kv_heads}x{self.head_dim}"
        return f"{self.distribution}, {self.tokens} tokens, {sizes}, {kind}{window}"


ORDINARY = ("stdlib", "flan", "openchat", "skewed", "orca", "tiny")
PUBLISHED = ({"heads": 16, "kv_heads": 16, "head_dim": 128}, {"heads": 32, "kv_heads": 32, "head_dim": 64})
HEADS_256 = {"heads": 16, "kv_heads": 8, "head_dim": 256}
WINDOW = (4096, 0)


def shapes(*, from_file: bool = False) -> list[Shape]:
    """The list, in order of importance; `from_file` puts the distribution of a file of lengths in front of others.

    1. What the kernels are for: a packed batch of 32k tokens, and one long document.
    2. The other distributions at 32k tokens.
    3. What others publish: one document of 16k, 2,048 columns, causal and not, head dimensions 64 and 128.
    4. Head dimensions 64 and 256.
    5. 128k tokens; one document of 64k.
    6. Windows and bidirectional batches.
    7. 16k tokens, and batches without groups.
    """
    k32 = [Shape(name, 32768) for name in ORDINARY]
    if from_file:
        k32.insert(1, Shape("file", 32768))
    long = Shape("one", 16384)
    published = [replace(long, causal=causal, **sizes) for causal in (True, False) for sizes in PUBLISHED]  # type: ignore[arg-type]
    k128 = [replace(shape, tokens=131072) for shape in k32]
    return [
        k32[0],
        long,
        *k32[1:],
        *published,
        *(replace(shape, head_dim=64) for shape in (k32[0], long, Shape("flan", 32768))),
        *(replace(shape, **HEADS_256) for shape in (k32[0], long)),  # type: ignore[arg-type]
        *k128,
        Shape("one", 65536),
        Shape("one", 32768, window=WINDOW),
        Shape("skewed", 32768, window=WINDOW),
        *(replace(shape, causal=False) for shape in k32[:3]),
        *(replace(shape, tokens=16384) for shape in k32[:3]),
        *(replace(shape, kv_heads=32) for shape in k32[:2]),
        Shape("one", 32768, head_dim=64, window=WINDOW),
    ]


def smoke_shapes() -> list[Shape]:
    """Tiny ones in float32, to try the run itself where there is no GPU."""
    small = Shape("flan", 320, heads=4, kv_heads=2, head_dim=16, dtype="float32")
    return [small, replace(small, causal=False), replace(small, distribution="one", window=(64, 0))]


def make_batch(shape: Shape, lengths: Sequence[int], device: torch.device | str, seed: int = 0) -> Batch:
    """Random tensors for a shape; never zeros, which matrix units multiply faster."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, shape.dtype)

    def draw(count: int) -> Tensor:
        return torch.randn(shape.tokens, count, shape.head_dim, device=device, dtype=dtype, generator=generator)

    q, k, v = (draw(n) for n in (shape.heads, shape.kv_heads, shape.kv_heads))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)
    mask = BlockDiagonalMask.from_cu_seqlens(cu_seqlens, causal=shape.causal, window=shape.window, total_q=shape.tokens)
    return Batch(tuple(lengths), q, k, v, draw(shape.heads), cu_seqlens, mask, shape.causal, shape.window)
