import pytest
import torch

from tritonpack.backends.dropout import keep_mask, philox


@pytest.mark.parametrize(
    ("first", "second", "key", "word"),
    [
        (0, 0, 0, 0x257A3673),
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xAB302C4D),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0xBEDBBE6B),
    ],
)
def test_known_answers(first: int, second: int, key: int, word: int) -> None:
    """The known answers of Random123, the library of the paper's authors, for philox2x32 with 7 rounds."""
    assert philox(torch.tensor(key), torch.tensor(first), torch.tensor(second)).item() == word


@pytest.mark.parametrize("dropout_p", [0.1, 0.5])
def test_pairs_are_dropped_independently(dropout_p: float) -> None:
    """As often as asked, and as often as by chance together with a neighbour along each axis or the transposed pair."""
    heads, queries, keys = (torch.arange(n).view(shape) for n, shape in ((4, (4, 1, 1)), (512, (-1, 1)), (512, (-1,))))
    drops = torch.stack(
        [~keep_mask(torch.tensor(seed), heads, queries, keys, dropout_p) for seed in (7, 8, 7 + 2**32)]
    )  # [seed, head, query, key]
    deviation = (dropout_p * (1 - dropout_p) / drops.numel()) ** 0.5
    assert abs(drops.double().mean() - dropout_p) < 4 * deviation
    for axis in range(4):
        both = (drops & drops.roll(1, axis)).double().mean()
        assert abs(both - dropout_p**2) < 4 * deviation
    both = (drops & drops.mT).double().mean()
    assert abs(both - dropout_p**2) < 4 * deviation
