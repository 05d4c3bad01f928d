"""dataloader with VisionPackingCollator: it measures tokens and patches itself, and checks those that are given."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("numba")

from tests.packing.vision.test_collator import LLAVA, QWEN, TEXT, llava, qwen
from tritonpack import TreeCollator, VisionPackingCollator, dataloader, pack_dataset

EXAMPLES = [TEXT, llava(), TEXT, llava(2), llava()]  # of 3, 6, 3, 10 and 6 tokens, and 0, 4, 0, 8 and 4 patches
TOKENS, PATCHES = [3, 6, 3, 10, 6], [0, 4, 0, 8, 4]
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


def row_patches(loader: Any) -> list[int]:
    return sorted(4 * len(batch.get("pixel_values", ())) for batch in loader)


@pytest.mark.parametrize("make", [list, nested])
@pytest.mark.filterwarnings("ignore::tritonpack.PackingWarning")
def test_collator_measures_tokens_and_patches(make: Callable[[list[Any]], Any]) -> None:
    loader = dataloader(make(EXAMPLES), tokens=20, collate_fn=COLLATE, seed=0)
    assert loader.documents.units.tokens.tolist() == TOKENS
    assert sum(batch["input_ids"].shape[1] for batch in loader) == sum(TOKENS)
    assert sum(row_patches(loader)) == sum(PATCHES)
    assert "5 documents, 28 tokens (lengths from collate_fn.measure)" in str(loader)
    assert "columns of the first document: input_ids" in str(loader)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lengths": [3, 6, 3, 1, 6]}, "collate_fn made 28 input_ids of examples .*, and a row has at most 19"),
        ({"lengths": [3, 6, 3, 3]}, "4 lengths for a dataset of 5 documents"),
    ],
)
@pytest.mark.filterwarnings("ignore::tritonpack.PackingWarning")
def test_wrong_sizes_are_errors(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(dataloader(EXAMPLES, tokens=19, collate_fn=COLLATE, **given))


def test_an_example_that_cannot_be_measured_is_named() -> None:
    cut = llava() | {"input_ids": [3, 60, 60, 60]}
    with pytest.raises(ValueError, match=r"collate_fn\.measure failed on example 2.*to measure has 3 tokens of"):
        dataloader([TEXT, TEXT, cut], tokens=9, collate_fn=COLLATE)

    class Odd:
        measure = staticmethod(len)

        def __call__(self, examples: list[Any]) -> Any:
            raise AssertionError

    with pytest.raises(ValueError, match=r"failed on example 0.*'int' object has no attribute 'tokens'"):
        dataloader([TEXT], tokens=9, collate_fn=Odd())


@pytest.mark.filterwarnings("ignore::tritonpack.PackingWarning")
def test_left_out_columns_are_not_measured() -> None:
    examples = [qwen(text="hello"), qwen(text="you")]
    loader = dataloader(examples, 8, collate_fn=VisionPackingCollator(QWEN),
                        drop_columns=("text",))  # fmt: skip
    assert loader.documents.units.tokens.tolist() == [4, 4]
    assert [batch["pixel_values"].shape[0] for batch in loader] == [16]


@pytest.mark.parametrize(
    "measure",
    [
        lambda table: pack_dataset(table, 28),
        lambda table: dataloader(table, 28),
        lambda table: dataloader(table, 28, collate_fn=TreeCollator()),
        lambda table: dataloader(list(table), 28, collate_fn=TreeCollator()),
    ],
)
def test_rows_of_rows_are_never_counted_as_one_token(measure: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=r"(document|example) 0"):
        measure(nested([TEXT, TEXT]))
