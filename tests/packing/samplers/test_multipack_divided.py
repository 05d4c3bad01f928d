"""MultipackBatchSampler in accelerate and in transformers' Trainer: every document is used once, or counted."""

from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from tests.packing.samplers.test_multipack import CAPACITY, LENGTHS, batches_of
from tritonpack import BinDataset, MultipackBatchSampler, PackingCollator, PackingWarning

pytest.importorskip("accelerate")


class TestAccelerate:
    def test_accelerate_sets_epoch_in_each_process(self):
        """With several processes accelerate wraps the batch sampler and looks for `set_epoch` on its `sampler` only."""
        from accelerate.data_loader import BatchSamplerShard, prepare_data_loader

        epochs = [[], []]
        for rank in (0, 1):
            torch.manual_seed(rank)
            batches = batches_of(num_replicas=2)
            loader = DataLoader(BinDataset(range(len(LENGTHS))), batch_sampler=batches, collate_fn=list)
            loader = prepare_data_loader(
                loader, num_processes=2, process_index=rank, put_on_device=False, even_batches=False
            )
            assert isinstance(loader.batch_sampler, BatchSamplerShard)
            assert loader.batch_sampler.batch_sampler is batches
            for epoch in range(3):
                epochs[rank].append(list(loader))  # counts epochs and calls set_epoch
                assert batches.epoch == epoch
                assert len(loader) == len(epochs[rank][-1])
        for epoch in range(3):
            whole = batches_of(num_replicas=2)
            whole.set_epoch(epoch)
            shares = epochs[0][epoch], epochs[1][epoch]
            expected = list(whole)
            expected = expected[: len(expected) // 2 * 2]
            assert (list(shares[0]), list(shares[1])) == (expected[::2], expected[1::2])
        assert epochs[0][0] != epochs[0][1] != epochs[0][2]

    @pytest.mark.parametrize("even_batches", [True, False])
    @pytest.mark.parametrize(("processes", "batch_size"), [(2, 1), (3, 3), (8, 2), (16, 16)])
    @pytest.mark.fast("2-1-True", "3-3-False", "16-16-True")
    def test_every_document_is_seen_once_or_counted(self, processes, batch_size, even_batches):
        from accelerate.data_loader import BatchSamplerShard

        for sampler in (range(500), range(490), range(333)):
            batches = batches_of(sampler, batch_size, num_replicas=processes, seed=0)
            shards = [
                list(BatchSamplerShard(batches, processes, rank, even_batches=even_batches))
                for rank in range(processes)
            ]
            assert len({len(shard) for shard in shards}) == 1, "all processes have the same number of batches"
            assert {len(batch) for batch in chain.from_iterable(shards)} <= {batch_size}
            bins = list(chain.from_iterable(chain.from_iterable(shards)))
            assert all(0 < LENGTHS[items].sum() <= CAPACITY for items in bins)
            seen = list(chain.from_iterable(bins))
            assert len(seen) == len(set(seen)) == len(sampler) - batches.dropped_documents

    def test_refuses_to_divide_last_bins_among_processes(self):
        with pytest.raises(ValueError, match=r"drop_last=False doesn't give 2 processes equally many batches"):
            MultipackBatchSampler(range(3), 1, 8, [8, 8, 8], drop_last=False, num_replicas=2)

    def test_warns_of_fewer_batches_than_processes(self, monkeypatch):
        monkeypatch.setattr("tritonpack.notices.said", {})
        batches = MultipackBatchSampler(range(3), 1, 8, [8, 8, 8], num_replicas=4)
        with pytest.warns(PackingWarning, match="no-round: 3 documents make 3 batches, fewer than the 4 processes"):
            assert batches.dropped_documents == len(batches) == 3

    def test_number_of_processes_is_from_launcher(self, monkeypatch):
        assert batches_of().num_replicas == 1
        monkeypatch.setenv("WORLD_SIZE", "4")
        assert batches_of().num_replicas == 4
        assert batches_of(num_replicas=2).num_replicas == 2


class Embed(torch.nn.Module):
    """A model for Trainer; its collator keeps the document numbers of the batches."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, input_ids, **boundaries):
        return {"loss": self.weight[input_ids % 8].mean()}


def trainer_of(folder, seen, **options):
    """A Trainer that takes a batch sampler from `_get_train_sampler`, as axolotl's does."""
    transformers = pytest.importorskip("transformers")

    class BatchSamplerTrainer(transformers.Trainer):
        def _get_train_sampler(self, train_dataset=None):
            return batches_of(RandomSampler(train_dataset), batch_size=30)

        def _get_dataloader(self, dataset, description, batch_size, sampler_fn=None, is_training=False, **rest):
            self.accelerator.even_batches = False
            loader = DataLoader(dataset, batch_sampler=sampler_fn(dataset), collate_fn=self.data_collator)
            return self.accelerator.prepare(loader)

    def collate(bins):
        documents = list(chain.from_iterable(bins))
        seen.append([document["number"] for document in documents])
        return PackingCollator()([{"input_ids": document["input_ids"]} for document in documents])

    documents = [{"input_ids": [3] * length, "number": number} for number, length in enumerate(LENGTHS.tolist())]
    arguments = transformers.TrainingArguments(
        str(folder), report_to=[], use_cpu=True, save_steps=3, remove_unused_columns=False, **options
    )
    return BatchSamplerTrainer(Embed(), arguments, train_dataset=BinDataset(documents), data_collator=collate)


@pytest.mark.slow
def test_trainer_with_batch_sampler(tmp_path):
    seen, again = [], []
    trainer = trainer_of(tmp_path, seen, num_train_epochs=2, seed=7)
    trainer.train()
    batches = batches_of(batch_size=30, seed=7)
    expected = []
    for epoch in range(2):
        batches.set_epoch(epoch)
        expected += [list(chain.from_iterable(batch)) for batch in batches]
    assert seen == expected
    assert trainer.state.global_step == len(expected) == 2 * len(batches) == 8

    trainer = trainer_of(tmp_path, again, num_train_epochs=2, seed=7)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))  # within the second epoch
    assert again[-(len(expected) - 6) :] == expected[6:]
