import pytest
import torch

from tritonpack.backends.dropout import keep_mask, philox


@pytest.mark.parametrize(
    ("first", "second", "key", "words"),
    [
        (0, 0, 0, (0x257A3673, 0xCD26BE2A)),
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, (0xAB302C4D, 0x3DC9D239)),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, (0xBEDBBE6B, 0xE4C770B3)),
    ],
)
def test_known_answers(first: int, second: int, key: int, words: tuple[int, int]) -> None:
    """The known answers of Random123, the library of the paper's authors, for philox2x32 with 7 rounds."""
    found = philox(torch.tensor(key), torch.tensor(first), torch.tensor(second))
    assert tuple(word.item() for word in found) == words


def philox_of_integers(key: int, first: int, second: int) -> tuple[int, int]:
    """The generator from its definition in the paper, on integers of any size."""
    for number in range(7):
        product = first * 0xD256D193
        first, second = product >> 32 ^ (key + number * 0x9E3779B9) % 2**32 ^ second, product % 2**32
    return first, second


def number_of(seed: int, head: int, query: int, key: int) -> int:
    """The random number of 31 bits of a pair, as docs/math.md defines it."""
    head_key, _ = philox_of_integers(seed % 2**32, head, seed >> 32)
    word = philox_of_integers(head_key, query // 2, key // 2)[query % 2]
    halves = divmod(word, 2**16)
    high, low = halves if key % 2 else reversed(halves)
    return (high * 2**16 + low) // 2


@pytest.mark.parametrize("seed", [7, 2**40 + 3])
def test_a_pair_is_dropped_exactly_if_its_number_is_small(seed: int) -> None:
    """Kept at the bound of its number, dropped one step above, also at odd and at large places."""
    for head in (0, 5):
        for query in (0, 1, 2, 3, 2**31 - 2, 2**31 - 1):
            for key in (0, 1, 6, 7, 2**30 + 1):
                place = [torch.tensor(x) for x in (seed, head, query, key)]
                bound = number_of(seed, head, query, key)
                assert keep_mask(*place, bound / 2**31)
                assert not keep_mask(*place, (bound + 1) / 2**31)


@pytest.mark.parametrize("dropout_p", [pytest.param(0.1, marks=pytest.mark.slow), 0.5])
def test_pairs_are_dropped_independently(dropout_p: float) -> None:
    """As often as asked, and as often as by chance together with a neighbour or the transposed pair."""
    heads, queries, keys = (torch.arange(n).view(shape) for n, shape in ((4, (4, 1, 1)), (512, (-1, 1)), (512, (-1,))))
    drops = torch.stack(
        [~keep_mask(torch.tensor(seed), heads, queries, keys, dropout_p) for seed in (7, 8, 7 + 2**32)]
    )  # [seed, head, query, key]
    deviation = (dropout_p * (1 - dropout_p) / drops.numel()) ** 0.5
    assert abs(drops.double().mean() - dropout_p) < 4 * deviation
    for axes in ((0,), (1,), (2,), (3,), (2, 3)):
        both = (drops & drops.roll((1,) * len(axes), axes)).double().mean()
        assert abs(both - dropout_p**2) < 4 * deviation
    both = (drops & drops.mT).double().mean()
    assert abs(both - dropout_p**2) < 4 * deviation
