"""Workers of data loaders end with the test that made them."""

from collections.abc import Iterator

import pytest
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as Workers


@pytest.fixture(autouse=True)
def _workers_end_with_their_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A loader that the garbage collector ends waits for 5 seconds for each worker: its queues may be closed before."""
    made, start = [], Workers.__init__

    def start_and_note(self: Workers, loader: object) -> None:
        start(self, loader)
        made.append(self)

    monkeypatch.setattr(Workers, "__init__", start_and_note)
    yield
    for one in made:
        one._shutdown_workers()
