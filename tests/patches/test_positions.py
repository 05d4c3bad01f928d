"""Positions that a model counts along the row, in rows long enough to tell."""

import pytest
import torch

import tritonpack
from tests.patches import sweep, zoo


@pytest.mark.parametrize("name", ["falcon-alibi", "bloom"])
def test_alibi_in_a_long_row(name: str) -> None:
    """Falcon rounds its slopes times places to bfloat16, where places beyond 256 aren't whole any more: those of the
    row would move a document, its own don't."""
    model = zoo.tiny_model(name, dtype=torch.float64)
    documents = zoo.documents((301, 40))
    alone = torch.cat([model(d).logits for d in documents], dim=1)
    places = torch.cat([torch.arange(d.shape[1]) for d in documents])[None]
    with tritonpack.patch(model):
        packed = model(torch.cat(documents, 1), position_ids=places).logits
    assert float((packed - alone).abs().max() / alone.abs().max()) < sweep.tolerance(model)


@pytest.mark.parametrize("name", ["bart", "trocr", "llama4_text", "roformer"])
def test_documents_longer_together_than_a_table(name: str) -> None:
    """A table of 128 places serves a row of 200 tokens, as long as no document is longer than it."""
    model = zoo.tiny_model(name, dtype=torch.float64)
    documents = zoo.documents((90, 30, 80))
    alone = torch.cat([model(d).logits for d in documents], dim=1)
    places = torch.cat([torch.arange(d.shape[1]) for d in documents])[None]
    with tritonpack.patch(model):
        packed = model(torch.cat(documents, 1), position_ids=places).logits
    assert float((packed - alone).abs().max() / alone.abs().max()) < sweep.tolerance(model)
