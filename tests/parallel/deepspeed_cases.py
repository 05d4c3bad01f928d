"""A patched model with DeepSpeed: under ZeRO with SequenceParallel, and refused under DeepSpeed's own Ulysses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import tritonpack
from tests.parallel.composition_cases import LEARNING_RATE, optimizer_of
from tests.parallel.models import SINGLE, close, make_batch, make_float32_model
from tritonpack import SequenceParallel, patch

REFUSAL = r"(?s)DeepSpeed's Ulysses .*tritonpack\.SequenceParallel\(model, group, exchange='ulysses'"


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip


@contextmanager
def launched() -> Iterator[None]:
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


def expected() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of one process, and its weights after a step."""
    model = make_float32_model()
    patch(model)
    loss = model(**make_batch(0)).loss
    loss.backward()
    return loss.detach(), {n: p.detach() - LEARNING_RATE * p.grad for n, p in model.named_parameters()}


def require_trained(model: torch.nn.Module, loss: torch.Tensor) -> None:
    wanted, weights = expected()
    close(loss.detach(), wanted, "loss", SINGLE)
    for name, p in model.named_parameters():
        close(p.detach(), weights[name], name, SINGLE)


def zero(stage: int) -> None:
    """The path that is documented in place of Ulysses."""
    with launched():
        import deepspeed

        model = make_float32_model()
        engine = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config(stage))[0]
        with SequenceParallel(engine, exchange="ulysses", layout="contiguous"):
            output = engine(**make_batch(0))
            engine.backward(output.loss)
        assert output.logits.shape[1] < make_batch(0)["input_ids"].shape[1]
        engine.step()
        whole = deepspeed.zero.GatheredParameters(list(model.parameters())) if stage == 3 else nullcontext()
        with whole:
            require_trained(model, output.loss)


def accelerated() -> None:
    """accelerate with DeepSpeed and without its sequence parallelism."""
    with launched():
        from accelerate import Accelerator, DistributedType
        from accelerate.utils import DeepSpeedPlugin

        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(2)))
        assert accelerator.distributed_type == DistributedType.DEEPSPEED
        model = make_float32_model()
        engine, optimizer = accelerator.prepare(model, optimizer_of(model))
        with SequenceParallel(engine):
            loss = engine(**make_batch(0)).loss
            accelerator.backward(loss)
        optimizer.step()
        require_trained(model, loss)


def register_ulysses(model: Any, name: str) -> None:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    UlyssesSPAttentionHF.register_with_transformers(
        model, core_attn_implementation=name, sequence_parallel_size=2, micro_batch_size=1
    )


def ulysses(name: str, patched_first: bool = False) -> None:
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
    **{f"ZeRO-{stage}": partial(zero, stage) for stage in range(4)},
    "accelerate": accelerated,
    "Ulysses after the patch": partial(ulysses, "tritonpack", patched_first=True),
    "Ulysses before the patch": partial(ulysses, "sdpa"),
    "Ulysses for another name": partial(ulysses, "flex_attention"),
}
