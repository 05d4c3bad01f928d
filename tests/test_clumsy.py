"""Values of the wrong type or size, one at a time: each raises a ValueError of tritonpack or is accepted."""

from collections.abc import Callable
from traceback import walk_tb
from typing import Any

import numpy as np
import pytest
import torch

import tritonpack
from tritonpack import BlockDiagonalMask as Mask
from tritonpack import flash_attn, packing

BAD: dict[str, Any] = {
    "none": None, "text": "text", "bytes": b"ab", "half": 1.5, "four.0": 4.0, "minus1": -1, "zero": 0, "true": True,
    "nan": float("nan"), "inf": float("inf"), "huge": 2**70, "empty": [], "ints": [1, 2], "bools": [True, False],
    "ragged": [[1], [1, 2]], "mapping": {}, "set": {1}, "range": range(3), "object": object(), "np3": np.int64(3),
    "array": np.array([1, 2]), "tensor0": torch.tensor(3), "tensor-floats": torch.tensor([0.5, 1.0]),
    "tensor-bools": torch.tensor([True, False]), "tensor-u16": torch.tensor([0, 1, 2], dtype=torch.uint16),
    "tensor-2d": torch.zeros(2, 2, dtype=torch.int64),
}  # fmt: skip

LENGTHS = [5, 3, 4, 4, 2, 6, 8, 8]
ROWS = torch.randn(5, 2, 16)
QKV = dict.fromkeys("qkv", ROWS)
MASK = Mask.from_seqlens([2, 3])
DOCUMENTS = [[1] * length for length in LENGTHS]


def loaded(make: Callable[..., Any]) -> Callable[..., Any]:
    """Call a function and read everything from the iterator that it returns."""
    return lambda *args, **keywords: list(make(*args, **keywords))


# Name -> a function, valid arguments, and for some parameters the values of `BAD` that it accepts: for each kind of
# check one parameter that has it.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, str]]] = {
    "from_seqlens": (
        Mask.from_seqlens, {"seqlens": [2, 3]},
        {"seqlens": "empty ints array range", "causal": "true", "window": "ints", "chunk_size": "none huge np3"},
    ),
    "from_cu_seqlens": (
        Mask.from_cu_seqlens, {"cu_seqlens": [0, 2, 5], "total_q": 5},
        {"cu_seqlens": "range", "cu_seqlens_k": "none range", "total_q": "none"},
    ),
    "from_position_ids": (
        Mask.from_position_ids, {"position_ids": torch.arange(5)}, {"position_ids": "tensor-2d", "spans": "none"},
    ),
    "from_padding_mask": (
        Mask.from_padding_mask, {"attention_mask": torch.tensor([[1, 1, 0]])},
        {"attention_mask": "tensor-bools tensor-2d"},
    ),
    "BlockDiagonalMask": (
        Mask, {"key_start": MASK.key_start, "key_stop": MASK.key_stop, "num_keys": 5},
        {"key_start": "", "num_keys": "", "max_documents": "none zero"},
    ),
    "restrict": (MASK.restrict, {}, {"query_rows": "none empty ints array range"}),
    "to_dense": (MASK.to_dense, {}, {"dtype": ""}),
    "varlen_attention": (
        tritonpack.varlen_attention, {**QKV, "mask": MASK},
        {
            "q": "", "mask": "", "scale": "none half four.0 huge", "softcap": "half four.0 zero huge",
            "sinks": "none tensor-floats", "alibi_slopes": "none tensor-floats", "dropout_p": "zero",
            "dropout_seed": "none zero tensor0", "pack_invariant": "true", "return_lse": "true", "backend": "",
        },
    ),
    "flash_attn_func": (
        flash_attn.flash_attn_func, dict.fromkeys("qkv", ROWS[None]), {"v": "", "window_size": "ints"},
    ),
    "unpad_input": (
        flash_attn.bert_padding.unpad_input,
        {"hidden_states": torch.randn(2, 3, 4), "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])},
        {"hidden_states": ""},
    ),
    "pack": (tritonpack.pack, {"lengths": LENGTHS, "capacity": 8}, {"lengths": "ints array", "max_items": "none np3"}),
    "plan_epoch": (
        packing.plan_epoch, {"lengths": LENGTHS, "capacity": 8, "num_ranks": 2},
        {"seed": "zero huge np3", "objective": "", "shuffle": "true"},
    ),
    "pack_stream": (
        loaded(tritonpack.pack_stream), {"documents": DOCUMENTS, "capacity": 8},
        {"documents": "empty ragged tensor-2d", "window": "np3"},
    ),
    "MultipackBatchSampler": (
        loaded(tritonpack.MultipackBatchSampler),
        {"sampler": range(8), "batch_size": 1, "batch_max_len": 8, "lengths": LENGTHS},
        {"sampler": "ints set range array tensor-u16", "bin_size": "none np3 zero"},
    ),
    "PackingCollator": (tritonpack.PackingCollator, {}, {"pad_to_multiple_of": "none np3", "per_token": "empty"}),
    "a batch": (tritonpack.PackingCollator(), {"features": [{"input_ids": [1, 2]}]}, {"features": ""}),
}  # fmt: skip
PARAMETERS = [(name, parameter) for name, (_, _, parameters) in CALLS.items() for parameter in parameters]


@pytest.mark.parametrize(("name", "parameter"), PARAMETERS)
def test_wrong_values_raise_our_value_error(name: str, parameter: str) -> None:
    function, arguments, parameters = CALLS[name]
    function(**arguments)
    taken, faults = set(), []
    for kind, value in BAD.items():
        try:
            function(**arguments | {parameter: value})
            taken.add(kind)
        except Exception as error:
            home = [frame.f_globals["__name__"] for frame, _ in walk_tb(error.__traceback__)][-1]
            if not isinstance(error, ValueError) or not home.startswith("tritonpack"):
                faults.append(f"{kind}: {type(error).__name__} of {home}: {error}")
    assert not faults
    assert taken == set(parameters[parameter].split())
