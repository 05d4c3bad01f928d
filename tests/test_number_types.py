"""Arguments that tell documents apart, in every type of numbers: read exactly, or refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tritonpack import BlockDiagonalMask
from tritonpack.flash_attn import fa2, fa3
from tritonpack.flash_attn.bert_padding import unpad_input
from tritonpack.flash_attn.torch_varlen import torch_varlen_attn

pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache

import tritonpack
from tests.patches import zoo
from tests.patches.models import NAMES_OF_CACHE, tiny_model
from tests.trees import mask_of_ends

WHOLE = (torch.int32, torch.int64)
DTYPES = (
    *WHOLE, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip
MASKS = {*WHOLE, torch.uint8, torch.int8, torch.int16, torch.bool}
FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}

LENGTHS = [300, *[1] * 298, 2]  # 600 tokens: lengths, numbers and offsets above 256
TOKENS = sum(LENGTHS)
NUMBERS = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]
OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0)
POSITIONS = torch.arange(TOKENS)[None] - OFFSETS[NUMBERS]
ENDS = OFFSETS[NUMBERS + 1]
PARENTS = torch.where(POSITIONS == 0, -1, torch.arange(TOKENS)[None] - 1)
PADDING = (torch.arange(TOKENS)[None] < 590).long()
IDS = torch.arange(TOKENS)[None] % 60 + 3


def dense(name: str, **others: Any) -> Callable[[Tensor], Tensor]:
    return lambda numbers: getattr(BlockDiagonalMask, name)(numbers, **others).to_dense()


def attention(function: Callable[..., Any], names: str, **others: Any) -> Callable[[Tensor], Tensor]:
    """A call of a function of `flash_attn` with these names of arguments for its numbers."""

    def call(numbers: Tensor) -> Tensor:
        q = torch.linspace(-1, 1, TOKENS * 16).view(TOKENS, 1, 16)
        out = function(q, q, q, **dict.fromkeys(names.split(), numbers), **others)
        return out[0] if isinstance(out, tuple) else out

    return call


LONGEST = dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), max(LENGTHS))
BOTH = "cu_seqlens_q cu_seqlens_k"
BOTH_OFFSETS = dict.fromkeys(BOTH.split(), OFFSETS.int())
ONES = torch.ones(1, TOKENS, 1)

# What reads numbers -> the numbers, and a call with them.
NUMBERED: dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]] = {
    "from_seqlens": (torch.tensor(LENGTHS), dense("from_seqlens")),
    "from_cu_seqlens": (OFFSETS, dense("from_cu_seqlens")),
    "cu_seqlens_k": (OFFSETS, lambda cu: BlockDiagonalMask.from_cu_seqlens(OFFSETS.to(cu.dtype), cu).to_dense()),
    "from_position_ids": (POSITIONS, dense("from_position_ids")),
    "from_position_ids of images": (POSITIONS.expand(3, 1, -1), dense("from_position_ids")),
    "from_segment_ids": (NUMBERS + 1, dense("from_segment_ids")),
    "spans": (NUMBERS, lambda numbers: dense("from_position_ids", spans=numbers)(POSITIONS)),
    "from_tree": (PARENTS, dense("from_tree")),
    "ends of trees": (ENDS, lambda numbers: mask_of_ends(numbers).to_dense()),
    "flash_attn_varlen_func": (OFFSETS, attention(fa2.flash_attn_varlen_func, BOTH, **LONGEST)),
    "seqused": (
        torch.tensor(LENGTHS),
        attention(fa3.flash_attn_varlen_func, "seqused_q seqused_k", **BOTH_OFFSETS, **LONGEST),
    ),
    "torch_varlen_attn": (
        OFFSETS,
        attention(torch_varlen_attn, "cu_seq_q cu_seq_k", max_q=max(LENGTHS), max_k=max(LENGTHS)),
    ),
}

# What reads a mask of padding -> the mask, and a call with it.
PADDED: dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]] = {
    "from_padding_mask": (PADDING, dense("from_padding_mask")),
    "unpad_input": (PADDING, lambda mask: unpad_input(ONES, mask)[2]),
}


def require_exact(
    call: Callable[[Tensor], Tensor], numbers: Tensor, read_types: set[torch.dtype], *, numbered_mask: bool = False
) -> None:
    """These types are read exactly, all others are refused. A `numbered_mask` of bool is one of padding."""
    expected = call(numbers)
    for dtype in DTYPES:
        if numbered_mask and dtype == torch.bool:
            continue
        if dtype in read_types:
            assert torch.equal(call(numbers.to(dtype)), expected), f"{dtype} joins or splits documents"
        else:
            with pytest.raises(ValueError):  # noqa: PT011, PT012 (each has its own words)
                call(numbers.to(dtype))
                pytest.fail(f"{dtype} is read")


@pytest.mark.parametrize("name", [*NUMBERED, *PADDED])
def test_numbers_and_masks_of_padding(name: str) -> None:
    numbers, call = (NUMBERED | PADDED)[name]
    require_exact(call, numbers, set(WHOLE) if name in NUMBERED else MASKS)


def test_unpad_input_refuses_masks_that_number_documents() -> None:
    for masks in ([NUMBERS], [1 - PADDING, NUMBERS]):
        with pytest.raises(ValueError, match="must hold 0 and 1"):
            unpad_input(ONES, *masks)


# The arguments of a patched call -> the numbers.
ARGUMENTS = {
    "position_ids": POSITIONS,
    "seq_idx": NUMBERS,
    "cu_seq_lens_q": OFFSETS,
    "attention_mask": NUMBERS + 1,
    "tree_ends": ENDS,
}


@pytest.mark.parametrize("name", [*ARGUMENTS, "padding"])
def test_arguments_of_a_call(name: str) -> None:
    model = tiny_model("llama", dtype=torch.float32, num_hidden_layers=1, max_position_embeddings=1024)
    with tritonpack.patch(model), torch.no_grad():
        if name == "padding":
            require_exact(lambda x: model(IDS, attention_mask=x).logits, PADDING, MASKS | FLOATS)
        else:
            masks = name == "attention_mask"
            require_exact(lambda x: model(IDS, **{name: x}).logits, ARGUMENTS[name], set(WHOLE), numbered_mask=masks)


@pytest.mark.fast("attention_mask")
@pytest.mark.parametrize("name", ["attention_mask", "seq_idx", "decoder_position_ids", "decoder_attention_mask"])
def test_arguments_of_an_encoder_with_a_decoder(name: str) -> None:
    model = zoo.build("bart+", dtype=torch.float32, max_position_embeddings=512)
    told = {"seq_idx" if name.startswith("decoder_") else "decoder_seq_idx": NUMBERS}

    def call(numbers: Tensor) -> Tensor:
        return model(IDS, decoder_input_ids=IDS, **{**told, name: numbers}).logits

    with tritonpack.patch(model), torch.no_grad():
        masks = name.endswith("attention_mask")
        require_exact(call, ARGUMENTS[name.removeprefix("decoder_")], set(WHOLE), numbered_mask=masks)


def test_masks_that_number_documents_beside_a_cache() -> None:
    """The keys of a cache are those of one document."""
    model = tiny_model("llama", dtype=torch.float32, num_hidden_layers=1)
    ids, numbers, name = IDS[:, :8], torch.tensor([[1, 1, 1, 2, 2, 3, 3, 3]]), NAMES_OF_CACHE[-1]
    with tritonpack.patch(model), torch.no_grad():
        for cache in (DynamicCache(), StaticCache(model.config, max_cache_len=16)):
            model(ids[:, :3], **{name: cache})
            with pytest.raises(ValueError, match="numbers several documents"):
                model(ids[:, 3:], attention_mask=numbers, **{name: cache})
