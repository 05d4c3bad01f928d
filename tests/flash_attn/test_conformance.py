"""The checks of the conformance kit for each version of the functions."""

from fnmatch import fnmatch

import pytest
import torch

from tritonpack.flash_attn import fa2, fa3, fa4, torch_varlen_attn
from tritonpack.testing import conformance

CHECKS = conformance.checks(skip=["*/head-dim-*-*", "*/head-dim-?[2-9]?"])
KINDS = {"fa3": ("dropout/*", "*/alibi*"), "fa4": ("dropout/*", "*/alibi*"),
         "torch": ("dropout/*", "*/alibi*", "*/softcap*", "*/sinks*")}  # that are not offered  # fmt: skip


FUNCTIONS = {"fa2": fa2.flash_attn_varlen_func, "fa3": fa3.flash_attn_varlen_func, "fa4": fa4.flash_attn_varlen_func,
             "torch": torch_varlen_attn}  # fmt: skip
FAST = (
    "fa2-forward/*", "fa2-backward/causal", "fa2-backward/softcap", "fa2-backward/alibi-documents",
    "fa2-backward/sinks", "fa3-forward/window-left-16", "fa3-backward/cross", "fa4-backward/window-both",
    "fa4-backward/sinks", "torch-backward/window-self", "torch-forward/scale", "fa2-inputs/unchanged",
    "fa2-empty/keys", "fa2-slack/*", "fa2-lse/*", "fa3-lse/empty-rows", "fa2-dropout/*",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "check"),
    [
        pytest.param(
            name,
            check,
            id=f"{name}-{check}",
            marks=[] if any(fnmatch(f"{name}-{check}", one) for one in FAST) else pytest.mark.slow,
        )
        for name in FUNCTIONS
        for check in CHECKS
    ],
)
def test_conforms(name: str, check: conformance.Check) -> None:
    result = check(FUNCTIONS[name], torch.float32, "cpu")
    offered = not any(fnmatch(str(check), one) for one in KINDS.get(name, ()))
    assert result.outcome == ("pass" if offered else "not offered"), result
