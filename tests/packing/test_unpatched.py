"""The warning about packed batches without a patched model, and the cases without it."""

import sys
import warnings
import weakref

import pytest
from torch.utils.data import DataLoader

from tests.packing.test_training import tiny_llama
from tests.packing.vision.test_collator import LLAVA
from tritonpack import PackingCollator, PackingWarning, TreeCollator, VisionPackingCollator, notices, patch

pytest.importorskip("transformers.modeling_utils")

DOCUMENTS = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch):
    """No warning was given and no model is patched yet."""
    monkeypatch.setattr(notices, "said", {})
    monkeypatch.setattr(notices, "patched_models", weakref.WeakSet())


def warned(documents=DOCUMENTS, collator=PackingCollator()):  # noqa: B008
    """The PackingWarnings of two calls."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        _ = collator(documents), collator(documents)
    return [str(warning.message) for warning in found if warning.category is PackingWarning]


@pytest.mark.parametrize(("collator", "words"), [
    (PackingCollator(), "FlashAttention implementations, which read position_ids in training, do so, too."),
    (PackingCollator(8, 0), "don't beside the mask of pad_to_multiple_of."),
    (VisionPackingCollator(LLAVA), "Call tritonpack.patch(model) before the first batch."),
    (TreeCollator(), "Other models ignore tree_ends"),
])  # fmt: skip
def test_warns_once_with_remedy(collator, words, monkeypatch):
    (message,) = warned(collator=collator)
    assert f"{type(collator).__name__} laid 2 documents into one" in message
    assert words in message
    notices.said.clear()
    assert not warned(DOCUMENTS[:1], collator)
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils")
    assert not warned(collator=collator)


@pytest.mark.parametrize(("method", "count"), [("fork", 1), pytest.param("spawn", 0, marks=pytest.mark.slow)])
def test_only_forked_workers_warn(method, count):
    options = {"num_workers": 1, "collate_fn": warned, "multiprocessing_context": method}
    assert sum(map(len, DataLoader(DOCUMENTS * 4, 2, **options))) == count
    if method == "fork":
        with patch(tiny_llama()):
            assert not any(DataLoader(DOCUMENTS * 2, 2, **options))
