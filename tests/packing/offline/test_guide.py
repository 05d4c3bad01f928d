"""The Python of docs/offline-packing.md runs, and what it says of rows is so."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import tritonpack
from tests.packing.offline.tables import random_documents, write_files
from tests.packing.test_training import tiny_llama
from tests.test_guides import blocks

datasets = pytest.importorskip("datasets")
BLOCKS = blocks("offline-packing")


@pytest.mark.heavy
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
    assert len(names["loader"]) == names["packed"].rows
    assert names["packed"].report.policy == "split"


def test_best_fit_puts_similar_lengths_into_a_row_and_first_fit_mixes_them(tmp_path):
    source = datasets.Dataset.from_list(
        [{"input_ids": document["input_ids"]} for document in random_documents(8000, 99)]
    )
    spread, rows = {}, {}
    for algorithm in ("best_fit_decreasing", "windowed", "first_fit"):
        found = tritonpack.pack_to_disk(source, 1000, tmp_path / algorithm, algorithm=algorithm)
        lengths = datasets.load_from_disk(str(found.path))["seq_lengths"]
        spread[algorithm], rows[algorithm] = np.mean([np.std(row) for row in lengths]), found.rows
    assert 2 * max(spread["best_fit_decreasing"], spread["windowed"]) < spread["first_fit"]
    assert rows["best_fit_decreasing"] <= rows["first_fit"] <= 1.01 * rows["best_fit_decreasing"]


@pytest.mark.heavy
def test_trainer_keeps_the_documents_apart(tmp_path):
    """Of the two columns Trainer's removal of unused columns leaves position_ids."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    given = [
        {"input_ids": [token % 37 + 1 for token in document["input_ids"]]} for document in random_documents(12, 30)
    ]
    tritonpack.pack_to_disk(datasets.Dataset.from_list(given), 64, tmp_path / "rows")
    rows = datasets.load_from_disk(str(tmp_path / "rows"))
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
