"""The sweep: every class of transformers' auto mappings that takes text, packed and compared with each document alone.

`python -m tests.patches.sweep` runs it (`__main__.py`); `causal.py` has what other tests call for one causal type.
"""

from tests.patches.sweep.causal import (
    FORMS,
    LENGTHS,
    STOCK_FORMS,
    Row,
    alone,
    difference,
    judge,
    logits,
    run,
    tolerance,
)

__all__ = ["FORMS", "LENGTHS", "STOCK_FORMS", "Row", "alone", "difference", "judge", "logits", "run", "tolerance"]
