"""MLPs on tiles of rows: the cases of `tiled_cases.py`, and what is special about MLPs."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.parallel.composition_cases import make_mesh, over_all
from tests.parallel.models import make_model, packed
from tests.parallel.padded_cases import WRAPPERS
from tests.parallel.tiled_cases import NAMES, cases_of, recomputes_layers
from tests.patches.padded_batches import padded_batch, training_model
from tests.patches.test_tiled_loss import Largest
from tritonpack import SequenceParallel, patch


def largest_tensor() -> None:
    """No rank makes a tensor with more numbers than a tile times the intermediate size."""
    model = make_model(intermediate_size=1009)
    batch = packed((30, 34))
    with SequenceParallel(model), Largest(model) as seen:
        model(**batch).loss.backward()
    assert seen.numel >= 64 // dist.get_world_size() * 1009
    with patch(model, tiled_mlp=5, tiled_loss=5), SequenceParallel(model), Largest(model) as seen:
        model(**batch).loss.backward()
    assert seen.numel == 5 * 1009, seen.shape


def with_mlps_sharded(model: nn.Module) -> nn.Module:
    """Each MLP is gathered in its own forward alone, and again for its backward pass."""
    mesh = make_mesh("sp")
    for layer in model.model.layers:
        fully_shard(layer.mlp, mesh=mesh, reshard_after_forward=True)
    return over_all(model, mesh)


def refuses_parts_that_are_sharded_by_themselves() -> None:
    model, mesh = training_model(), make_mesh("sp")
    fully_shard(model.model.layers[1].mlp.up_proj, mesh=mesh)
    with (
        patch(over_all(model, mesh), tiled_mlp=5),
        pytest.raises(ValueError, match=r"up_proj.weight of .*layers.1.mlp \(LlamaMLP\) is sharded by itself"),
    ):
        model(**padded_batch(0))


def recomputes_layers_with_tiled_losses() -> None:
    recomputes_layers({"tiled_mlp": 4, "tiled_loss": 4})


CASES = {
    **cases_of(
        {"tiled_mlp": 4},
        {"tiled_mlp": 5},
        {**{name: WRAPPERS[name] for name in NAMES}, "FSDP, sharded MLPs": with_mlps_sharded},
    ),
    "FSDP, a sharded part": refuses_parts_that_are_sharded_by_themselves,
    "largest tensor": largest_tensor,
    "checkpointing": recomputes_layers_with_tiled_losses,
}
