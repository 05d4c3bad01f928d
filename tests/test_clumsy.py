"""Values of the wrong type or size, one at a time, for every parameter of the public functions.

Each value either raises a ValueError of tritonpack or is accepted. The accepted kinds of values are listed here.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tritonpack
from tritonpack import BlockDiagonalMask as Mask
from tritonpack import flash_attn, packing

BAD: dict[str, Any] = {
    "none": None,
    "text": "text",
    "bytes": b"ab",
    "half": 1.5,
    "four.0": 4.0,
    "minus1": -1,
    "zero": 0,
    "true": True,
    "nan": float("nan"),
    "inf": float("inf"),
    "huge": 2**70,
    "complex": 1j,
    "empty": [],
    "ints": [1, 2],
    "texts": ["a"],
    "nones": [None],
    "bools": [True, False],
    "ragged": [[1], [1, 2]],
    "mapping": {},
    "set": {1},
    "range": range(3),
    "object": object(),
    "class": int,
    "function": lambda *args, **keywords: None,
    "np3": np.int64(3),
    "array": np.array([1, 2]),
    "floats": np.array([0.5, 1.0]),
    "objects": np.array([None, 1], dtype=object),
    "tensor0": torch.tensor(3),
    "tensor-floats": torch.tensor([0.5, 1.0]),
    "tensor-bools": torch.tensor([True, False]),
    "tensor-u16": torch.tensor([0, 1, 2], dtype=torch.uint16),
    "tensor-2d": torch.zeros(2, 2, dtype=torch.int64),
    "tensor-complex": torch.zeros(3, dtype=torch.complex64),
}

LENGTHS = [5, 3, 4, 4, 2, 6, 8, 8]
ROWS = torch.randn(5, 2, 16)
OFFSETS = torch.tensor([0, 2, 5], dtype=torch.int32)
MASK = Mask.from_seqlens([2, 3])
PLAN = packing.plan_epoch(LENGTHS, 8, 2)
DOCUMENTS = [[1] * length for length in LENGTHS]
NUMPY = "np3"
COUNTS = "none np3"
REACH = {"causal": "true", "window": "ints", "chunk_size": "none huge np3", "spans": "none"}
QKV = {"q": "", "k": "", "v": ""}
ATTENTION = {
    "dropout_p": "zero", "softmax_scale": "none half four.0 huge", "causal": "true",
    "window_size": "ints array objects",
    "softcap": "none half four.0 zero huge", "alibi_slopes": "none tensor-floats", "return_attn_probs": "true",
    "s_aux": "none tensor-floats", "backend": "",
}  # fmt: skip
SHORT = {name: ATTENTION[name] for name in ("softmax_scale", "causal", "softcap", "return_attn_probs")}
LONGEST = "none np3 tensor0"


def batch(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, ROWS[None])


def stream(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, ROWS)


def loaded(make: Callable[..., Any]) -> Callable[..., Any]:
    """Call a function and read everything from the iterator that it returns."""
    return lambda *args, **keywords: list(make(*args, **keywords))


# Name -> a function, valid arguments, and for each parameter the values of `BAD` that it accepts.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, str]]] = {
    "from_seqlens": (
        Mask.from_seqlens,
        {"seqlens": [2, 3]},
        {"seqlens": "empty ints array range", "seqlens_k": "none ints array", **REACH},
    ),
    "from_cu_seqlens": (
        Mask.from_cu_seqlens,
        {"cu_seqlens": [0, 2, 5], "total_q": 5},
        {"cu_seqlens": "range", "cu_seqlens_k": "none range", "total_q": "none", "total_k": "none", **REACH},
    ),
    "from_position_ids": (
        Mask.from_position_ids,
        {"position_ids": torch.arange(5)},
        {"position_ids": "tensor-2d", **REACH},
    ),
    "from_segment_ids": (
        Mask.from_segment_ids,
        {"segment_ids": torch.tensor([1, 1, 2])},
        {"segment_ids": "tensor-2d", **REACH, "spans": "none"},
    ),
    "from_padding_mask": (
        Mask.from_padding_mask,
        {"attention_mask": torch.tensor([[1, 1, 0]])},
        {"attention_mask": "tensor-bools tensor-2d", **REACH, "spans": "none"},
    ),
    "BlockDiagonalMask": (
        Mask,
        {"key_start": MASK.key_start, "key_stop": MASK.key_stop, "num_keys": 5},
        {
            "key_start": "", "key_stop": "", "num_keys": "", "diagonal": "none",
            "document_source": "none class function", "max_documents": "none zero",
        },
    ),
    "restrict": (
        MASK.restrict,
        {},
        {"query_rows": "none empty ints array range", "key_positions": "none empty ints array range"},
    ),
    "to_dense": (MASK.to_dense, {}, {"dtype": "", "additive": ""}),
    "to_block_mask": (MASK.to_block_mask, {}, {"BLOCK_SIZE": "ints"}),
    "varlen_attention": (
        tritonpack.varlen_attention,
        {**stream(*"qkv"), "mask": MASK},
        {
            **QKV, "mask": "", "scale": "none half four.0 huge", "softcap": "half four.0 zero huge",
            "sinks": "none tensor-floats", "alibi_slopes": "none tensor-floats", "dropout_p": "zero",
            "dropout_seed": "none zero tensor0", "pack_invariant": "true", "return_lse": "true", "backend": "",
        },
    ),
    "flash_attn_func": (flash_attn.flash_attn_func, batch(*"qkv"), QKV | ATTENTION),
    "flash_attn_qkvpacked_func": (
        flash_attn.flash_attn_qkvpacked_func,
        {"qkv": torch.randn(1, 5, 3, 2, 16)},
        {"qkv": ""},
    ),
    "flash_attn_kvpacked_func": (
        flash_attn.flash_attn_kvpacked_func,
        {**batch("q"), "kv": torch.randn(1, 5, 2, 2, 16)},
        {"q": "", "kv": ""},
    ),
    "flash_attn_varlen_func": (
        flash_attn.flash_attn_varlen_func,
        {**stream(*"qkv"), "cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS},
        {
            **QKV, **ATTENTION, "cu_seqlens_q": "", "cu_seqlens_k": "", "max_seqlen_q": LONGEST,
            "max_seqlen_k": LONGEST, "seqused_q": "none", "seqused_k": "none", "block_table": "none",
        },
    ),
    "flash_attn_varlen_qkvpacked_func": (
        flash_attn.flash_attn_varlen_qkvpacked_func,
        {"qkv": torch.randn(5, 3, 2, 16), "cu_seqlens": OFFSETS},
        {"qkv": "", "cu_seqlens": "", "max_seqlen": LONGEST},
    ),
    "flash_attn_varlen_kvpacked_func": (
        flash_attn.flash_attn_varlen_kvpacked_func,
        {**stream("q"), "kv": torch.randn(5, 2, 2, 16), "cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS},
        {"q": "", "kv": "", "cu_seqlens_q": "", "cu_seqlens_k": ""},
    ),
    "fa3.flash_attn_func": (
        flash_attn.fa3.flash_attn_func,
        batch(*"qkv"),
        {**QKV, **SHORT, "attention_chunk": "none zero np3", "qv": "none", "q_descale": "none"},
    ),
    "fa3.flash_attn_qkvpacked_func": (
        flash_attn.fa3.flash_attn_qkvpacked_func,
        {"qkv": torch.randn(1, 5, 6, 16), "num_heads_q": 2},
        {"qkv": "", "num_heads_q": ""},
    ),
    "fa3.flash_attn_varlen_func": (
        flash_attn.fa3.flash_attn_varlen_func,
        {**stream(*"qkv"), "cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS},
        {**QKV, **SHORT, "cu_seqlens_q": "", "cu_seqlens_k": "", "seqused_q": "none", "max_seqlen_q": LONGEST},
    ),
    "fa4.flash_attn_func": (
        flash_attn.fa4.flash_attn_func,
        batch(*"qkv"),
        {**QKV, "causal": "true", "window_size": "ints array objects", "learnable_sink": "none tensor-floats"},
    ),
    "fa4.flash_attn_varlen_func": (
        flash_attn.fa4.flash_attn_varlen_func,
        {**stream(*"qkv"), "cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS},
        {**QKV, "cu_seqlens_q": "", "cu_seqlens_k": "", "max_seqlen_q": LONGEST, "seqused_q": "none"},
    ),
    "torch_varlen_attn": (
        flash_attn.torch_varlen_attn,
        {**stream("query", "key", "value"), "cu_seq_q": OFFSETS, "cu_seq_k": OFFSETS},
        {
            "query": "", "key": "", "value": "", "cu_seq_q": "", "cu_seq_k": "", "max_q": LONGEST, "is_causal": "true",
            "return_aux": "none", "scale": "none half four.0 huge", "enable_gqa": "none true", "seqused_k": "none",
            "num_splits": "none minus1 zero huge", "window_size": "ints array objects",
        },
    ),
    "unpad_input": (
        flash_attn.bert_padding.unpad_input,
        {"hidden_states": torch.randn(2, 3, 4), "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])},
        {"hidden_states": "", "attention_mask": "", "unused_mask": "none"},
    ),
    "pad_input": (
        flash_attn.bert_padding.pad_input,
        {"hidden_states": torch.randn(5, 4), "indices": torch.tensor([0, 1, 3, 4, 5]), "batch": 2, "seqlen": 3},
        {"hidden_states": "", "indices": "", "batch": NUMPY, "seqlen": NUMPY},
    ),
    "pack": (
        tritonpack.pack,
        {"lengths": LENGTHS, "capacity": 8},
        {"lengths": "ints array", "capacity": "", "algorithm": "", "max_items": COUNTS, "overlong": ""},
    ),
    "fit_lengths": (
        packing.fit_lengths,
        {"lengths": LENGTHS, "capacity": 8},
        {"lengths": "ints array", "capacity": "", "overlong": ""},
    ),
    "plan_epoch": (
        packing.plan_epoch,
        {"lengths": LENGTHS, "capacity": 8, "num_ranks": 2},
        {
            "lengths": "", "capacity": "", "num_ranks": NUMPY, "seed": "zero huge np3", "epoch": "zero huge np3",
            "objective": "", "tail": "",
            "shuffle": "true", "order": "none array ints range",
        },
    ),
    "plan_statistics": (
        packing.plan_statistics,
        {"plan": PLAN, "lengths": LENGTHS},
        {"plan": "", "lengths": "", "padded": "true"},
    ),
    "pack_stream": (
        loaded(tritonpack.pack_stream),
        {"documents": DOCUMENTS, "capacity": 8},
        {
            "documents": "empty ragged tensor-2d", "capacity": "", "window": NUMPY, "overlong": "", "max_items": COUNTS,
            "num_replicas": "none", "rank": "none zero", "shard": "true",
        },
    ),
    "BinDataset": (
        tritonpack.BinDataset,
        {"dataset": DOCUMENTS},
        {
            "dataset": "empty ints texts nones bools ragged range array floats objects tensor-floats tensor-bools "
            "tensor-u16 tensor-2d tensor-complex"
        },
    ),
    "MultipackDistributedBatchSampler": (
        loaded(tritonpack.MultipackDistributedBatchSampler),
        {"batch_max_length": 8, "lengths": LENGTHS, "num_replicas": 2, "rank": 0},
        {
            "batch_max_length": "", "lengths": "", "num_replicas": COUNTS, "rank": "zero",
            "seed": "none zero huge np3",
            "objective": "", "tail": "",
            "overlong": "", "shuffle": "true", "shard": "true",
        },
    ),
    "MultipackBatchSampler": (
        loaded(tritonpack.MultipackBatchSampler),
        {"sampler": range(8), "batch_size": 1, "batch_max_len": 8, "lengths": LENGTHS},
        {
            "sampler": "ints set range array tensor-u16", "batch_size": NUMPY, "batch_max_len": "", "lengths": "",
            "bin_size": COUNTS + " zero", "drop_last": "true", "sequential": "none true", "group_size": NUMPY,
            "seed": "none zero huge np3", "overlong": "", "num_replicas": COUNTS,
        },
    ),
    "PackingCollator": (
        tritonpack.PackingCollator,
        {},
        {
            "pad_to_multiple_of": "none", "pad_token_id": "none", "objective": "", "max_document_length": COUNTS,
            "per_token": "empty texts",
        },
    ),
    "a batch": (tritonpack.PackingCollator(), {"features": [{"input_ids": [1, 2]}]}, {"features": ""}),
    "input_ids": (
        lambda ids: tritonpack.PackingCollator()([{"input_ids": ids}]),
        {"ids": [1, 2]},
        {"ids": "ints array range tensor-u16"},
    ),
    "labels": (
        lambda labels: tritonpack.PackingCollator()([{"input_ids": [1, 2], "labels": labels}]),
        {"labels": [1, 2]},
        {"labels": "ints array"},
    ),
}  # fmt: skip
PARAMETERS = [(name, parameter) for name, (_, _, parameters) in CALLS.items() for parameter in parameters]


@pytest.mark.parametrize("name", CALLS)
def test_valid_call(name: str) -> None:
    function, arguments, _ = CALLS[name]
    function(**arguments)


@pytest.mark.parametrize(("name", "parameter"), PARAMETERS)
def test_wrong_values_raise_our_value_error(name: str, parameter: str) -> None:
    function, arguments, parameters = CALLS[name]
    taken, faults = set(), []
    for kind, value in BAD.items():
        try:
            function(**arguments | {parameter: value})
            taken.add(kind)
        except Exception as error:
            origin = error.__traceback__
            while origin is not None and origin.tb_next is not None:
                origin = origin.tb_next
            home = origin.tb_frame.f_globals["__name__"] if origin else ""
            if not isinstance(error, ValueError) or not home.startswith("tritonpack"):
                faults.append(f"{kind}: {type(error).__name__} of {home}: {error}")
    assert not faults
    assert taken == set(parameters[parameter].split())
