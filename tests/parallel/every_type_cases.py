"""Causal model types under SequenceParallel: logits equal those of one process, or the type is refused with a reason.

Each type below has a feature of its own; `python -m tests.parallel.every_type` tries all types.
"""

from functools import partial

import torch

from tests.patches.zoo import build
from tritonpack import SequenceParallel, UnsupportedModelError, patch

FEATURES = {
    "bart": "positions looked up in a table",
    "deepseek_v3": "values narrower than keys",
    "falcon": "rewritten attention",
    "gemma3": "the outer model makes the masks of all layers",
    "gemma3n_text": "keys shared between layers",
    "gpt2": "reads the shape of the mask",
    "gpt_bigcode": "one key head",
    "llama4_text": "chunks, and queries scaled by position",
    "qwen3_moe": "experts",
    "xlm-roberta": "positions counted from the padding token's number, without padding tokens",
}
LENGTHS = (5, 11, 3, 9)
TOLERANCE = 1e-5  # some families compute parts in float32


def verdict(name):
    """The result for a model type: "exact", "refused: ..." or "WRONG by ..."."""
    model = build(name).eval()
    ids = torch.randint(10, 30, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    if name == "xlm-roberta":
        ids[0, [1, 8, 12, 20]] = model.config.pad_token_id  # inside documents
    batch = {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]}
    if model.config.model_type in ("musicgen", "musicgen_melody", "musicgen_decoder", "musicgen_melody_decoder"):
        batch["input_ids"] = ids.repeat(2, 1)  # codebooks
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


def is_exact(name):
    assert verdict(name) == "exact"


CASES = {name: partial(is_exact, name) for name in FEATURES}
