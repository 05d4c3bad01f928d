"""Batches of ms-swift's own collator, where it is installed.

With `packing` and `padding_free` a batch is one row with position ids that restart and no mask; without them it is a
padded batch.
"""

from pathlib import Path

import pytest
import torch

import tritonpack
from tests.ecosystem.training import EXACT, difference, features, outcome, tokenizer
from tests.patches.models import tiny_model

DOCUMENTS = [torch.tensor([document["input_ids"]]) for document in features()[:5]]


@pytest.mark.slow
def test_its_own_collator(tmp_path: Path) -> None:
    template = pytest.importorskip("swift.template", exc_type=ImportError)
    from swift.model import get_processor

    tokenizer().save_pretrained(tmp_path)
    model = tiny_model("llama")
    model.float().save_pretrained(tmp_path)
    collator = template.get_template(get_processor(str(tmp_path), model_type="llama"), template_type="dummy")
    collator.set_mode("train")
    encoded = [
        {"input_ids": ids[0].tolist(), "labels": [-100, *ids[0, 1:].tolist()], "length": ids.shape[1]}
        for ids in DOCUMENTS
    ]
    padded = collator.data_collator([dict(one) for one in encoded])
    collator.padding_free = True
    packed = collator.data_collator([dict(one) for one in encoded])
    assert packed["input_ids"].tolist() == torch.cat(DOCUMENTS, dim=1).tolist(), "one row"
    model.double()
    want = outcome(model, *({"input_ids": ids, "labels": ids} for ids in DOCUMENTS))
    tritonpack.patch(model)
    assert difference(outcome(model, packed), want) < EXACT
    assert difference(outcome(model, padded), want) < EXACT
