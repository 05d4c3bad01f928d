"""Datasets and streams that raise exceptions, or shrink: messages name the document, and keep the exception."""

import pytest

import tritonpack

DOCUMENTS = [{"input_ids": [5, 6, 7, 8]}] * 6


class Failing(list):
    """Documents, one of which can't be read."""

    def __init__(self, bad, error):
        super().__init__(DOCUMENTS)
        self.bad, self.error = bad, error

    def __getitem__(self, number):
        if number == self.bad:
            raise self.error
        return super().__getitem__(number)

    def __iter__(self):
        return (self[number] for number in range(len(self)))


class AtOnce(Failing):
    def __getitems__(self, numbers):
        return [self[number] for number in numbers]


WAYS = {
    "dataloader": lambda dataset, **options: list(tritonpack.dataloader(dataset, tokens=8, **options)),
    "pack_dataset": lambda dataset: list(tritonpack.pack_dataset(dataset, 8)),
    "loaded rows": lambda dataset: [
        tritonpack.pack_dataset(dataset, 8, lengths=[4] * 6)[number] for number in range(3)
    ],
    "bins": lambda dataset: tritonpack.BinDataset(dataset)[[1, 4]],
    "loaded": lambda dataset: list(tritonpack.dataloader(dataset, tokens=8, lengths=[4] * 6)),
    "workers": lambda dataset: list(tritonpack.dataloader(dataset, tokens=8, lengths=[4] * 6, num_workers=1)),
    "pack_stream": lambda dataset: list(tritonpack.pack_stream(dataset, 8)),
}


@pytest.mark.parametrize("kind", [Failing, AtOnce])
@pytest.mark.parametrize("way", WAYS)
def test_a_dataset_that_raises(way, kind):
    error = OSError("image is truncated")
    with pytest.raises(ValueError, match=r"document 4 .*can't be read: OSError: image is truncated") as info:
        WAYS[way](kind(4, error))
    assert way == "workers" or error in (info.value.__cause__, getattr(info.value.__cause__, "__cause__", None))


@pytest.mark.parametrize("kind", [Failing, AtOnce])
def test_a_dataset_that_shrinks(kind):
    dataset = kind(None, None)
    loader, packed = tritonpack.dataloader(dataset, tokens=8), tritonpack.pack_dataset(dataset, 8)
    del dataset[4:]
    message = r"document [45] can't be read: the dataset holds only 4 documents now\. It mustn't shrink"
    for load in (lambda: list(loader), lambda: [packed[number] for number in range(len(packed))]):
        with pytest.raises(ValueError, match=message) as info:
            load()
        assert isinstance(info.value.__cause__, IndexError)


@pytest.mark.parametrize(
    ("error", "kind"), [(ConnectionResetError("a"), ConnectionError), (TimeoutError(), TimeoutError)]
)
def test_a_failing_connection_keeps_its_kind(error, kind):
    """Programs catch it to resume."""
    for load in (WAYS["bins"], WAYS["pack_stream"]):
        with pytest.raises(kind, match=rf"document 4 .*can't be read: {type(error).__name__}") as info:
            load(Failing(4, error))
        assert info.value.__cause__ is error


def test_getitems_that_returns_too_few():
    class Short(AtOnce):
        def __getitems__(self, numbers):
            return super().__getitems__(numbers)[:1]

    with pytest.raises(ValueError, match=r"__getitems__ returned 1 document for the 2 numbers [0-5], [0-5]; it must"):
        list(tritonpack.dataloader(Short(None, None), tokens=8, lengths=[4] * 6))


def test_getitems_that_fails_only_at_once():
    class Fails(AtOnce):
        def __getitems__(self, numbers):
            raise OSError("no connection")

    with pytest.raises(ValueError, match=r"one of the documents 1, 4 can't be read: OSError: no connection"):
        tritonpack.BinDataset(Fails(None, None))[[1, 4]]


def test_a_stream_that_raises_while_documents_are_passed_over():
    documents = list(DOCUMENTS)
    stream = tritonpack.pack_stream(lambda: documents, 4, window=1)
    bins = iter(stream)
    for _ in range(5):
        next(bins)
    state = stream.state_dict()
    documents = Failing(1, OSError("no connection"))
    resumed = tritonpack.pack_stream(lambda: documents, 4, window=1)
    resumed.load_state_dict(state)
    with pytest.raises(ValueError, match="document 1 of the stream can't be read: OSError: no connection"):
        next(iter(resumed))
