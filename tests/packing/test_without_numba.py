"""Without numba, packing and planning raise an error with the remedy, and the rest of tritonpack.packing works."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
sys.modules["numba"] = None  # `import numba` raises ImportError from here on

from tritonpack.packing import *

lengths = [3, 2, 4, 1]
documents = [{"input_ids": list(range(1, length + 1))} for length in lengths]
for call in (
    lambda: pack(lengths, 4), lambda: pack_stream(documents, 4), lambda: plan_epoch(lengths, 4, 1),
    lambda: list(MultipackBatchSampler(range(4), 1, 4, lengths)),
    lambda: list(MultipackDistributedBatchSampler(4, lengths, 1, 0)),
):
    try:
        call()
    except ImportError as error:
        assert "Install it: pip install numba." in str(error)
    else:
        raise AssertionError("it worked without numba")
assert PackingCollator()(documents)["cu_seq_lens_q"].tolist() == [0, 3, 5, 9, 10]
assert fit_lengths(lengths, 2, "split").lengths.tolist() == [2, 1, 2, 2, 2, 1]
assert BinDataset(documents)[[1, 0]] == documents[1::-1]
"""


@pytest.mark.slow
def test_only_packing_and_planning_need_numba():
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
