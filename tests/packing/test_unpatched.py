"""The warning about packed batches without a patched model, and the cases without it."""

import gc
import sys
import warnings
import weakref

import pytest
from torch.utils.data import DataLoader

from tests.packing.test_training import tiny_llama
from tests.packing.vision.test_collator import LLAVA
from tritonpack import PackingCollator, PackingWarning, VisionPackingCollator, notices, patch, register

pytest.importorskip("transformers.modeling_utils")

DOCUMENTS = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch):
    """No warning was given and no model is patched yet."""
    monkeypatch.setattr(notices, "_said", {})
    monkeypatch.setattr(notices, "patched_models", weakref.WeakSet())


def packing_warnings(*calls):
    """The PackingWarnings of these calls."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for call in calls:
            call()
    return [str(warning.message) for warning in found if warning.category is PackingWarning]


def collate(documents=DOCUMENTS, collator=PackingCollator()):  # noqa: B008
    return collator(documents)


def test_warns_once_with_remedy():
    (message,) = packing_warnings(collate, collate)
    assert message.startswith("unpatched-model: PackingCollator laid 2 documents into one row, and no model is patched")
    assert "Call tritonpack.patch(model)" in message
    assert "FlashAttention implementations, which read position_ids in training, do so, too." in message


def test_warning_names_the_collator():
    (message,) = packing_warnings(lambda: VisionPackingCollator(LLAVA)(DOCUMENTS))
    assert message.startswith("unpatched-model: VisionPackingCollator laid 2 documents into one row")


def test_warning_with_padding():
    (message,) = packing_warnings(lambda: PackingCollator(8, 0)(DOCUMENTS))
    assert "don't, because of the attention_mask that pad_to_multiple_of adds." in message


def test_no_warning_for_one_document():
    assert not packing_warnings(lambda: collate(DOCUMENTS[:1]))


def test_no_warning_while_a_model_is_patched():
    model, collator = tiny_llama(), PackingCollator()
    handle = patch(model)
    assert not packing_warnings(lambda: collator(DOCUMENTS))
    with patch(model):
        pass
    assert not packing_warnings(lambda: collator(DOCUMENTS))
    handle.unpatch()
    assert len(packing_warnings(lambda: collator(DOCUMENTS))) == 1


def test_model_built_by_name_counts_as_patched():
    model = tiny_llama()
    register()
    named = type(model)._from_config(model.config, attn_implementation="tritonpack")
    assert not packing_warnings(collate)
    del named
    gc.collect()
    assert len(packing_warnings(collate)) == 1


def test_deleted_model_does_not_count_as_patched():
    model = tiny_llama()
    patch(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert len(packing_warnings(collate)) == 1


def test_no_warning_without_transformers_models(monkeypatch):
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils")
    assert not packing_warnings(collate)


def messages_of(documents):
    """Collates in a DataLoader worker and returns the warnings."""
    return packing_warnings(lambda: collate(documents))


@pytest.mark.parametrize(("method", "workers", "warned"), [("fork", 2, 1), ("spawn", 1, 0)])
@pytest.mark.sampled("fork-2-1")
def test_only_forked_workers_warn(method, workers, warned):
    loader = DataLoader(
        DOCUMENTS * 4, batch_size=2, num_workers=workers, collate_fn=messages_of, multiprocessing_context=method
    )
    assert sum(map(len, loader)) == warned


def test_no_warning_in_forked_worker_of_patched_model():
    model = tiny_llama()
    with patch(model):
        loader = DataLoader(
            DOCUMENTS * 2, batch_size=2, num_workers=1, collate_fn=messages_of, multiprocessing_context="fork"
        )
        assert not any(loader)
