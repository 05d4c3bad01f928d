"""The sweep: every class of transformers' auto mappings that takes text, packed and held against each document alone.

`python -m tests.patches.sweep` runs it (`__main__.py`); `causal.py` has what other tests call for one causal type.
"""

from tests.patches.sweep.causal import (
    FORMS,
    LENGTHS,
    STOCK_FORMS,
    Row,
    _logits,
    _subject,
    alone,
    counts,
    difference,
    influence,
    judge,
    run,
    tolerance,
)

__all__ = [
    "FORMS", "LENGTHS", "STOCK_FORMS", "Row", "_logits", "_subject", "alone", "counts", "difference", "influence",
    "judge", "run", "tolerance",
]  # fmt: skip
