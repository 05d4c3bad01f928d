"""Checks that ranks can share a model's batches, and that its gradients are reduced over these ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tritonpack.errors import UnsupportedModelError
from tritonpack.parallel.comm import Ranks
from tritonpack.patches.applied_patch import AppliedPatch
from tritonpack.patches.encoder_decoder import EncoderDecoderForward
from tritonpack.patches.layers.attention import DocumentMask, EncoderAttention
from tritonpack.patches.layers.embeddings import EsmEmbeddings


def require_shardable(model: nn.Module, applied: AppliedPatch) -> None:
    """Refuse a patched model whose layers need more of other ranks than their keys and values.

    Raises:
        UnsupportedModelError: with the reason.
    """
    report, model_type = applied.report, applied.report.model_type
    for head in applied.heads:
        if isinstance(head, EncoderDecoderForward):
            raise UnsupportedModelError(
                f"{head.name} holds an encoder and a decoder, each with tokens of its own, and ranks divide one batch "
                "of tokens. Train it without SequenceParallel."
            )
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
        elif isinstance(forward, (EsmEmbeddings, EncoderAttention)):
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
