"""`python -m tests.parallel.every_type`: whether each causal model type is exact on two ranks, or refused."""

from collections import Counter

import torch

from tests.parallel.pool import Pool
from tests.patches.zoo import EXACT, build
from tritonpack import SequenceParallel, UnsupportedModelError, patch

LENGTHS = (5, 11, 3, 9)
TOLERANCE = 1e-5  # some families compute parts in float32


def verdict(name):
    """The result for a model type: "exact", "refused: ..." or "WRONG by ..."."""
    model = build(name).eval()
    ids = torch.randint(10, 30, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    if name == "xlm-roberta":
        ids[0, [1, 8, 12, 20]] = model.config.pad_token_id  # inside documents
    batch = {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]}
    with torch.no_grad():
        with patch(model):
            wanted = model(**batch, use_cache=False).logits
        try:
            with SequenceParallel(model, gather_outputs=True):
                got = model(**batch).logits
        except UnsupportedModelError as error:
            return f"refused: {error}"
    off = ((got - wanted).abs().max() / wanted.abs().max()).item()
    return "exact" if off < TOLERANCE else f"WRONG by {off:.1e}"


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
