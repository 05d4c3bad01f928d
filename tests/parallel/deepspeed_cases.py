"""A patched model with DeepSpeed: under ZeRO with SequenceParallel, and refused under DeepSpeed's own Ulysses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import tritonpack
from tests.parallel.composition_cases import LEARNING_RATE, optimizer_of
from tests.parallel.models import close, make_batch, make_float32_model
from tritonpack import SequenceParallel, patch

SINGLE = 1e-5  # of float32, relative to a tensor's largest number
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


def own_half() -> dict[str, torch.Tensor]:
    """This rank's half of a packed row, as DeepSpeed's loader gives it."""
    batch = make_batch(3)  # of 44 tokens
    half = batch["input_ids"].shape[1] // 2
    return {name: x[:, dist.get_rank() * half :][:, :half] for name, x in batch.items() if name != "labels"}


def model_with(name: str) -> Any:
    model = make_float32_model()
    model.set_attn_implementation(name)
    return model


def ulysses_after_the_patch() -> None:
    model = make_float32_model()
    with launched(), patch(model):
        register_ulysses(model, "tritonpack")
        with pytest.raises(tritonpack.UnsupportedModelError, match=REFUSAL):
            model(**own_half())


def ulysses_before_the_patch(attention: Any) -> None:
    model = model_with("sdpa")
    with launched():
        register_ulysses(model, "sdpa")
        with patch(model, attention=attention), pytest.raises(tritonpack.UnsupportedModelError, match=REFUSAL):
            model(**own_half())


def ulysses_for_another_name() -> None:
    """No function of the model is replaced, so each rank would attend to its own tokens alone."""
    model = model_with("sdpa")
    with launched():
        register_ulysses(model_with("flex_attention"), "flex_attention")
        with patch(model), pytest.raises(tritonpack.UnsupportedModelError, match=REFUSAL):
            model(**own_half())


CASES = {
    **{f"ZeRO-{stage}": partial(zero, stage) for stage in range(4)},
    "accelerate": accelerated,
    "Ulysses after the patch": ulysses_after_the_patch,
    "Ulysses before the patch": partial(ulysses_before_the_patch, "tritonpack"),
    "Ulysses for another name": ulysses_for_another_name,
}
