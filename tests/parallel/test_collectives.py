"""AllGatherWithGrad in groups of processes; collectives_cases.py says what each checks."""

import pytest

from tests.parallel import world
from tritonpack import AllGatherWithGrad


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_agree(size, tmp_path):
    world.run("collectives_cases", size, tmp_path)


def test_needs_a_group():
    with pytest.raises(ValueError, match=r"no process group; call torch.distributed.init_process_group"):
        AllGatherWithGrad()
