"""`attend` in groups of processes; exchange_cases.py says what each checks."""

import pytest

from tests.parallel import world


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_compute_what_one_process_does(size, tmp_path):
    world.run("exchange_cases", size, tmp_path)
