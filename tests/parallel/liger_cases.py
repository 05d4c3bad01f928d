"""Liger-Kernel's fused loss with SequenceParallel, in Triton's interpreter: loss and gradients of one process."""

import tempfile
from functools import partial

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM

import tritonpack
from tests.parallel import models
from tests.parallel.agreement_cases import agrees
from tests.parallel.composition_cases import over_world
from tests.parallel.models import SINGLE, close, make_batch, make_float32_model, one_target, plain, two_rows
from tritonpack import SequenceParallel, patch

FUSED_ALONE = {"rope": False, "fused_linear_cross_entropy": True, "rms_norm": False, "swiglu": False}


def apply(model=None):
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(model=model, **FUSED_ALONE)


def fused(*batches, prepare=apply, **options):
    """Compare with one process and transformers' loss."""

    def compute(model, **batch):
        output = model(**batch)
        assert (output.logits is None) == getattr(model, "fused", False)
        return output.loss

    def prepared(model):
        prepare(model)
        model.fused = True

    agrees("", *batches, compute=compute, make=make_float32_model, prepare=prepared, tolerance=SINGLE, **options)


def in_the_class():
    """Liger replaces the forward of the class, as if applied before models are made."""
    own = LlamaForCausalLM.forward
    try:
        fused(make_batch(0), prepare=lambda _: apply())
    finally:
        LlamaForCausalLM.forward = own


def wrapped_by(wrap):
    """Under a wrapper, which averages gradients itself."""
    wanted, model = models.alone(make_float32_model(), models.loss_of, make_batch(0)), make_float32_model()
    apply(model)
    wrapped = wrap(model)
    with SequenceParallel(wrapped):
        loss = models.loss_of(wrapped, **make_batch(0))
        loss.backward()
    models.same(models.Result(loss.detach()[None], models.gradients_of(model)), wanted, SINGLE)


def applied_inside():
    """It takes the place of the forward that shards batches, and would compare one rank's rows with all labels."""
    model = make_float32_model()
    message = r"forward of LlamaForCausalLM was replaced inside of SequenceParallel.*before the context is entered"
    with SequenceParallel(model):
        apply(model)
        with pytest.raises(tritonpack.UnsupportedModelError, match=message):
            model(**make_batch(0))


def applied_by_trainer():
    """Trainer puts Liger's forward into the model when training begins, inside of the context."""
    from tests.parallel.trainer_cases import launched, plain

    weights = []
    for liger in (False, True):
        model = make_float32_model()
        options = {"use_liger_kernel": liger, "liger_kernel_config": FUSED_ALONE, "learning_rate": 0.5}
        with launched(), tempfile.TemporaryDirectory() as folder, SequenceParallel(model):
            plain(folder, model, **options).train()
        weights.append({name: p.detach() for name, p in model.named_parameters()})
        assert ("liger" in model.forward.__module__) == liger
    for name, p in weights[0].items():
        close(weights[1][name], p, name, SINGLE)


# Accumulated batches of unlike lengths, weighed by their number of targets.
COUNTED = [{**make_batch(number), "num_items_in_batch": torch.tensor(70)} for number in range(2)]
CASES = {
    "packed": partial(fused, make_batch(0)),
    "rows with padding": partial(fused, two_rows()),
    "fewer tokens than ranks have": partial(fused, plain(3)),
    "a rank without targets": partial(fused, one_target()),
    "num_items_in_batch": partial(fused, *COUNTED),
    "patch first": partial(fused, make_batch(0), prepare=lambda model: patch(model) and apply(model)),
    "in the class": in_the_class,
    "DDP": partial(wrapped_by, DistributedDataParallel),
    "FSDP": partial(wrapped_by, over_world),
    "applied inside": applied_inside,
    "applied by Trainer": applied_by_trainer,
}
