"""What the backend "gluon" refuses. tests/virtual_gpu/test_hopper.py runs its kernels."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tritonpack.backends import gluon
from tritonpack.errors import BackendUnavailableError
from tritonpack.options import make_options
from tritonpack.testing import Case, make_inputs

# What differs from a call in float16 at head dimension 64, and words of the refusal
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dtype": torch.float32}, "takes bfloat16 and float16; got torch.float32"),
    ({"head_dim": 80}, "head dimensions 64, 128, 256, the same .* got 80 and 80"),
    ({"head_dim": 128, "head_dim_v": 64}, "got 128 and 64"),
    ({"softcap": 5.0}, "plain softmax attention; got softcap"),
    ({"sinks": True}, "got sinks"),
    ({"alibi": "heads"}, "got alibi_slopes"),
    ({"dropout_p": 0.5}, "got dropout_p"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_unsupported_inputs(changes: dict[str, Any], message: str) -> None:
    others = {"head_dim": 64, **{name: x for name, x in changes.items() if name != "dtype"}}
    inputs = make_inputs(Case("refused", (5,), **others), changes.get("dtype", torch.float16))
    options = make_options(inputs.q, inputs.mask, sinks=inputs.sinks, **inputs.keywords)
    with pytest.raises(BackendUnavailableError, match=f"backend='gluon' .*{message}.*Use backend='triton'"):
        gluon.plan_tiles(inputs.q, inputs.k, inputs.v, inputs.mask, options, backward=False)
