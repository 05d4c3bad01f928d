"""The Python blocks of docs/packing.md run, with rows of 64 tokens in place of its 4,096 and 32,768."""

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

import tritonpack
from tests.packing.test_training import tiny_llama
from tests.test_guides import blocks

BLOCKS = blocks("packing")
# A text that occurs in one block only, for each block.
TEXTS = (
    ".loss\nprint(loader)", "accelerator.prepare(tritonpack", "sampler.set_epoch(epoch)",
    "# the next iteration", "# after the Accelerator", "batches_done=step", "packing.num_bins", "tritonpack.setup",
    "stream.set_epoch", "dispatch_batches", "RandomSampler", "Units.of_trees",
    "def documents(pair)", "split_dataset_by_node",
)  # fmt: skip
ONE_LINE, PREPARED, LOOP, RESUME, ACCELERATE, STEPS, BINS, SETUP, *OTHERS = TEXTS
STREAM, TRAINER, AXOLOTL, UNITS, PAIRS, DIVIDED = OTHERS
LENGTHS = numpy.random.default_rng(0).integers(5, 20, 60)
DOCUMENTS = [{"input_ids": [token % 37 + 1 for token in range(length)]} for length in LENGTHS.tolist()]


@pytest.fixture
def given(tmp_path):
    """The names that the blocks use without defining them."""
    transformers = pytest.importorskip("transformers")
    model = tiny_llama(torch.float32)
    sampler = tritonpack.MultipackDistributedBatchSampler(64, LENGTHS)
    iterator = iter(sampler)
    [next(iterator) for _ in range(3)]
    with tritonpack.patch(model):
        yield {
            "tritonpack": tritonpack, "numpy": numpy, "DataLoader": DataLoader, "model": model, "epochs": 2,
            "dataset": DOCUMENTS, "documents": DOCUMENTS, "stream": iter(DOCUMENTS), "RandomSampler": RandomSampler,
            "Trainer": transformers.Trainer, "lengths": LENGTHS, "sampler": sampler,
            "folder": str(tmp_path),
            "TrainingArguments": transformers.TrainingArguments,
        }  # fmt: skip


def run(text, given):
    (code,) = (block for block in BLOCKS if text in block)
    exec(compile(code.replace("32768", "64").replace("4096", "64"), "packing.md", "exec"), given)
    return given


def test_one_line(given, capsys):
    given["dataset"] = DOCUMENTS[:20]
    assert torch.isfinite(run(ONE_LINE, given)["loss"])
    assert given["loader"].epoch == given["epochs"] - 1
    assert "steps of 1 rank with 64 tokens each" in capsys.readouterr().out


def test_rows_without_a_target_have_no_loss(given):
    documents = [{"input_ids": [5, 6, 7], "labels": [-100] * 3}] * 2
    batch = next(iter(tritonpack.dataloader(documents, 8)))
    assert given["model"](**batch).loss.isnan()
    plain = {name: torch.tensor([column]) for name, column in documents[0].items()}
    assert tiny_llama(torch.float32)(**plain).loss.isnan()


def test_one_line_with_accelerate(given):
    accelerate = pytest.importorskip("accelerate")
    given["accelerator"] = accelerate.Accelerator(cpu=True)
    tokens = [batch["input_ids"].numel() for batch in run(PREPARED, given)["loader"]]
    assert sum(tokens) == LENGTHS.sum()


def test_training_loop(given):
    assert torch.isfinite(run(LOOP, given)["loss"])
    assert given["batch"]["input_ids"].shape[1] <= 64
    assert given["sampler"].epoch == 1


def test_resuming(given):
    rest = list(run(RESUME, given)["sampler"])
    assert rest == list(tritonpack.MultipackDistributedBatchSampler(64, LENGTHS))[3:]


def test_accelerate(given):
    pytest.importorskip("accelerate")
    batches = list(run(ACCELERATE, given)["loader"])
    assert len(batches) == len(given["sampler"])
    given["sampler"].set_epoch(2)
    rest = list(run(STEPS, given | {"step": 3})["loader"])
    assert len(rest) == len(given["sampler"]) - 3
    assert given["sampler"].epoch == 2


def test_units(given):
    plan = run(UNITS, given)["plan"]
    assert plan.items[: plan.num_documents].tolist() == [0]


def test_bins(given):
    run(BINS, given)
    assert len(given["packing"]) == len(given["loader"]) == given["packing"].lower_bound
    assert sum(batch["input_ids"].shape[1] for batch in given["loader"]) == LENGTHS.sum()


@pytest.mark.slow
def test_setup(given):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    options = {"max_steps": 2, "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}
    arguments = transformers.TrainingArguments(output_dir=given["folder"], disable_tqdm=True, **options)
    given["trainer"] = transformers.Trainer(given["model"], arguments, train_dataset=DOCUMENTS)
    run(SETUP, given)
    assert "train_packing_efficiency" in given["trainer"].state.log_history[-1]
    given["handle"].undo()


def test_stream(given):
    assert torch.isfinite(run(STREAM, given)["loss"])
    assert given["stream"].epoch == 1


def test_stream_of_divided_documents(given):
    datasets = pytest.importorskip("datasets")
    given |= {"world_size": 3, "documents": datasets.Dataset.from_list(DOCUMENTS)}
    found = [len(list(run(DIVIDED, given | {"rank": rank})["stream"])) for rank in range(3)]
    assert min(found) > 1


@pytest.mark.slow
def test_stream_in_trainer(given):
    pytest.importorskip("accelerate")
    trainer = run(TRAINER, given)["trainer"]
    trainer.args.max_steps = 2
    trainer.args.use_cpu = True
    trainer.args.save_strategy = "no"
    trainer.train()
    assert trainer.state.global_step == 2


def test_axolotls_sampler(given):
    rows = [batch["input_ids"].shape[1] for batch in run(AXOLOTL, given)["loader"]]
    assert sum(rows) > 0.8 * LENGTHS.sum()
    assert max(rows) <= 2 * 64


def test_pairs(given):
    lengths = (LENGTHS[:20] // 2).tolist()
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    given["pairs"] = [{name: [token] * length for name in names} for token, length in enumerate(lengths, 1)]
    documents = [row["cu_seq_lens_q"].diff().tolist() for row in run(PAIRS, given)["loader"]]
    assert sorted(length for row in documents for length in row) == sorted([2 * length for length in lengths] * 2)
    assert all(row[::2] == row[1::2] for row in documents)


def test_every_block_is_run():
    assert [sum(text in block for text in TEXTS) for block in BLOCKS] == [1] * len(TEXTS)
