"""DeepSpeed with a patched model, on two processes."""

from importlib.util import find_spec

import pytest

from tests.parallel.pool import Pool, cases_of

if find_spec("deepspeed") is None:  # importing it here would choose its backend for all tests
    pytest.skip("needs deepspeed", allow_module_level=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases_of("deepspeed_cases", 2))
def test_two_ranks_with_deepspeed(name: str, ranks: Pool) -> None:
    ranks.run("deepspeed_cases", name)
