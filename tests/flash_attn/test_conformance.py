"""The checks of the conformance kit for each version of the functions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tritonpack.flash_attn import fa2, fa3, fa4, torch_varlen_attn
from tritonpack.testing import conformance

CHECKS = conformance.checks(only=["isolation/*", "slack/*", "empty/*", "lse/*", "dropout/*", "repeat/*", "inputs/*"])
NOT_OFFERED = {fa3.flash_attn_varlen_func: {"dropout"}, fa4.flash_attn_varlen_func: {"dropout"},
               torch_varlen_attn: {"dropout"}}  # fmt: skip


@pytest.mark.fast("fa2-inputs/unchanged", "fa2-empty/keys", "fa2-slack/zeros", "fa2-lse/values", "fa2-dropout/weights")
@pytest.mark.parametrize("check", CHECKS, ids=str)
@pytest.mark.parametrize(
    "function",
    [
        fa2.flash_attn_varlen_func,
        pytest.param(fa3.flash_attn_varlen_func, marks=pytest.mark.slow),
        pytest.param(fa4.flash_attn_varlen_func, marks=pytest.mark.slow),
        pytest.param(torch_varlen_attn, marks=pytest.mark.slow),
    ],
    ids=["fa2", "fa3", "fa4", "torch"],
)
def test_conforms(function: Callable[..., Any], check: conformance.Check) -> None:
    result = check(function, torch.float32, "cpu")
    kind = str(check).split("/")[0]
    assert result.outcome == ("not offered" if kind in NOT_OFFERED.get(function, ()) else "pass"), result
