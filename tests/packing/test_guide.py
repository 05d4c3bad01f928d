"""The Python of docs/packing.md and docs/offline-packing.md runs, with rows of 64 and 16 tokens."""

from functools import partial

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

import tritonpack
from tests.packing.tables import write_files
from tests.packing.test_training import tiny_llama
from tests.test_guides import blocks

datasets, accelerate = pytest.importorskip("datasets"), pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
OPTIONS = {"max_steps": 2, "use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
Arguments = partial(transformers.TrainingArguments, **OPTIONS)

LENGTHS = numpy.random.default_rng(0).integers(5, 20, 60)
DOCUMENTS = [{"input_ids": [token % 37 + 1 for token in range(length)]} for length in LENGTHS.tolist()]
PAIRS = [{name: [token] * 3 for name in ("prompt_ids", "chosen_ids", "rejected_ids")} for token in range(1, 21)]
BLOCKS = blocks("packing")


@pytest.mark.parametrize(
    "code", [pytest.param(code, marks=[pytest.mark.slow] * ("Trainer" in code or "trainer" in code)) for code in BLOCKS]
)
def test_block(code, tmp_path):
    model, sampler = tiny_llama(torch.float32), tritonpack.MultipackDistributedBatchSampler(64, LENGTHS)
    next(iter(sampler))
    given = {
        "tritonpack": tritonpack, "numpy": numpy, "DataLoader": DataLoader, "RandomSampler": RandomSampler, "epochs": 2,
        "dataset": DOCUMENTS, "documents": datasets.Dataset.from_list(DOCUMENTS), "lengths": LENGTHS, "pairs": PAIRS,
        "model": model, "sampler": sampler, "step": 3, "world_size": 3, "rank": 1, "folder": str(tmp_path),
        "Trainer": transformers.Trainer, "TrainingArguments": Arguments,
        "trainer": transformers.Trainer(model, Arguments(tmp_path), train_dataset=DOCUMENTS),
    }  # fmt: skip
    if "accelerator" in code:
        given["accelerator"] = accelerate.Accelerator(cpu=True)
    for number, small in (("32768", "64"), ("4096", "64"), ("1000", "2")):
        code = code.replace(number, small)
    with tritonpack.patch(model):
        exec(compile(code, "packing.md", "exec"), given)
        if "trainer = " in code:
            given["trainer"].train()
        assert torch.isfinite(torch.as_tensor(given.get("loss", 0.0)))
        for batch in given.get("loader", ()):
            assert 0 < batch["input_ids"].shape[1] <= 128


@pytest.mark.slow
def test_packing_to_disk(tmp_path, monkeypatch):
    """Of the two columns Trainer's removal of unused columns leaves position_ids, which keeps documents apart."""
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path / "data" / "documents", "parquet", DOCUMENTS)
    model, collate = tiny_llama(torch.float32), tritonpack.PackingCollator()
    names = {"tritonpack": tritonpack, "datasets": datasets, "DataLoader": DataLoader, "model": model}
    with tritonpack.patch(model):
        for block in blocks("offline-packing"):
            exec(compile(block.replace("32768", "16"), "offline-packing.md", "exec"), names)
        rows = names["rows"]
        trainer = transformers.Trainer(model, Arguments("out"), train_dataset=rows, data_collator=collate)
        trainer.train()
    assert torch.isfinite(names["loss"])
    assert "split into" in rows.info.description
    kept = trainer._remove_unused_columns(rows)
    assert kept.column_names == ["input_ids", "position_ids"]
    assert torch.equal(collate(list(kept))["cu_seq_lens_q"], collate(list(rows))["cu_seq_lens_q"])
    assert sum(length for row in rows for length in row["seq_lengths"]) == LENGTHS.sum()


def test_rows_without_a_target_have_no_loss():
    model, documents = tiny_llama(torch.float32), [{"input_ids": [5, 6, 7], "labels": [-100] * 3}] * 2
    with tritonpack.patch(model):
        assert model(**next(iter(tritonpack.dataloader(documents, 8)))).loss.isnan()
