"""Checks that ranks can share a model's batches, and that its gradients are reduced over these ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from tritonpack.errors import UnsupportedModelError
from tritonpack.parallel.comm import Ranks
from tritonpack.patches.applied_patch import base_of
from tritonpack.patches.base_forward import BaseForward
from tritonpack.patches.layers.attention import DocumentMask, EncoderAttention
from tritonpack.patches.layers.embeddings import DocumentEmbeddings
from tritonpack.patches.report import Report


def require_shardable(model: nn.Module, report: Report) -> None:
    """Refuse a patched model whose layers need more of other ranks than their keys and values.

    Raises:
        UnsupportedModelError: with the reason.
    """
    model_type = report.model_type
    if report.attention != "tritonpack":
        raise UnsupportedModelError(
            f"model type {model_type!r} attends by {report.attention!r} with a dense mask, which needs all keys on "
            "every rank; sequence parallelism needs attention='tritonpack' and a family that uses transformers' "
            "attention interface."
        )
    for path, layer in model.named_modules():
        name, forward = type(layer).__name__, layer.__dict__.get("forward")
        if isinstance(forward, DocumentMask):
            reason = "attends outside of transformers' attention interface"
        elif isinstance(forward, (DocumentEmbeddings, EncoderAttention)):
            reason = "reads other tokens of a document, or their mask, before attention, and ranks have only some"
        elif name.endswith("ForSequenceClassification"):
            raise UnsupportedModelError(
                f"{name} reads one token of each row, which one rank has; shard its base model and classify from "
                "gathered hidden states."
            )
        else:
            continue
        raise UnsupportedModelError(
            f"{path} ({name}, model type {model_type!r}) {reason}. Train it without SequenceParallel."
        )


def find_base(model: nn.Module) -> BaseForward | None:
    """The forward of the outermost patched module in a model; None if nothing is patched."""
    return next((base for module in model.modules() if (base := base_of(module)) is not None), None)


def shared_modules(model: nn.Module) -> list[PreTrainedModel]:
    """The transformers models in a module that may be called with a batch, outermost first.

    They are the outermost ones, and the patched ones in them, which trainers call to compute a loss without logits.

    Raises:
        UnsupportedModelError: there is none.
    """
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not models:
        raise UnsupportedModelError(f"expected a transformers model; got {type(model).__name__}.")
    inner = {id(module) for outer in models for module in outer.modules() if module is not outer}
    return [one for one in models if id(one) not in inner or base_of(one) is not None]


def require_reduction(model: nn.Module, ranks: Ranks) -> None:
    """Refuse a DDP or FSDP module that doesn't reduce gradients over all ranks that share a batch.

    Raises:
        ValueError: with the ranks, and the mesh to build.
    """
    mine = set(dist.get_process_group_ranks(ranks.group))
    for name, reduced in _reductions(model):
        if not mine <= reduced:
            raise ValueError(
                f"{name} reduces gradients over the ranks {sorted(reduced)}, but a batch is shared by the ranks "
                f"{sorted(mine)}, each of which computes a part of its gradients: the parameters of ranks would differ "
                "more with each step. Give it a mesh that holds data and sequence ranks together: init_device_mesh("
                "device, (dp, sp), mesh_dim_names=('dp', 'sp')), flattened, or both its dimensions for hybrid sharding."
            )


def _reductions(model: nn.Module) -> Iterator[tuple[str, set[int]]]:
    """Each DDP or FSDP module in a model, and the ranks of the world over which it reduces gradients."""
    for module in model.modules():
        if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)):
            yield type(module).__name__, set(dist.get_process_group_ranks(module.process_group))
        elif isinstance(module, FSDPModule):
            for p in module.parameters():
                if isinstance(p, DTensor) and p.requires_grad:
                    yield "FSDP (fully_shard)", set(p.device_mesh.mesh.flatten().tolist())
