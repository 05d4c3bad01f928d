"""Liger-Kernel, applied before or after: each leaves the other's changes alone, and their numbers agree.

Liger's kernels need a GPU, or Triton's interpreter, in which its rotary positions and its fused loss run and its norms
and MLPs don't.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

import tritonpack
from tests.ecosystem.training import arguments, difference, distance, features, outcome, pad, trained
from tests.parallel.pool import Pool, cases_of
from tests.patches.calls import state
from tests.patches.models import tiny_model
from tritonpack.patches.applied_patch import applied_to
from tritonpack.patches.parts import InstanceForward

liger = pytest.importorskip("liger_kernel.transformers")

APPLY: dict[str, Callable[..., None]] = {
    "llama": liger.apply_liger_kernel_to_llama,
    "mistral": liger.apply_liger_kernel_to_mistral,
    "qwen3": liger.apply_liger_kernel_to_qwen3,
}
SHORT = features((9, 2, 14, 5))
INTERPRETED = {"rope": True, "fused_linear_cross_entropy": True, "rms_norm": False, "swiglu": False}


@pytest.fixture(autouse=True)
def _no_trace_of_liger() -> Iterator[None]:
    """Liger replaces functions and classes of transformers' modules, for the whole process and for good."""
    modules = [import_module(f"transformers.models.{name}.modeling_{name}") for name in APPLY]
    heads = [getattr(module, name) for module, name in zip(modules, HEADS, strict=True)]
    before = [(owner, dict(vars(owner))) for owner in (*modules, nn.functional)]
    forwards = [(head, head.forward) for head in heads]
    yield
    for owner, names in before:
        vars(owner).update(names)
    for head, forward in forwards:
        head.forward = forward


HEADS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM")


def compute(model: PreTrainedModel, batch: dict[str, Any]) -> list[Tensor]:
    return outcome(model.train(), {**batch, "use_cache": False})


@pytest.mark.parametrize("whole_process", [False, True], ids=["instance", "process"])
@pytest.mark.parametrize("family", APPLY)
def test_each_leaves_the_other_alone(family: str, whole_process: bool) -> None:
    """Whichever comes first, unpatching takes away what is ours and nothing of Liger's."""
    if whole_process:
        APPLY[family]()
    model = tiny_model(family)
    if not whole_process:
        APPLY[family](model=model)
    with_liger = state(model)
    handle = tritonpack.patch(model)
    assert state(model) != with_liger
    handle.unpatch()
    assert state(model) == with_liger

    twin = tiny_model(family)
    tritonpack.patch(twin)
    APPLY[family](model=twin)
    forwards = replaced(twin)
    assert forwards
    tritonpack.unpatch(twin)
    assert replaced(twin) == forwards
    assert applied_to(twin) == []
    assert twin.config._attn_implementation == "sdpa"


def replaced(model: nn.Module) -> dict[str, Any]:
    """The forwards that Liger has put into modules."""
    own = {name: vars(module).get("forward") for name, module in model.named_modules()}
    return {name: x for name, x in own.items() if x is not None and not isinstance(x, InstanceForward)}


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("family", "first"), [("llama", "patch"), ("llama", "liger"), ("mistral", "patch")])
@pytest.mark.slow
def test_the_loss_and_gradients_of_padded_training(family: str, first: str) -> None:
    """Rotary positions and the fused loss are Liger's, documents ours; against stock, padded, to float32's rounding."""
    expected = compute(tiny_model(family, dtype=torch.float32), pad(SHORT))
    model = tiny_model(family, dtype=torch.float32)
    if first == "liger":
        APPLY[family](model=model, **INTERPRETED)
    tritonpack.patch(model)
    if first == "patch":
        APPLY[family](model=model, **INTERPRETED)
    eps = torch.finfo(torch.float32).eps
    assert difference(compute(model, tritonpack.PackingCollator()(SHORT)), expected) < 32 * eps
    tritonpack.unpatch(model)
    assert difference(compute(model, pad(SHORT)), expected) < 32 * eps


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_trainer_with_liger(tmp_path: Path) -> None:
    """Trainer applies Liger when training starts, after the patch."""

    def run(model: PreTrainedModel, collator: Any, **options: Any) -> Any:
        settings = TrainingArguments(**arguments(tmp_path, max_steps=2, per_device_train_batch_size=2, **options))
        return trained(Trainer(model, settings, train_dataset=SHORT, data_collator=collator))

    expected = run(tiny_model("llama", dtype=torch.float32), pad)
    model = tiny_model("llama", dtype=torch.float32)
    tritonpack.patch(model)
    got = run(model, tritonpack.PackingCollator(), use_liger_kernel=True, liger_kernel_config=INTERPRETED)
    assert "liger" in model.forward.__func__.__module__
    assert distance(expected, got) < 32 * torch.finfo(torch.float32).eps


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.parametrize("name", cases_of("liger_cases", 2))
def test_two_ranks_share_the_fused_loss(name: str, ranks: Pool) -> None:
    ranks.run("liger_cases", name)
