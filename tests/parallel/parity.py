"""`python -m tests.parallel.parity`: differences between 2 or 4 ranks and one process, in losses and gradients.

Each row is a batch and family, each column an exchange and layout. A number is the largest difference in the loss or in
the gradient of a parameter, relative to the largest number of that tensor, in float64.
"""

from tests.parallel.models import BATCHES, alone_on, loss_of, make_model, on_ranks
from tests.parallel.pool import Pool

COLUMNS = [
    (exchange, layout)
    for exchange in ("all_gather", "group_cast", "ring", "ulysses")
    for layout in ("contiguous", "documents")
]
COLUMNS += [("ring", "zigzag"), ("ring", "stripe")]
ROWS = [("llama", batch) for batch in BATCHES] + [(family, "packed") for family in ("mistral", "gemma2", "gpt_oss")]


def difference(got, wanted):
    pairs = [(got.loss, wanted.loss), *((got.gradients[name], x) for name, x in wanted.gradients.items())]
    return max((((ours - theirs).abs().max() / theirs.abs().max()).item()) for ours, theirs in pairs)


def table():
    lines = ["family, batch".ljust(20) + "".join(f"{' '.join(column):>24}" for column in COLUMNS)]
    for family, batch in ROWS:
        cells = []
        for exchange, layout in COLUMNS:
            got = on_ranks(make_model(family), loss_of, BATCHES[batch](), exchange=exchange, layout=layout)
            cells.append(f"{difference(got, alone_on(family, batch)):>24.1e}")
        lines.append(f"{family} {batch}".ljust(20) + "".join(cells))
    print("\n".join(lines))


CASES = {"parity": table}

if __name__ == "__main__":
    for size in (2, 4):
        pool = Pool(size)
        print(f"{size} ranks\n{pool.run('parity', 'parity', patience=3600)}")
        pool.close()
