"""setup in two processes: rows of both, losses and weights of padded batches, exact resume in the second epoch."""

import os
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Trainer

import tritonpack
from tests.ecosystem.training import EXACT, distance
from tests.integrations.test_setup import StopAt, Watch, make_trainer, plain_loop
from tests.patches.models import tiny_model

pytest.importorskip("accelerate")


def one_of_two_processes(rank: int, folder: str) -> None:
    """Runs in each of two processes: trains, and trains again with a break in the second epoch."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    import accelerate

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)

    def train(name: str, stop: int | None = None, resume: str | None = None) -> tuple[Trainer, list[Any]]:
        trainer = make_trainer(
            Path(folder) / name, save_strategy="steps", save_steps=1000, ddp_backend="gloo", logging_steps=1
        )
        tritonpack.setup(trainer, 32)
        if stop is not None:
            trainer.add_callback(StopAt(stop))
        watch = Watch(trainer.model)
        trainer.train(resume_from_checkpoint=resume)
        both: list[Any] = [None, None]
        dist.all_gather_object(both, watch.batches)
        return trainer, both

    whole, batches = train("whole")
    per_epoch = len(whole.get_train_dataloader())
    steps: list[list[int]] = []
    for rows in ([one[:per_epoch] for one in batches], [one[per_epoch:] for one in batches]):
        places = range(0, per_epoch, 2)
        epoch = [[number for one in rows for row in one[at : at + 2] for number in row] for at in places]
        assert sorted(chain(*epoch)) == list(range(48)), "each document once, on one rank"
        steps += epoch
    expected_losses, moved = plain_loop(steps)
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert losses == pytest.approx(expected_losses, rel=EXACT)
    start_model = dict(tiny_model("llama").named_parameters())
    got = {name: p.detach() - start_model[name].detach() for name, p in whole.model.named_parameters()}
    assert distance((losses, moved), (losses, got)) < EXACT

    stop = -(-per_epoch // 2) + 2  # in the second epoch
    train("parts", stop=stop)
    resumed, rest = train("parts", resume=f"{folder}/parts/checkpoint-{stop}")
    skipped = per_epoch + 4
    assert rest == [one[skipped:] for one in batches]
    for name, p in resumed.model.named_parameters():
        assert torch.equal(p, whole.model.get_parameter(name))
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(one_of_two_processes, (str(tmp_path),), nprocs=2, start_method="fork")
