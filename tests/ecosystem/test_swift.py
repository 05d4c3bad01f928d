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


def one_row(rest: int = 0) -> dict[str, Tensor]:
    """The row of `padding_free`, with `rest` tokens of padding, whose position ids are 0."""
    labels = [torch.cat([torch.tensor([[-100]]), ids[:, 1:]], dim=1) for ids in DOCUMENTS]
    positions = [torch.arange(ids.shape[1])[None] for ids in DOCUMENTS]
    columns = {"input_ids": (DOCUMENTS, 0), "labels": (labels, -100), "position_ids": (positions, 0)}
    return {name: torch.cat([*x, torch.full((1, rest), fill)], dim=1) for name, (x, fill) in columns.items()}


def with_offsets(row: dict[str, Tensor]) -> dict[str, Any]:
    begins = (row["position_ids"][0] == 0).nonzero().flatten()
    offsets = torch.cat([begins, torch.tensor([row["position_ids"].shape[1]])]).int()
    longest = offsets.diff().max()
    return {
        **row, "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": longest, "max_length_k": longest
    }  # fmt: skip


@pytest.mark.parametrize("rest", [0, 5])
@pytest.mark.parametrize("form", [dict, with_offsets], ids=["positions", "offsets"])
def test_documents_stay_apart(form: Any, rest: int) -> None:
    model = tiny_model("mistral")
    want = outcome(model, *({"input_ids": ids, "labels": ids} for ids in DOCUMENTS))
    tritonpack.patch(model)
    assert difference(outcome(model, form(one_row(rest))), want) < EXACT


def test_contradicting_offsets_are_refused() -> None:
    model = tiny_model("mistral")
    tritonpack.patch(model)
    row = with_offsets(one_row())
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
