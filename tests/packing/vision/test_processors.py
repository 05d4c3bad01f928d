"""Columns as processors of transformers make them: packed, and one by one through the model."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("PIL")

import tritonpack
from tests.packing.vision.examples import build
from tests.packing.vision.processors import PROCESSORS, processed
from tests.patches.comparison import apart, tolerance


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSORS)
def test_packed_equals_what_the_processor_returns(name: str) -> None:
    """With `return_tensors="pt"` an output is a call of the model. Lists, arrays and rows of a table are the same."""
    model, outputs = build(name).eval(), processed(name, return_tensors="pt")
    with torch.no_grad():
        expected = torch.cat([model(**one).logits[0] for one in outputs])
    collate = tritonpack.VisionPackingCollator(model)
    with tritonpack.patch(model), torch.no_grad():
        row = collate(outputs)
        assert apart([expected], [model(**row).logits[0]]) < tolerance(torch.float64)
        for others in (processed(name), [table_row(one) for one in outputs]):
            same = collate(others)
            assert same.keys() == row.keys()
            for column, values in row.items():
                assert torch.equal(torch.as_tensor(same[column]), torch.as_tensor(values)), column


def table_row(output: Any) -> dict[str, Any]:
    """An example as `datasets` returns it: lists, and None in columns that other rows have."""
    absent = dict.fromkeys(("pixel_values",))
    return absent | {name: values.tolist() for name, values in output.items()}
