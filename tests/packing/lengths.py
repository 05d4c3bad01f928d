"""Lengths for tests of packing."""

import json
from pathlib import Path

import numpy as np

from tests.lengths import log_normal, lookalike

__all__ = ["log_normal", "openchat"]

_OPENCHAT = Path(__file__).parents[3] / "shared" / "data" / "openchat_lengths.json"


def openchat():
    """Token counts of 6,144 OpenChat conversations, cut at 2,048; similar random ones if the file is absent."""
    return np.array(json.loads(_OPENCHAT.read_text()), dtype=np.int32) if _OPENCHAT.exists() else lookalike()
