"""Batches in ms-swift's formats: its own collator where it is installed, else rebuilt.

With `packing` and `padding_free` a batch is one row with position ids that restart and no mask; some templates add
`cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k`, the latter two as tensors. Without them it is a
padded batch.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tritonpack
from tests.ecosystem.test_llama_factory import difference, outcome
from tests.ecosystem.training import EXACT, features, tokenizer
from tests.patches.models import tiny_model

DOCUMENTS = [torch.tensor([document["input_ids"]]) for document in features()[:5]]


def one_row() -> dict[str, Tensor]:
    labels = [torch.cat([torch.tensor([[-100]]), ids[:, 1:]], dim=1) for ids in DOCUMENTS]
    positions = [torch.arange(ids.shape[1])[None] for ids in DOCUMENTS]
    columns = {"input_ids": DOCUMENTS, "labels": labels, "position_ids": positions}
    return {name: torch.cat(parts, dim=1) for name, parts in columns.items()}


def with_offsets(row: dict[str, Tensor]) -> dict[str, Any]:
    begins = (row["position_ids"][0] == 0).nonzero().flatten()
    offsets = torch.cat([begins, torch.tensor([row["position_ids"].shape[1]])]).int()
    longest = offsets.diff().max()
    return {
        **row, "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": longest, "max_length_k": longest
    }  # fmt: skip


def test_documents_stay_apart() -> None:
    """With position ids alone and with offsets; offsets that contradict are refused."""
    model, row = tiny_model("mistral"), with_offsets(one_row())
    want = outcome(model, *({"input_ids": ids, "labels": ids} for ids in DOCUMENTS))
    tritonpack.patch(model)
    for given in (one_row(), row):
        assert difference(outcome(model, given), want) < EXACT
    row["cu_seq_lens_q"] = row["cu_seq_lens_k"] = row["cu_seq_lens_q"][[0, 2, 3, 4, 5]]
    with pytest.raises(ValueError, match=r"cu_seq_lens_q and position_ids contradict each other \(row 0, token 9"):
        model(**row)


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
    assert {name: packed[name].tolist() for name in one_row()} == {name: x.tolist() for name, x in one_row().items()}
    model.double()
    want = outcome(model, *({"input_ids": ids, "labels": ids} for ids in DOCUMENTS))
    tritonpack.patch(model)
    assert difference(outcome(model, packed), want) < EXACT
    assert difference(outcome(model, padded), want) < EXACT
