"""The large cases of the tests on a GPU, and which cases the backend "gluon" and small GPUs run."""

from typing import Any

import torch

from tritonpack.testing import Case

HOPPER_HEAD_DIMS = (64, 128, 256)

LARGE = (
    Case("long", (4096,), heads=8, kv_heads=2, head_dim=128),
    Case("ordinary", (700, 130, 0, 1500, 63, 1, 900), heads=8, kv_heads=2, head_dim=128, slack=77),
    Case("ordinary-64", (700, 130, 0, 1500, 63, 1, 900), heads=8, kv_heads=8, head_dim=64),
    Case("ordinary-256", (700, 130, 0, 1500, 63, 1), heads=4, kv_heads=1, head_dim=256),
    Case("tiny", (20,) * 150, heads=8, kv_heads=2, head_dim=128),
    Case("bidirectional", (700, 130, 1500), heads=8, kv_heads=2, head_dim=128, causal=False),
    Case("window", (2000, 300), heads=8, kv_heads=2, head_dim=128, window=(256, 0)),
    Case("cross", (300, 900), (1500, 200), heads=8, kv_heads=2, head_dim=128),
    Case("softcap", (700, 130, 0, 1500), heads=8, kv_heads=4, head_dim=256, softcap=50.0),
    Case("sinks", (700, 130, 0, 1500), heads=16, kv_heads=2, head_dim=64, sinks=True, window=(128, 0)),
    Case("alibi", (700, 130, 0, 1500), heads=8, kv_heads=8, head_dim=128, alibi="documents"),
    Case("dropout", (700, 130, 0, 1500), heads=8, kv_heads=2, head_dim=128, dropout_p=0.1),
    Case("everything", (700, 1, 1500), heads=8, kv_heads=2, head_dim=64, softcap=20.0, sinks=True, alibi="heads",
         dropout_p=0.1, window=(256, 0)),
    Case("values-128", (700, 130, 500), heads=8, kv_heads=8, head_dim=192, head_dim_v=128),
    Case("ordinary-512", (700, 130, 0, 500), heads=4, kv_heads=1, head_dim=512),
)  # fmt: skip


def is_plain(case: Case) -> bool:
    """Whether a case is softmax attention of documents alone, as the backend "gluon" computes it."""
    return not (case.softcap or case.sinks or case.alibi or case.dropout_p or case.head_dim_v or case.parents)


def why_too_large(case: Case, dtype: torch.dtype, shared_bytes: int) -> str:
    """Why a GPU whose programs get at most this much shared memory has no room for a case; empty if it has.

    Above head dimension 256 kernels in float32 take up to 160 KiB on NVIDIA; sm_86, sm_89 and sm_120 have 99.
    """
    kib = shared_bytes // 1024
    if (
        dtype == torch.float32
        and max(case.head_dim, case.head_dim_v or 0) > 256
        and kib < 160
        and not torch.version.hip
    ):
        return f"float32 above head dimension 256 takes up to 160 KiB of shared memory; this GPU has {kib}"
    return ""


def shared_bytes() -> int:
    """The shared memory that a program can have on this GPU."""
    from triton.runtime import driver

    utils: Any = driver.active.utils
    return int(utils.get_device_properties(driver.active.get_current_device())["max_shared_mem"])
