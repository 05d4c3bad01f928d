"""Arguments under names that nothing reads, which resemble the names of arguments that tell documents apart."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from difflib import SequenceMatcher
from functools import cache
from typing import Any

from tritonpack.patches.call_arguments import TELLING

# Two names that are at least this similar count as misspellings of each other.
ALIKE = 0.885

# Names that other libraries use for these arguments, and the argument to pass instead.
FOREIGN = {
    r"((cu|max|cumulative|packed)_?)?(seq(uence)?|doc(ument)?|segment)s?_?(len(gth)?|offset|start)s?(_[qk])?"
    r"|((cumulative|input)_)?lengths|offsets|((seq(uence)?|doc(ument)?|segment)_)?boundaries|packed_seq_params"
    r"|num_(seq(uence)?|doc(ument)?|segment)s": "cu_seq_lens_q",
    r"(token_)?(seq(uence)?|doc(ument)?|segment)s?_?(id|idx|index|indice|number)(e?s)?|documents|segments"
    r"|(sample|batch|pack|example|group|episode)_ids": "seq_idx",
    r"pos(ition)?s?_?(id|idx|index|indice)(e?s)?|((seq(uence)?|doc(ument)?|segment)_)?pos(ition)?s?": "position_ids",
    r"(sub)?tree_?(ends?|parents?|out|mask|ids)|parents?(_ids)?|tout": "tree_ends",
    r"(attn|padding|key_padding|segment|doc(ument)?|block|packing|packed|eod)_masks?": "attention_mask",
}

REMEDIES = {
    "cu_seq_lens_q": "cu_seq_lens_q, the offsets where documents begin in the flattened rows, and last the number of "
    "tokens",
    "seq_idx": "seq_idx, the number of each token's document, of the shape of the tokens",
    "position_ids": "position_ids that restart where a document begins, of the shape of the tokens",
    "tree_ends": "tree_ends, the place after the last token below each token in its row, of the shape of the tokens",
    "attention_mask": "attention_mask, 0 for padding and 1, or the number of the document, for tokens",
}


def refuse_near_misses(arguments: Mapping[str, Any], known: Collection[str], model: str) -> None:
    """Refuse arguments that seem to tell documents apart and that a model's **kwargs would swallow.

    Args:
        arguments: a call's arguments by name; those that are None are ignored.
        known: the names in the model's own signature.
        model: the name of the model's class.
    """
    for name, value in arguments.items():
        if value is not None and name not in known and (meant := meant_by(name)):
            raise ValueError(
                f"{model} was called with {name!r}, which nothing reads, so documents would not be told apart by it. "
                f"Pass {REMEDIES[meant]}, or leave {name!r} out."
            )
    if arguments.get("cu_seq_lens_k") is not None and arguments.get("cu_seq_lens_q") is None:
        raise ValueError(
            f"{model} was called with 'cu_seq_lens_k' alone, which tells no documents apart. Pass "
            f"{REMEDIES['cu_seq_lens_q']}."
        )


@cache
def meant_by(name: str) -> str | None:
    """The argument that a name is probably meant for; None for a name that is read, and for an unrelated name."""
    if name in TELLING:
        return None
    for pattern, meant in FOREIGN.items():
        if re.fullmatch(pattern, name.lower()):
            return meant
    plain = name.replace("_", "").lower()
    for meant in TELLING:
        target = meant.replace("_", "")
        other = target in plain and len(plain) > len(target) + 1  # a mask or positions of something else
        if not other and SequenceMatcher(None, target, plain).ratio() >= ALIKE:
            return "cu_seq_lens_q" if meant == "cu_seq_lens_k" else meant
    return None
