"""Positions that a model counts along the row, in rows so long that the difference shows."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tritonpack
from tests.patches import sweep, zoo
from tests.patches.sweep.build import build
from tests.patches.sweep.classes import cases
from tests.patches.sweep.judging import difference
from tests.patches.sweep.subject import Subject
from tests.small_copies.packed_forms import FORMS
from tritonpack.patches.configurations import rope_limits


@pytest.mark.parametrize("name", ["falcon-alibi", "bloom"])
def test_alibi_in_a_long_row(name: str) -> None:
    """Falcon rounds slopes times places to bfloat16, which is inexact beyond place 256. Places in the row would change
    a document; places in the document do not."""
    model = zoo.tiny_model(name, dtype=torch.float64)
    documents = zoo.documents((301, 40))
    alone = torch.cat([model(d).logits for d in documents], dim=1)
    places = torch.cat([torch.arange(d.shape[1]) for d in documents])[None]
    with tritonpack.patch(model):
        packed = model(torch.cat(documents, 1), position_ids=places).logits
    assert float((packed - alone).abs().max() / alone.abs().max()) < sweep.tolerance(model)


@pytest.mark.parametrize("name", ["bart", "trocr", "llama4_text", "roformer"])
def test_rows_longer_than_a_position_table(name: str) -> None:
    """A table of 128 places is enough for a row of 200 tokens, if no document is longer than the table."""
    model = zoo.tiny_model(name, dtype=torch.float64)
    documents = zoo.documents((90, 30, 80))
    alone = torch.cat([model(d).logits for d in documents], dim=1)
    places = torch.cat([torch.arange(d.shape[1]) for d in documents])[None]
    with tritonpack.patch(model):
        packed = model(torch.cat(documents, 1), position_ids=places).logits
    assert float((packed - alone).abs().max() / alone.abs().max()) < sweep.tolerance(model)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rotary_embeddings_that_depend_on_the_longest_document(kind: str) -> None:
    """A long document would change a short one beside it. Documents on one side of the limit are exact."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 8}
    model = zoo.tiny_model("llama", dtype=torch.float64)
    config = copy.deepcopy(model.config)
    config.rope_parameters, config.max_position_embeddings = rope, 8
    torch.manual_seed(0)
    model = type(model)(config).double().eval()

    def differs(lengths: tuple[int, ...]) -> float:
        documents = zoo.documents(lengths)
        alone = torch.cat([model(d).logits for d in documents], dim=1)
        places = torch.cat([torch.arange(n) for n in lengths])[None]
        with tritonpack.patch(model):
            packed = model(torch.cat(documents, 1), position_ids=places).logits
        return float((packed - alone).abs().max() / alone.abs().max())

    assert differs((3, 8, 5)) < sweep.tolerance(model)
    with pytest.raises(ValueError, match=f"'{kind}'.* more than 8 tokens.*calls of their own"):
        differs((3, 12, 5))
    if kind == "longrope":
        assert differs((9, 12)) < sweep.tolerance(model)


LONG = {"rope_type": "longrope", "original_max_position_embeddings": 8}


@pytest.mark.parametrize(
    ("rope", "limits"),
    [
        (None, []),
        ({"rope_type": "yarn", "original_max_position_embeddings": 8}, []),
        (LONG, [("longrope", 8)]),
        ({"rope_type": "longrope"}, [("longrope", 32)]),
        ({"rope_type": "dynamic"}, [("dynamic", 32)]),
        ({"rope_type": "dynamic_ours"}, [("dynamic_ours", 32)]),
        ({"full_attention": LONG, "sliding_attention": {"rope_type": "default"}}, [("longrope", 8)]),
    ],
)
def test_limits_of_rotary_embeddings(rope: Any, limits: list[tuple[str, int]]) -> None:
    """In transformers, every type with "dynamic" in its name depends on the longest document."""
    assert rope_limits(SimpleNamespace(rope_parameters=rope, max_position_embeddings=32)) == limits


@pytest.mark.parametrize("name", ["esm", "layoutlmv3", "luke", "m2m_100", "mpnet", "roberta", "xmod"])
def test_padding_tokens_inside_documents(name: str) -> None:
    """These models don't count the padding token as a place, whatever the mask says."""
    model = build(next(case for case in cases() if case.model_type == name and "BASE" in case.mappings))
    subject = Subject(model)
    padding = getattr(getattr(model, "embeddings", None), "padding_idx", model.config.pad_token_id)
    documents = subject.draw((7, 4, 9, 2))
    for document, places in zip(documents, ([1, 4], [0, 3], [8], []), strict=True):
        document[0, places] = padding
    alone = subject.alone(documents)
    with torch.no_grad(), tritonpack.patch(model):
        for form in ("position_ids", "segments_alone", "two_rows_padded"):
            batch = subject.lay_out(FORMS[form], documents)
            got = subject.gather(subject.call(batch), batch)
            assert not got.problems
            assert difference(alone, got.parts) < sweep.tolerance(model), form
