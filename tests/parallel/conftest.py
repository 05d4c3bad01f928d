"""The pools of processes that distributed tests share."""

from collections.abc import Callable, Iterator

import pytest

from tests.parallel.pool import Pool


@pytest.fixture(scope="session")
def run_on() -> Iterator[Callable[[int, str, str], str]]:
    """Run a case on so many ranks: `run_on(size, module, name)`."""
    pools: dict[int, Pool] = {}

    def run(size: int, module: str, name: str) -> str:
        if size not in pools or pools[size].ended:
            pools[size] = Pool(size)
        return pools[size].run(module, name)

    yield run
    for pool in pools.values():
        pool.close()
