"""What tests beside other libraries share."""

from collections.abc import Iterator

import pytest

from tests.parallel.pool import Pool


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()
