"""What needs several ranks, in groups of 2 and 4 processes; the modules of cases say what each checks."""

import pytest

from tests.parallel import world


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_agree_with_one_process(size, tmp_path):
    modules = ["collectives_cases", "exchange_cases", "context_cases", "lifecycle_cases", "composition_cases"]
    world.run([*modules, "trainer_cases"], size, tmp_path)


@pytest.mark.slow
def test_ranks_agree_with_what_wraps_models(tmp_path):
    world.run(["library_cases", "every_type_cases"], 2, tmp_path)


@pytest.mark.interpreter
def test_ranks_agree_with_the_kernels(tmp_path):
    world.run(["kernel_cases"], 2, tmp_path)


def test_a_failure_on_one_rank_is_seen(tmp_path):
    with pytest.raises(AssertionError, match=r"(?s)on the last rank alone failed:.*ValueError: as it should"):
        world.run(["failing_cases"], 2, tmp_path)
