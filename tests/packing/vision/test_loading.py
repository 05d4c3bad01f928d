"""dataloader with VisionPackingCollator: tokens are those of the row, also of a batch of one row."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("numba")

from tests.packing.vision.test_collator import LLAVA, QWEN, TEXT, llava, qwen
from tritonpack import TreeCollator, VisionPackingCollator, dataloader, pack_dataset

EXAMPLES = [TEXT, llava(), TEXT, llava(2), llava()]
COLLATE = VisionPackingCollator(LLAVA)


def nested(examples: list[dict[str, Any]]) -> Any:
    """A table of what processors return: `input_ids` of shape (1, n), and None where an example lacks a column."""
    datasets = pytest.importorskip("datasets")
    names = sorted({name for example in examples for name in example})
    rows = []
    for example in examples:
        lists = {name: getattr(value, "tolist", lambda value=value: value)() for name, value in example.items()}
        lists["input_ids"] = [lists["input_ids"]]
        rows.append({name: lists.get(name) for name in names})
    return datasets.Dataset.from_list(rows)


def tensors(examples: list[dict[str, Any]]) -> Any:
    """What processors return with `return_tensors="pt"`: `input_ids` of shape (1, n)."""
    return [example | {"input_ids": torch.tensor([example["input_ids"]])} for example in examples]


@pytest.mark.parametrize("make", [list, nested, tensors])
@pytest.mark.filterwarnings("ignore::tritonpack.PackingWarning")
def test_tokens_are_counted_with_images(make: Callable[[list[Any]], Any]) -> None:
    loader = dataloader(make(EXAMPLES), tokens=20, collate_fn=COLLATE, seed=0)
    assert loader.documents.units.tokens.tolist() == [3, 6, 3, 10, 6]
    assert sum(batch["input_ids"].shape[1] for batch in loader) == 28
    assert sum(len(batch.get("pixel_values", ())) for batch in loader) == 4
    assert "5 documents, 28 tokens (lengths from input_ids)" in str(loader)
    assert "columns of the first document: input_ids" in str(loader)
    options = {"collate_fn": VisionPackingCollator(QWEN), "drop_columns": ("text",)}
    loader = dataloader([qwen(text="hello"), qwen(text="you")], 8, **options)
    assert [batch["pixel_values"].shape[0] for batch in loader] == [16]


class Measuring(TreeCollator):
    measure = len


CUT = llava() | {"input_ids": [3, 60, 60, 60]}
WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (EXAMPLES, {"lengths": [3, 6, 3, 3]}, "4 lengths for a dataset of 5 documents"),
    ([TEXT, TEXT, CUT], {}, "document 2 has 3 tokens of"),
    ([TEXT], {"collate_fn": Measuring()}, "measure of a collate_fn was removed: dataloader counts input_ids itself"),
    ("nested", {"collate_fn": None}, r"document 0 needs a row of integers as input_ids; got .* of shape \(1, 3\)"),
    ("nested", {"collate_fn": TreeCollator()}, r"document [01] needs a row of integers as input_ids; got .* \(1, 3\)"),
]


@pytest.mark.parametrize(("examples", "options", "message"), WRONG)
@pytest.mark.filterwarnings("ignore::tritonpack.PackingWarning")
def test_refused(examples: Any, options: dict[str, Any], message: str) -> None:
    for given in [examples] if examples != "nested" else [nested([TEXT, TEXT]), list(nested([TEXT, TEXT]))]:
        with pytest.raises(ValueError, match=message):
            list(dataloader(given, **{"tokens": 19, "collate_fn": COLLATE, **options}))
    if examples == "nested":
        with pytest.raises(ValueError, match="document 0 "):
            pack_dataset(nested([TEXT, TEXT]), 28)
