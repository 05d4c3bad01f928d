"""The shapes that are measured on a GPU, the most important first.

Sizes are from models: 32 query and 8 key heads of 128 (Llama 3 8B) and of 64 (Llama 3.2 1B), 16 and 8 of 256
(Gemma), and 2,048 columns in all without groups, as in FlashAttention's published figures. `tests.lengths` describes
the distributions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.harness.batch import Shape, make_batch
from benchmarks.harness.peers import Peer
from benchmarks.harness.registry import Case
from benchmarks.harness.verify import OPS, checked
from tests.lengths import distributions
from tests.trees import group, path_lengths, tree_batches
from tritonpack.testing.cases import parents_of

ORDINARY = ("stdlib", "flan", "openchat", "skewed", "orca", "tiny")
PUBLISHED = ({"heads": 16, "kv_heads": 16, "head_dim": 128}, {"heads": 32, "kv_heads": 32, "head_dim": 64})
HEADS_256 = {"heads": 16, "kv_heads": 8, "head_dim": 256}
WINDOW = (4096, 0)
SMALL_TREES = {"small trees": [group(90, [70, 1, 50]), group(5, [9, 30])]}
EACH = "each of "  # before the tokens that every document of a batch has
UNSHARED = "unshared, "  # before the name of a batch of trees: each of its paths as a document


def documents_of(shape: Shape) -> tuple[list[int], tuple[int, ...] | None]:
    """The tokens of each document of a shape, or of each tree, then with the parents of all tokens."""
    if shape.trees:
        trees = (tree_batches() | SMALL_TREES)[shape.distribution]
        return [sum(tokens for _, tokens in nodes) for nodes in trees], parents_of(*trees)
    if shape.distribution.startswith(UNSHARED):
        trees = tree_batches()[shape.distribution.removeprefix(UNSHARED)]
        return [tokens for nodes in trees for tokens in path_lengths(nodes)], None
    if shape.distribution.startswith(EACH):
        tokens = int(shape.distribution.removeprefix(EACH))
        return [tokens] * (shape.tokens // tokens), None
    return distributions(shape.tokens)[shape.distribution], None


def case_of(shape: Shape, peers: Sequence[Peer], device: torch.device) -> Case:
    """Attention of a shape by each peer that is measured at it."""
    fit = [peer for peer in peers if peer.fits(shape)]

    def prepare() -> dict[str, object]:
        lengths, parents = documents_of(shape)
        return {**checked(make_batch(shape, lengths, device, parents=parents), fit)}

    names = [peer.name for peer in fit]
    return Case(__name__, [f"attention, {op}" for op in OPS], shape.parameters(), prepare, names)


def tree_shapes() -> list[Shape]:
    """Four batches of trees, each followed by the same sequences without sharing."""
    found = []
    for name, trees in list(tree_batches().items())[:4]:
        found.append(Shape(name, sum(tokens for nodes in trees for _, tokens in nodes), trees=True))
        found.append(Shape(UNSHARED + name, sum(sum(path_lengths(nodes)) for nodes in trees)))
    return found


def shapes() -> list[Shape]:
    """The shapes in order of importance.

    1. Shapes of published figures: one causal document of 16k, 2,048 columns, head dimensions 128 and 64. A packed
       batch of 32k tokens.
    2. One long document, and the other distributions at 32k tokens.
    3. Trees and the same sequences without sharing, and the shapes of published figures that aren't causal.
    4. Head dimensions 64 and 256.
    5. 128k tokens; one document of 64k.
    6. Windows and bidirectional batches.
    7. 16k tokens, and batches without groups.
    """
    k32 = [Shape(name, 32768) for name in ORDINARY]
    long = Shape("one", 16384)
    return [
        *(replace(long, **sizes) for sizes in PUBLISHED),  # type: ignore[arg-type]
        k32[0],
        long,
        *k32[1:],
        *tree_shapes(),
        *(replace(long, causal=False, **sizes) for sizes in PUBLISHED),  # type: ignore[arg-type]
        *(replace(shape, head_dim=64) for shape in (k32[0], long, Shape("flan", 32768))),
        *(replace(shape, **HEADS_256) for shape in (k32[0], long)),  # type: ignore[arg-type]
        *(replace(shape, tokens=131072) for shape in k32),
        Shape("one", 65536),
        Shape("one", 32768, window=WINDOW),
        Shape("skewed", 32768, window=WINDOW),
        *(replace(shape, causal=False) for shape in k32[:3]),
        *(replace(shape, tokens=16384) for shape in k32[:3]),
        *(replace(shape, kv_heads=32) for shape in k32[:2]),
        Shape("one", 32768, head_dim=64, window=WINDOW),
    ]


def quick_shapes() -> list[Shape]:
    """Return the shapes that other projects publish, in order of importance.

    First come dense causal batches of 16k tokens with documents of 1k to 16k; then packed documents with the lengths of
    FLAN and of OrcaMath; then one long document beside many short ones.
    """
    dense, wide = PUBLISHED
    return [
        Shape("one", 16384, **dense),  # type: ignore[arg-type]
        *(Shape(name, 32768) for name in ("flan", "skewed", "orca")),
        *(Shape(f"{EACH}{tokens}", 16384, **dense) for tokens in (1024, 4096)),  # type: ignore[arg-type]
        Shape("one", 16384, **wide),  # type: ignore[arg-type]
    ]


def own_shapes(tokens: int, heads: int = 32, head_dim: int = 128, dtype: str = "bfloat16") -> list[Shape]:
    """Batches of four distributions with these sizes."""
    kv_heads = heads // 4 if heads % 4 == 0 else heads
    return [Shape(name, tokens, heads, kv_heads, head_dim, dtype=dtype) for name in ("one", "skewed", "flan", "tiny")]


def smoke_shapes() -> list[Shape]:
    """Tiny shapes in float32, to try the program where there is no GPU."""
    small = Shape("flan", 320, heads=4, kv_heads=2, head_dim=16, dtype="float32")
    trees = replace(small, distribution="small trees", tokens=255, trees=True)
    return [small, replace(small, causal=False), replace(small, distribution="one", window=(64, 0)), trees]
