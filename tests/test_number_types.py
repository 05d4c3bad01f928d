"""Arguments that tell documents apart, in every type of numbers: read exactly, or refused.

float16 can't count above 2,048 and bfloat16 above 256; 8 and 16 bits wrap around. So numbers of documents, positions
and offsets are int32 or int64. A mask of padding may have any type that holds 0 and 1.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tritonpack.flash_attn as fa
from tritonpack import BlockDiagonalMask
from tritonpack.flash_attn import fa2, fa3, fa4
from tritonpack.flash_attn.bert_padding import unpad_input
from tritonpack.flash_attn.torch_varlen import torch_varlen_attn

pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache

import tritonpack
from tests.patches import zoo
from tests.patches.models import NAMES_OF_CACHE, tiny_model

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


def dense(name: str) -> Callable[[Tensor], Tensor]:
    return lambda numbers: getattr(BlockDiagonalMask, name)(numbers).to_dense()


def offsets_of_keys(numbers: Tensor) -> Tensor:
    return BlockDiagonalMask.from_cu_seqlens(OFFSETS.to(numbers.dtype), numbers).to_dense()


def with_spans(numbers: Tensor) -> Tensor:
    return BlockDiagonalMask.from_position_ids(POSITIONS, spans=numbers).to_dense()


def attention(function: Callable[..., Any], **names: Any) -> Callable[[Tensor], Tensor]:
    """A call of a function of `flash_attn` with these names of arguments for its offsets."""

    def call(numbers: Tensor) -> Tensor:
        q = torch.linspace(-1, 1, TOKENS * 16).view(TOKENS, 1, 16)
        streams = names.get("streams", (q, q, q))
        longest = dict.fromkeys(names.get("longest", ("max_seqlen_q", "max_seqlen_k")), max(LENGTHS))
        out = function(*streams, **dict.fromkeys(names["offsets"], numbers), **longest, **names.get("more", {}))
        return out[0] if isinstance(out, tuple) else out

    return call


def used_rows(numbers: Tensor) -> Tensor:
    return attention(fa3.flash_attn_varlen_func, offsets=("seqused_q", "seqused_k"), more=BOTH_OFFSETS)(numbers)


def unpadded(numbers: Tensor) -> Tensor:
    return unpad_input(torch.ones(1, TOKENS, 1), numbers)[2]


def tokens_that_dont_count(numbers: Tensor) -> Tensor:
    return unpad_input(torch.ones(1, TOKENS, 1), 1 - PADDING, numbers)[2]


BOTH = ("cu_seqlens_q", "cu_seqlens_k")
BOTH_OFFSETS = dict.fromkeys(BOTH, OFFSETS.int())
PACKED3 = (torch.linspace(-1, 1, TOKENS * 48).view(TOKENS, 3, 1, 16),)
PACKED2 = (PACKED3[0][:, 0], PACKED3[0][:, 1:])

# What reads numbers -> the numbers, and a call with them.
NUMBERED: dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]] = {
    "from_seqlens": (torch.tensor(LENGTHS), dense("from_seqlens")),
    "from_cu_seqlens": (OFFSETS, dense("from_cu_seqlens")),
    "cu_seqlens_k": (OFFSETS, offsets_of_keys),
    "from_position_ids": (POSITIONS, dense("from_position_ids")),
    "from_position_ids of images": (POSITIONS.expand(3, 1, -1), dense("from_position_ids")),
    "from_position_ids of four kinds": (POSITIONS.expand(4, 1, -1), dense("from_position_ids")),
    "from_segment_ids": (NUMBERS + 1, dense("from_segment_ids")),
    "spans": (NUMBERS, with_spans),
    "from_tree": (PARENTS, dense("from_tree")),
    "from_tree_ends": (ENDS, dense("from_tree_ends")),
    "flash_attn_varlen_func": (OFFSETS, attention(fa.flash_attn_varlen_func, offsets=BOTH)),
    "flash_attn_varlen_qkvpacked_func": (
        OFFSETS,
        attention(
            fa2.flash_attn_varlen_qkvpacked_func, offsets=("cu_seqlens",), streams=PACKED3, longest=("max_seqlen",)
        ),
    ),
    "flash_attn_varlen_kvpacked_func": (
        OFFSETS,
        attention(fa2.flash_attn_varlen_kvpacked_func, offsets=BOTH, streams=PACKED2),
    ),
    "fa3.flash_attn_varlen_func": (OFFSETS, attention(fa3.flash_attn_varlen_func, offsets=BOTH)),
    "seqused": (torch.tensor(LENGTHS), used_rows),
    "fa4.flash_attn_varlen_func": (OFFSETS, attention(fa4.flash_attn_varlen_func, offsets=BOTH)),
    "torch_varlen_attn": (
        OFFSETS,
        attention(torch_varlen_attn, offsets=("cu_seq_q", "cu_seq_k"), longest=("max_q", "max_k")),
    ),
}

# What reads a mask of padding -> the mask, and a call with it.
PADDED: dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]] = {
    "from_padding_mask": (PADDING, dense("from_padding_mask")),
    "unpad_input": (PADDING, unpadded),
    "unused_mask of unpad_input": (PADDING, tokens_that_dont_count),
}


def read(call: Callable[[Tensor], Tensor], numbers: Tensor) -> Tensor | None:
    """What a call computes; None if it is refused."""
    try:
        return call(numbers)
    except ValueError:
        return None


def require_exact(
    call: Callable[[Tensor], Tensor], numbers: Tensor, read_types: set[torch.dtype], *, numbered_mask: bool = False
) -> None:
    """These types are read exactly, all others are refused. A `numbered_mask` of bool is one of padding."""
    expected = call(numbers)
    for dtype in DTYPES:
        if numbered_mask and dtype == torch.bool:
            continue
        got = read(call, numbers.to(dtype))
        assert (got is not None) == (dtype in read_types), f"{dtype} is {'refused' if got is None else 'read'}"
        assert got is None or torch.equal(got, expected), f"{dtype} joins or splits documents"


@pytest.mark.parametrize("name", NUMBERED)
def test_numbers(name: str) -> None:
    require_exact(NUMBERED[name][1], NUMBERED[name][0], set(WHOLE))


@pytest.mark.parametrize("name", PADDED)
def test_masks_of_padding(name: str) -> None:
    require_exact(PADDED[name][1], PADDED[name][0], MASKS)


@pytest.mark.parametrize("name", ["unpad_input", "unused_mask of unpad_input"])
def test_unpad_input_refuses_masks_that_number_documents(name: str) -> None:
    with pytest.raises(ValueError, match="must hold 0 and 1"):
        PADDED[name][1](NUMBERS)


# The arguments of a patched call -> the numbers.
ARGUMENTS = {
    "position_ids": POSITIONS,
    "seq_idx": NUMBERS,
    "cu_seq_lens_q": OFFSETS,
    "attention_mask": NUMBERS + 1,
    "tree_ends": ENDS,
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_a_call(name: str) -> None:
    model = tiny_model("llama", dtype=torch.float32, num_hidden_layers=1, max_position_embeddings=512)
    masks = name == "attention_mask"
    with tritonpack.patch(model), torch.no_grad():
        require_exact(lambda x: model(IDS, **{name: x}).logits, ARGUMENTS[name], set(WHOLE), numbered_mask=masks)


def test_padding_of_a_call() -> None:
    model = tiny_model("llama", dtype=torch.float32, num_hidden_layers=1, max_position_embeddings=1024)
    with tritonpack.patch(model), torch.no_grad():
        require_exact(lambda x: model(IDS, attention_mask=x).logits, PADDING, MASKS | FLOATS)


SIDES = {
    "position_ids": POSITIONS,
    "decoder_position_ids": POSITIONS,
    "attention_mask": NUMBERS + 1,
    "decoder_attention_mask": NUMBERS + 1,
    "decoder_seq_idx": NUMBERS,
    "seq_idx": NUMBERS,
    "cu_seq_lens_q": OFFSETS,
    "cu_seq_lens_k": OFFSETS,
}


@pytest.mark.fast("attention_mask")
@pytest.mark.parametrize("name", SIDES)
def test_arguments_of_an_encoder_with_a_decoder(name: str) -> None:
    model = zoo.tiny_pair_model("bart", dtype=torch.float32, max_position_embeddings=512)
    told = {"seq_idx": NUMBERS} if name.startswith("decoder_") else {"decoder_seq_idx": NUMBERS}
    if name.startswith("cu_"):
        told = {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS}

    def call(numbers: Tensor) -> Tensor:
        return model(IDS, decoder_input_ids=IDS, **{**told, name: numbers}).logits

    with tritonpack.patch(model), torch.no_grad():
        require_exact(call, SIDES[name], set(WHOLE), numbered_mask=name.endswith("attention_mask"))


@pytest.mark.parametrize("static", [False, True], ids=["filled", "static"])
def test_masks_that_number_documents_beside_a_cache(static: bool) -> None:
    """The keys of a cache are those of one document."""
    model = tiny_model("llama", dtype=torch.float32, num_hidden_layers=1)
    cache = StaticCache(model.config, max_cache_len=16) if static else DynamicCache()
    ids, numbers = IDS[:, :8], torch.tensor([[1, 1, 1, 2, 2, 3, 3, 3]])
    name = NAMES_OF_CACHE[-1]
    with tritonpack.patch(model), torch.no_grad():
        if not static:
            model(ids[:, :3], **{name: cache})
        with pytest.raises(ValueError, match="numbers several documents"):
            model(ids if static else ids[:, 3:], attention_mask=numbers, **{name: cache})
