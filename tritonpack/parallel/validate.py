"""What sequence parallelism needs of a model, and of what reduces its gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from tritonpack.errors import UnsupportedModelError
from tritonpack.parallel.comm import Ranks
from tritonpack.patches.families import MIXERS
from tritonpack.patches.hooks import PackingHook
from tritonpack.patches.layers.attention import DocumentMask, EncoderAttention
from tritonpack.patches.layers.embeddings import DocumentEmbeddings
from tritonpack.patches.report import Report

FINGERPRINTS = 4  # parameters that ranks compare; what moves ranks apart moves the small ones, too


def require_shardable(model: nn.Module, report: Report) -> None:
    """Refuse a patched model whose layers need more of a batch than the keys and values of other ranks.

    Raises:
        UnsupportedModelError: with the reason.
    """
    kind = report.model_type
    if report.attention in ("padded", "lengths"):
        raise UnsupportedModelError(
            f"model type {kind!r} can't be told of several documents in a row: each gets a row of its own, which ranks "
            "can't share. Train it without SequenceParallel; data parallelism shares documents out."
        )
    if report.attention != "tritonpack":
        raise UnsupportedModelError(
            f"model type {kind!r} attends by {report.attention!r} with a dense mask, which needs all keys on every "
            "rank; sequence parallelism needs attention='tritonpack' and a family that goes through transformers' "
            "attention interface."
        )
    for path, layer in model.named_modules():
        name = type(layer).__name__
        if name in MIXERS:
            raise UnsupportedModelError(
                f"{path} ({name}, model type {kind!r}) mixes tokens along the row by recurrence or convolution: it "
                "would need the state of the ranks before; sequence parallelism can't do that."
            )
        if isinstance(layer.__dict__.get("forward"), DocumentMask):
            raise UnsupportedModelError(
                f"{path} ({name}, model type {kind!r}) attends outside of transformers' attention interface; sequence "
                "parallelism can't do that."
            )
        if isinstance(layer.__dict__.get("forward"), (DocumentEmbeddings, EncoderAttention)):
            raise UnsupportedModelError(
                f"{path} ({name}, model type {kind!r}) reads other tokens of a document, or their mask, before "
                "attention, and other ranks have some of them; sequence parallelism can't do that. Train it without "
                "SequenceParallel."
            )
        if name.endswith("ForSequenceClassification"):
            raise UnsupportedModelError(
                f"{name} reads one token of each row, which one rank has; shard its base model and classify from "
                "gathered hidden states."
            )


def find_packing_hook(model: nn.Module) -> PackingHook | None:
    """The hook of a model's outermost patched module; None if it isn't patched."""
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    return next((hook for hook in hooks if isinstance(hook, PackingHook)), None)


def packing_hook(model: nn.Module) -> PackingHook:
    """The same, of a model that must be patched.

    Raises:
        ValueError: it isn't.
    """
    hook = find_packing_hook(model)
    if hook is not None:
        return hook
    raise ValueError(
        "the model was unpatched inside of SequenceParallel; leave the context first, which restores a model that it "
        "patched itself."
    )


def shared_modules(model: nn.Module) -> list[PreTrainedModel]:
    """The transformers models in a module that may be called with a batch, from the outside in: those that lie in no
    other, and the patched ones inside of them, which trainers call to compute a loss without logits.

    Raises:
        UnsupportedModelError: there is none.
    """
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not models:
        raise UnsupportedModelError(f"expected a transformers model; got {type(model).__name__}.")
    inner = {id(module) for outer in models for module in outer.modules() if module is not outer}
    return [one for one in models if id(one) not in inner or is_patched(one)]


def is_patched(module: nn.Module) -> bool:
    """Whether it has a packing hook itself."""
    return any(isinstance(hook, PackingHook) for hook in module._forward_pre_hooks.values())


def require_reduction(model: nn.Module, ranks: Ranks) -> None:
    """Refuse a DDP or FSDP module that reduces gradients over other ranks than those that share a batch.

    Raises:
        ValueError: with the ranks, and the mesh to build.
    """
    mine = set(dist.get_process_group_ranks(ranks.group))
    for who, reduced in _reductions(model):
        if not mine <= reduced:
            raise ValueError(
                f"{who} reduces gradients over the ranks {sorted(reduced)}, but a batch is shared by the ranks "
                f"{sorted(mine)}, each of which computes a part of its gradients: models would come apart silently. "
                "Give it a mesh that holds data and sequence ranks together: that of init_device_mesh(device, (dp, sp),"
                " mesh_dim_names=('dp', 'sp')) flattened, or both its dimensions for hybrid sharding."
            )


def _reductions(model: nn.Module) -> list[tuple[str, set[int]]]:
    """What reduces gradients in a module, and over which ranks of the world."""
    found = []
    for module in model.modules():
        if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)):
            ranks = set(dist.get_process_group_ranks(module.process_group))
            found.append((type(module).__name__, ranks))
        elif isinstance(module, FSDPModule):
            for p in module.parameters(recurse=True):
                if isinstance(p, DTensor) and p.requires_grad:
                    found.append(("FSDP (fully_shard)", set(p.device_mesh.mesh.flatten().tolist())))
    return found


def compared_parameters(models: Sequence[nn.Module]) -> list[Tensor]:
    """A few trained parameters that every rank has whole, the smallest: they must stay equal."""
    if any(isinstance(module, FullyShardedDataParallel) for model in models for module in model.modules()):
        return []  # each rank has a piece
    whole: list[Tensor] = [
        p
        for model in models
        for p in model.parameters()
        if p.requires_grad and p.is_floating_point() and not isinstance(p, DTensor) and p.numel() and not p.is_meta
    ]
    return sorted(whole, key=Tensor.numel)[:FINGERPRINTS]
