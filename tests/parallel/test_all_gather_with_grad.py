"""AllGatherWithGrad without a process group. all_gather_with_grad_cases.py has the cases with one."""

import pytest

from tritonpack import AllGatherWithGrad


def test_needs_a_group():
    with pytest.raises(ValueError, match=r"no process group; call torch.distributed.init_process_group"):
        AllGatherWithGrad()
