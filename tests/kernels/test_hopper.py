"""What the backend "gluon" refuses. tests/virtual_gpu/test_hopper.py runs its kernels."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tritonpack.backends import gluon
from tritonpack.errors import BackendUnavailableError
from tritonpack.options import make_options
from tritonpack.testing import Case, make_inputs

PLAIN: dict[str, Any] = {
    "scale": None, "softcap": 0.0, "sinks": None, "alibi_slopes": None, "dropout_p": 0.0, "dropout_seed": None,
    "pack_invariant": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "dtype", "keywords", "message"),
    [
        (Case("fp32", (5,), head_dim=64), torch.float32, {}, "takes bfloat16 and float16; got torch.float32"),
        (Case("dim", (5,), head_dim=80), torch.float16, {}, "head dimensions 64, 128, 256, the same .* got 80 and 80"),
        (Case("dims", (5,), head_dim=128, head_dim_v=64), torch.float16, {}, "got 128 and 64"),
        (Case("softcap", (5,), head_dim=64), torch.float16, {"softcap": 5.0}, "plain softmax attention; got softcap"),
        (Case("sinks", (5,), head_dim=64), torch.float16, {"sinks": torch.zeros(4)}, "got sinks"),
        (Case("alibi", (5,), head_dim=64), torch.float16, {"alibi_slopes": torch.zeros(4)}, "got alibi_slopes"),
        (Case("dropout", (5,), head_dim=64), torch.float16, {"dropout_p": 0.5, "dropout_seed": 1}, "got dropout_p"),
    ],
    ids=str,
)
def test_unsupported_inputs(case: Case, dtype: torch.dtype, keywords: dict[str, Any], message: str) -> None:
    inputs = make_inputs(case, dtype)
    options = make_options(inputs.q, inputs.mask, **PLAIN | keywords)
    with pytest.raises(BackendUnavailableError, match=f"backend='gluon' .*{message}.*Use backend='triton'"):
        gluon.plan_tiles(inputs.q, inputs.k, inputs.v, inputs.mask, options, backward=False)
