"""A patched model with DeepSpeed: under ZeRO with SequenceParallel, and refused under DeepSpeed's own Ulysses."""

import os
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from unittest import mock

import pytest
import torch.distributed as dist
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import tritonpack
from tests.parallel.composition_cases import LEARNING_RATE, optimizer_of
from tests.parallel.models import SINGLE, alone, close, loss_of, make_batch, make_float32_model
from tritonpack import SequenceParallel, patch

REFUSAL = r"(?s)DeepSpeed's Ulysses .*tritonpack\.SequenceParallel\(model, group, exchange='ulysses'"


@contextmanager
def launched():
    """The environment of DeepSpeed's launcher. What the libraries keep in their modules is restored afterwards."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    variables = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_SIZE": size, "DS_ACCELERATOR": "cpu",
        "MASTER_ADDR": "localhost", "MASTER_PORT": "0",
    }  # fmt: skip
    replaced = ALL_ATTENTION_FUNCTIONS._local_mapping  # DeepSpeed's functions, which hide the registered ones
    with mock.patch.dict(os.environ, variables), mock.patch.dict(replaced):
        import deepspeed
        from accelerate.state import AcceleratorState
        from deepspeed.runtime.sequence_parallel import parallel_state_sp

        deepspeed.init_distributed("gloo")
        AcceleratorState._reset_state(reset_partial_state=True)
        try:
            with mock.patch.dict(vars(parallel_state_sp)):  # it refuses a second registration
                yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


def trains(stage, through_accelerate=False):
    """The path that is documented in place of Ulysses: loss and weights of one process after a step."""
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    model, wanted = make_float32_model(), alone(make_float32_model(), loss_of, make_batch(0))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with launched():
        import deepspeed
        from accelerate import Accelerator
        from accelerate.utils import DeepSpeedPlugin

        if through_accelerate:
            accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
            engine, optimizer = accelerator.prepare(model, optimizer_of(model))
            backward, step = accelerator.backward, optimizer.step
        else:
            engine = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)[0]
            backward, step = engine.backward, engine.step
        with SequenceParallel(engine, exchange="ulysses", layout="contiguous"):
            output = engine(**make_batch(0))
            backward(output.loss)
        assert output.logits.shape[1] < make_batch(0)["input_ids"].shape[1]
        step()
        close(output.loss.detach(), wanted.loss[0], "loss", SINGLE)
        whole = deepspeed.zero.GatheredParameters(list(model.parameters())) if stage == 3 else nullcontext()
        with whole:
            for name, p in model.named_parameters():
                close(p.detach(), before[name] - LEARNING_RATE * wanted.gradients[name], name, SINGLE)


def register_ulysses(model, name):
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    UlyssesSPAttentionHF.register_with_transformers(
        model, core_attn_implementation=name, sequence_parallel_size=2, micro_batch_size=1
    )


def ulysses(name, patched_first=False):
    """Under another name than the model's, each rank would attend to its own tokens alone."""
    model, other, first = make_float32_model(), make_float32_model(), 22 * dist.get_rank()
    # Half of 44 tokens, as DeepSpeed's loader gives it.
    batch = {key: x[:, first : first + 22] for key, x in make_batch(3).items() if key != "labels"}
    with launched(), ExitStack() as stack:
        if patched_first:
            stack.enter_context(patch(model))
            register_ulysses(model, name)
        else:
            model.set_attn_implementation("sdpa")
            other.set_attn_implementation(name)
            register_ulysses(other, name)
            stack.enter_context(patch(model))
        with pytest.raises(tritonpack.UnsupportedModelError, match=REFUSAL):
            model(**batch)


CASES = {
    **{f"ZeRO-{stage}": partial(trains, stage) for stage in range(4)},
    "accelerate": partial(trains, 2, through_accelerate=True),
    "Ulysses after the patch": partial(ulysses, "tritonpack", patched_first=True),
    "Ulysses before the patch": partial(ulysses, "sdpa"),
    "Ulysses for another name": partial(ulysses, "flex_attention"),
}
