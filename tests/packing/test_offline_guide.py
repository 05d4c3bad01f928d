"""The Python of docs/offline-packing.md runs, and what it says of rows is so."""

import pytest
import torch
from torch.utils.data import DataLoader

import tritonpack
from tests.packing.tables import random_documents, write_files
from tests.packing.test_training import tiny_llama
from tests.test_guides import blocks

datasets = pytest.importorskip("datasets")
BLOCKS = blocks("offline-packing")


@pytest.mark.slow
def test_blocks(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    given = [
        {"input_ids": [token % 37 + 1 for token in document["input_ids"]]} for document in random_documents(20, 90)
    ]
    write_files(tmp_path / "data" / "documents", "parquet", given)
    model = tiny_llama(torch.float32)
    names = {"tritonpack": tritonpack, "datasets": datasets, "DataLoader": DataLoader, "model": model}
    with tritonpack.patch(model):
        for block in BLOCKS:
            exec(compile(block.replace("32768", "64"), "offline-packing.md", "exec"), names)
    assert torch.isfinite(names["loss"])
    assert len(names["loader"]) == len(names["rows"])
    assert "split into" in names["rows"].info.description


@pytest.mark.slow
def test_trainer_keeps_the_documents_apart(tmp_path):
    """Of the two columns Trainer's removal of unused columns leaves position_ids."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    given = [
        {"input_ids": [token % 37 + 1 for token in document["input_ids"]]} for document in random_documents(12, 30)
    ]
    rows = tritonpack.pack_dataset(datasets.Dataset.from_list(given), 64)
    model, seen = tiny_llama(torch.float32), []

    def collate(features):
        seen.extend(features)
        return tritonpack.PackingCollator()(features)

    options = {"max_steps": 1, "use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    arguments = transformers.TrainingArguments(str(tmp_path / "out"), per_device_train_batch_size=len(rows), **options)
    with tritonpack.patch(model):
        transformers.Trainer(model, arguments, train_dataset=rows, data_collator=collate).train()
        assert sorted(seen[0]) == ["input_ids", "position_ids"]
        batch = tritonpack.PackingCollator()(seen)
    assert sorted(batch["cu_seq_lens_q"].diff().tolist()) == sorted(len(document["input_ids"]) for document in given)
