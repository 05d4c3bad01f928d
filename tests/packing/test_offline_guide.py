"""The Python of docs/offline-packing.md runs, and what it says of rows under Trainer is so."""

import pytest
import torch
from torch.utils.data import DataLoader

import tritonpack
from tests.packing.tables import random_documents, write_files
from tests.packing.test_training import tiny_llama
from tests.test_guides import blocks

datasets = pytest.importorskip("datasets")
DOCUMENTS = [{"input_ids": [token % 37 + 1 for token in one["input_ids"]]} for one in random_documents(20, 90)]


@pytest.mark.slow
def test_blocks_and_trainer(tmp_path, monkeypatch):
    """Of the two columns Trainer's removal of unused columns leaves position_ids, which keeps documents apart."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path / "data" / "documents", "parquet", DOCUMENTS)
    model, seen = tiny_llama(torch.float32), []
    names = {"tritonpack": tritonpack, "datasets": datasets, "DataLoader": DataLoader, "model": model}

    def collate(features):
        seen.extend(features)
        return tritonpack.PackingCollator()(features)

    with tritonpack.patch(model):
        for block in blocks("offline-packing"):
            exec(compile(block.replace("32768", "64"), "offline-packing.md", "exec"), names)
        rows = names["rows"]
        options = {"max_steps": 1, "use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
        arguments = transformers.TrainingArguments("out", per_device_train_batch_size=len(rows), **options)
        transformers.Trainer(model, arguments, train_dataset=rows, data_collator=collate).train()
        batch = tritonpack.PackingCollator()(seen)
    assert torch.isfinite(names["loss"])
    assert len(names["loader"]) == len(rows)
    assert "split into" in rows.info.description
    assert sorted(seen[0]) == ["input_ids", "position_ids"]
    lengths = [length for row in rows for length in row["seq_lengths"]]
    assert sorted(batch["cu_seq_lens_q"].diff().tolist()) == sorted(lengths)
    assert sum(lengths) == sum(len(one["input_ids"]) for one in DOCUMENTS)
