"""Liger-Kernel's fused loss with SequenceParallel, in Triton's interpreter: loss and gradients of one process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import tritonpack
from tests.parallel.agreement_cases import agrees
from tests.parallel.models import (
    SINGLE,
    Result,
    alone,
    close,
    gradients_of,
    loss_of,
    make_batch,
    make_float32_model,
    packed,
    same,
    three_tokens,
    two_rows,
)
from tritonpack import SequenceParallel, patch

FUSED_ALONE = {"rope": False, "fused_linear_cross_entropy": True, "rms_norm": False, "swiglu": False}


def apply(model: nn.Module | None = None) -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(model=model, **FUSED_ALONE)


def make_fused() -> nn.Module:
    model = make_float32_model()
    apply(model)
    return model


def fused(*batches: dict[str, Any], prepare: Callable[[Any], Any] = apply, **options: Any) -> None:
    """Compare with one process and transformers' loss."""

    def compute(model: Any, **batch: Any) -> torch.Tensor:
        output = model(**batch)
        assert (output.logits is None) == getattr(model, "fused", False)
        return output.loss

    def prepared(model: Any) -> None:
        prepare(model)
        model.fused = True

    agrees("", *batches, compute=compute, make=make_float32_model, prepare=prepared, tolerance=SINGLE, **options)


def patched_first(model: Any) -> None:
    patch(model)
    apply(model)


def in_the_class() -> None:
    """Liger replaces the forward of the class, as if applied before models are built."""
    import transformers.models.llama.modeling_llama as home

    own = home.LlamaForCausalLM.forward
    try:
        fused(make_batch(0), prepare=lambda _: apply())
    finally:
        home.LlamaForCausalLM.forward = own


def first_targets() -> dict[str, torch.Tensor]:
    """Targets in the first tokens alone, so that the last rank of a contiguous layout has none."""
    batch = packed()
    batch["labels"][:, 8:] = -100
    return batch


def wrapped(wrap: Callable[[nn.Module], nn.Module]) -> None:
    wanted, model = alone(make_float32_model(), loss_of, make_batch(0)), make_fused()
    trained = wrap(model)
    with SequenceParallel(trained):
        loss = trained(**make_batch(0)).loss
        loss.backward()
    same(Result(loss.detach()[None], gradients_of(model)), wanted, SINGLE)


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

    weights, options = [], {"liger_kernel_config": FUSED_ALONE, "optim": "sgd", "learning_rate": 0.5}
    for liger in (False, True):
        model = make_float32_model()
        with launched(), tempfile.TemporaryDirectory() as folder, SequenceParallel(model):
            SharedBatchesTrainer(model, arguments(folder, use_liger_kernel=liger, **options)).train()
        weights.append({name: p.detach() for name, p in model.named_parameters()})
        assert ("liger" in model.forward.__module__) == liger
    for name, p in weights[0].items():
        close(weights[1][name], p, name, SINGLE)


# Accumulated batches of unlike lengths, weighed by their number of targets.
COUNTED = [{**make_batch(number), "num_items_in_batch": torch.tensor(70)} for number in range(2)]
CASES = {
    "packed": partial(fused, make_batch(0)),
    "rows with padding": partial(fused, two_rows()),
    "fewer tokens than ranks have": partial(fused, three_tokens()),
    "a rank without targets": partial(fused, first_targets(), layout="contiguous"),
    "num_items_in_batch": partial(fused, *COUNTED),
    "patch first": partial(fused, make_batch(0), prepare=patched_first),
    "Liger in the class": in_the_class,
    "DDP": partial(wrapped, DistributedDataParallel),
    "FSDP": partial(wrapped, sharded),
    "applied inside": applied_inside,
    "applied by Trainer": applied_by_trainer,
}
