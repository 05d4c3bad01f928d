"""Liger-Kernel's fused loss with SequenceParallel, in Triton's interpreter: loss and gradients of one process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import tritonpack
from tests.parallel.composition_cases import full
from tests.parallel.models import (
    Result,
    alone,
    close,
    gradients_of,
    loss_of,
    make_batch,
    make_float32_model,
    mean_over,
    packed,
    three_tokens,
    two_rows,
)
from tritonpack import SequenceParallel, patch

SINGLE = 1e-5  # of float32, relative to a tensor's largest number
FUSED_ALONE = {"rope": False, "fused_linear_cross_entropy": True, "rms_norm": False, "swiglu": False}


def apply(model: nn.Module | None = None) -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(model=model, **FUSED_ALONE)


@contextmanager
def liger_in_the_class() -> Iterator[None]:
    """Liger replaces the forward of the class, as if applied before models are built."""
    import transformers.models.llama.modeling_llama as home

    own = home.LlamaForCausalLM.forward
    apply()
    try:
        yield
    finally:
        home.LlamaForCausalLM.forward = own


def same(got: Result, wanted: Result) -> None:
    close(got.loss, wanted.loss, "loss", SINGLE)
    assert got.gradients.keys() == wanted.gradients.keys()
    for name, gradient in wanted.gradients.items():
        close(got.gradients[name], gradient, name, SINGLE)


def first_targets() -> dict[str, torch.Tensor]:
    """Targets in the first tokens alone, so that the last rank of a contiguous layout has none."""
    batch = packed()
    batch["labels"][:, 8:] = -100
    return batch


def agrees(*batches: dict[str, Any], order: str = "Liger", op: str = "mean", **options: Any) -> None:
    """With one process and transformers' loss. `order` says where Liger is applied beside the patch of the context."""
    wanted = alone(make_float32_model(), loss_of, *batches)
    with liger_in_the_class() if order == "class" else nullcontext():
        model = make_float32_model()
        if order == "patch first":
            patch(model)
        if order != "class":
            apply(model)
        with SequenceParallel(model, grad_reduce=op, **options):
            losses = []
            for batch in batches:
                output = model(**batch)
                assert output.logits is None
                output.loss.backward()
                losses.append(output.loss.detach())
        same(Result(torch.stack(losses), mean_over(None, gradients_of(model), op)), wanted)


def in_evaluation() -> None:
    """Liger then makes logits and calls the model's loss function."""
    wanted = alone(make_float32_model(), loss_of, make_batch(0)).loss[0]
    model = make_float32_model()
    apply(model)
    with SequenceParallel(model), torch.no_grad():
        close(model.eval()(**make_batch(0)).loss, wanted, "loss", SINGLE)
        close(model(**make_batch(0), skip_logits=True).loss, wanted, "loss without logits", SINGLE)


def wrapped(wrap: Callable[[nn.Module], nn.Module]) -> None:
    wanted = alone(make_float32_model(), loss_of, make_batch(0))
    model = make_float32_model()
    apply(model)
    trained = wrap(model)
    with SequenceParallel(trained):
        loss = trained(**make_batch(0)).loss
        loss.backward()
    same(Result(loss.detach()[None], {name: full(x) for name, x in gradients_of(model).items()}), wanted)


def sharded(model: Any) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def applied_inside() -> None:
    """It takes the place of the forward that shards batches, and would compare one rank's rows with all labels."""
    model = make_float32_model()
    message = r"forward of LlamaForCausalLM was replaced inside of SequenceParallel.*before the context is entered"
    with SequenceParallel(model):
        apply(model)
        with pytest.raises(tritonpack.UnsupportedModelError, match=message):
            model(**make_batch(0))


def applied_by_trainer() -> None:
    """Trainer puts Liger's forward into the model when training begins, inside of the context."""
    from transformers import Trainer

    from tests.parallel.trainer_cases import arguments, launched

    class SharedBatchesTrainer(Trainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader([make_batch(number) for number in range(3)], batch_size=None)

    weights = []
    for liger in (False, True):
        model = make_float32_model()
        with launched(), tempfile.TemporaryDirectory() as folder, SequenceParallel(model):
            settings = arguments(
                folder, use_liger_kernel=liger, liger_kernel_config=FUSED_ALONE, optim="sgd", learning_rate=0.5
            )
            SharedBatchesTrainer(model, settings).train()
        weights.append({name: p.detach() for name, p in model.named_parameters()})
        assert ("liger" in model.forward.__module__) == liger
    for name, p in weights[0].items():
        close(weights[1][name], p, name, SINGLE)


# Accumulated batches of unlike lengths, weighed by their number of targets.
COUNTED = [{**make_batch(number), "num_items_in_batch": torch.tensor(70)} for number in range(2)]
CASES = {
    "packed": partial(agrees, make_batch(0)),
    "rows with padding": partial(agrees, two_rows()),
    "fewer tokens than ranks have": partial(agrees, three_tokens()),
    "a rank without targets": partial(agrees, first_targets(), layout="contiguous"),
    "gradients are summed": partial(agrees, make_batch(0), op="sum"),
    "num_items_in_batch": partial(agrees, *COUNTED),
    "patch first": partial(agrees, make_batch(0), order="patch first"),
    "Liger in the class": partial(agrees, make_batch(0), order="class"),
    "evaluation": in_evaluation,
    "DDP": partial(wrapped, DistributedDataParallel),
    "FSDP": partial(wrapped, sharded),
    "applied inside": applied_inside,
    "applied by Trainer": applied_by_trainer,
}
