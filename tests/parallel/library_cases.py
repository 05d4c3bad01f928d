"""SequenceParallel under the libraries of others, on two ranks: PEFT, accelerate, Trainer, a compiler."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from tests.parallel.composition_cases import CLIP, LEARNING_RATE, make_batch, make_model, near, optimizer_of
from tritonpack import PackingCollator, SequenceParallel, patch


@contextmanager
def launched() -> Iterator[None]:
    """What accelerate reads of a launcher; what it remembers is forgotten afterwards."""
    from accelerate.state import AcceleratorState

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    told = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "ACCELERATE_USE_CPU": "true",
        "MASTER_ADDR": "localhost", "MASTER_PORT": "0",  # asked for, and not used: there is a process group
    }  # fmt: skip
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        with mock.patch.dict(os.environ, told):
            yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def require_equal_everywhere(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        first = p.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, p), f"{name} differs between ranks"


def lora() -> None:
    from peft import LoraConfig, get_peft_model

    models = []
    for _ in range(2):
        model = get_peft_model(make_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).double()
        generator = torch.Generator().manual_seed(5)
        for name, p in model.named_parameters():
            if "lora" in name:
                p.data = torch.randn(p.shape, generator=generator, dtype=p.dtype) / 8  # B is zero in the beginning
        models.append(model)
    reference, model = models
    patch(reference)
    reference(**make_batch(0)).loss.backward()
    trained = DistributedDataParallel(model)
    with SequenceParallel(trained):
        output = trained(**make_batch(0))
        output.loss.backward()
    assert output.logits.shape[1] < make_batch(0)["input_ids"].shape[1]
    expected = dict(reference.named_parameters())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == 8
    for name, gradient in gradients.items():
        near(gradient, expected[name].grad, name)


def accelerated() -> None:
    from accelerate import Accelerator

    reference, model = make_model(), make_model()
    patch(reference)
    expected = reference(**make_batch(0)).loss
    expected.backward()
    with launched():
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
        assert isinstance(model, DistributedDataParallel)
        with SequenceParallel(model):
            output = model(**make_batch(0))
            accelerator.backward(output.loss)
            assert output.logits.shape[1] < make_batch(0)["input_ids"].shape[1]
            near(output.loss.detach(), expected.detach(), "loss")
            for (name, p), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
                near(p.grad, whole.grad, name)
            optimizer.step()
    require_equal_everywhere(model)


BATCHES = [make_batch(number) for number in range(6)]


class SharedBatches(Trainer):
    """Every rank of the group gets the same batches: accelerate, which would divide them, doesn't see the loader."""

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(BATCHES, batch_size=None)


def arguments(folder: str, **options) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=3, save_strategy="no", report_to="none", disable_tqdm=True,
        logging_steps=1, **options,
    )  # fmt: skip


def trainer() -> None:
    """Losses and parameters after three steps of two batches are those of a plain loop in one process."""
    reference, model = make_model(), make_model()
    patch(reference)
    optimizer, expected = torch.optim.SGD(reference.parameters(), lr=LEARNING_RATE), []
    for step in range(3):
        some = BATCHES[2 * step : 2 * step + 2]
        items = sum((batch["labels"] != -100).sum() for batch in some)
        losses = [reference(**batch, num_items_in_batch=items).loss for batch in some]
        sum(losses).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(sum(losses).item())
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": CLIP, "optim": "sgd", "learning_rate": LEARNING_RATE}
    with launched(), tempfile.TemporaryDirectory() as folder, SequenceParallel(model):
        trained = SharedBatches(model, arguments(folder, lr_scheduler_type="constant", **options))
        trained.train()
    logged = [entry["loss"] for entry in trained.state.log_history if "loss" in entry]
    assert logged == pytest.approx(expected, abs=1e-4)  # Trainer rounds
    for (name, p), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
        near(p.detach(), whole.detach(), name)


def divided_by_trainer() -> None:
    """Trainer's own loader gives every rank other documents: an error, and no training on half of them each."""
    documents = [{"input_ids": list(range(start, start + 9))} for start in range(16)]
    model = make_model()
    with launched(), tempfile.TemporaryDirectory() as folder, SequenceParallel(model):
        trainer = Trainer(model, arguments(folder), train_dataset=documents, data_collator=PackingCollator())
        with pytest.raises(ValueError, match="were given different batches: input_ids"):
            trainer.train()


def compiled() -> None:
    """Graphs end where ranks exchange, and the model compiled before entering is shared inside."""
    reference, model = make_model(), make_model()
    for one in (reference, model):
        del one.model.layers[1:]
    patch(reference)
    expected = reference(**make_batch(0)).loss
    expected.backward()
    trained = DistributedDataParallel(torch.compile(model, backend="eager"))
    with SequenceParallel(trained):
        output = trained(**make_batch(0))
        output.loss.backward()
    assert output.logits.shape[1] < make_batch(0)["input_ids"].shape[1]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 1, "nothing was compiled"
    near(output.loss.detach(), expected.detach(), "loss")
    for (name, p), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
        near(p.grad, whole.grad, name)


CASES = {
    "a PEFT model": lora,
    "accelerate": accelerated,
    "Trainer": trainer,
    "Trainer's own loader": divided_by_trainer,
    "a compiled model": compiled,
}
