"""`python -m tests.parallel.every_type`: whether each causal model type is exact on two ranks, or refused."""

from collections import Counter

import torch

from tests.parallel.every_type_cases import verdict
from tests.parallel.pool import Pool
from tests.patches.zoo import EXACT


def sweep():
    counts = Counter()
    for name in EXACT:
        torch.manual_seed(0)
        found = verdict(name)
        counts[found.split()[0]] += 1
        print(f"{name}: {found}")
    print(dict(counts))
    assert not counts["WRONG"]


CASES = {"every type": sweep}

if __name__ == "__main__":
    pool = Pool(2)
    print(pool.run("every_type", "every type", patience=300))
    pool.close()
