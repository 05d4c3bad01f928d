"""accelerate: prepared, dispatched and offloaded models, patched before or after."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritonpack
from tests.ecosystem.training import EXACT, apart, features, pad
from tests.patches import zoo
from tests.patches.calls import documents, state, told
from tests.patches.models import tiny_model

accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def _fresh_state() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def dispatch(model: nn.Module, folder: Path) -> None:
    """Every layer has a hook of its own, and the model one that moves its inputs."""
    layers = {f"model.layers.{i}": "cpu" for i in range(2)}
    devices = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "disk", "lm_head": "cpu", **layers}
    accelerate.dispatch_model(model, devices, main_device="cpu", offload_dir=str(folder), force_hooks=True)


PLACEMENTS: dict[str, Callable[[nn.Module, Path], object]] = {
    "cpu_offload": lambda model, folder: accelerate.cpu_offload(model, execution_device="cpu"),
    "disk_offload": lambda model, folder: accelerate.disk_offload(model, str(folder), execution_device="cpu"),
    "dispatch_model": dispatch,
}


@pytest.mark.parametrize("first", ["patch", "accelerate"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", ["mistral", "qwen3_next"])
@pytest.mark.fast(
    "mistral-cpu_offload-patch", "mistral-dispatch_model-accelerate", "qwen3_next-disk_offload-accelerate"
)
def test_placed_models(family: str, placement: str, first: str, tmp_path: Path) -> None:
    """accelerate's hooks replace the forward of modules, patching that of recurrent layers; either may be undone."""
    model = tiny_model(family) if family == "mistral" else zoo.tiny_model(family, dtype=torch.float64)
    expected = torch.cat([model(d).logits for d in documents()], 1)
    ids = torch.cat(documents(), 1)
    if first == "patch":
        tritonpack.patch(model)
    PLACEMENTS[placement](model, tmp_path)
    before = state(model)
    if first == "accelerate":
        tritonpack.patch(model)
    assert apart(model(ids, **told()).logits, expected) < EXACT
    if first == "patch":
        accelerate.hooks.remove_hook_from_module(model, recurse=True)
    tritonpack.unpatch(model)
    assert first == "patch" or state(model) == before
    assert apart(torch.cat([model(d).logits for d in documents()], 1), expected) < EXACT


def run(model: nn.Module, collator: Any, packed: bool, first: str = "patch") -> tuple[list[float], list[Tensor]]:
    """A loop of one's own: two accumulated batches a step, weighed by what they predict."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    if packed and first == "patch":
        tritonpack.patch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(features(), batch_size=3, collate_fn=collator)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if packed and first == "accelerate":
        tritonpack.patch(model)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch, num_items_in_batch=torch.tensor(70), use_cache=True).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in accelerator.unwrap_model(model).parameters()]


@pytest.mark.parametrize("first", ["patch", "accelerate"])
def test_a_loop_with_accelerate(first: str) -> None:
    model, twin = tiny_model("mistral"), tiny_model("mistral")
    start = [p.detach().clone() for p in model.parameters()]
    losses, weights = run(model, pad, packed=False)
    packed_losses, packed_weights = run(twin, tritonpack.PackingCollator(), packed=True, first=first)
    assert packed_losses == pytest.approx(losses, rel=EXACT)
    moved = max(float((a - b).abs().max()) for a, b in zip(weights, start, strict=True))
    assert moved > 0
    gap = max(float((a - b).abs().max()) for a, b in zip(weights, packed_weights, strict=True))
    assert gap / moved < EXACT
    leaking, _ = run(tiny_model("mistral"), tritonpack.PackingCollator(), packed=False)
    assert max(abs(a - b) for a, b in zip(losses, leaking, strict=True)) > 1e-4
