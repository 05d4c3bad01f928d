"""Without numba, packing and planning raise an error with the remedy, and the rest of tritonpack.packing works."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
sys.modules["numba"] = None  # `import numba` raises ImportError from here on

import numpy as np
import tritonpack
from tritonpack.packing import *

lengths = [3, 2, 4, 1]
documents = [{"input_ids": list(range(1, length + 1))} for length in lengths]
refused = {
    "pack": lambda: pack(lengths, 4),
    "pack_stream": lambda: pack_stream(documents, 4),
    "plan_epoch": lambda: plan_epoch(lengths, 4, 1),
    "MultipackBatchSampler": lambda: list(MultipackBatchSampler(range(4), 1, 4, lengths)),
    "MultipackDistributedBatchSampler": lambda: list(MultipackDistributedBatchSampler(4, lengths, 1, 0)),
}
for name, call in refused.items():
    try:
        call()
    except ImportError as error:
        assert "Install it: pip install numba." in str(error), name
    else:
        raise AssertionError(f"{name} worked without numba")

batch = PackingCollator()(documents)
assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 9, 10]
assert fit_lengths(lengths, 2, "split").lengths.tolist() == [2, 1, 2, 2, 2, 1]
assert BinDataset(documents)[[1, 0]] == documents[1::-1]
plan = Plan(np.array([0, 3]), np.array([0, 2]), 1, 4)
assert plan_statistics(plan, lengths).tokens == 4
made = Packing(
    np.array([0, 3], np.int32), np.zeros(2, np.int64), np.array([3, 1], np.int32), np.array([0, 2]), 4, None,
    fit_lengths([3, 1], 4).report,
)
assert made.lower_bound == 1
"""


@pytest.mark.slow
def test_only_packing_and_planning_need_numba():
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
