"""Checks before ranks exchange data: what can't be shared, or differs between ranks, raises on every rank."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tritonpack.errors import UnsupportedModelError
from tritonpack.parallel.comm import Ranks, gather_objects
from tritonpack.patches.applied_patch import AppliedPatch
from tritonpack.patches.encoder_decoder import EncoderDecoderForward
from tritonpack.patches.layers.attention import DocumentMask, EncoderAttention
from tritonpack.patches.layers.embeddings import EsmEmbeddings

ALWAYS_COMPARED = 4  # parameters, the smallest ones: an optimizer step changes them, too
CHUNK = 2**22  # numbers that are hashed at a time, so that a large tensor needs no copies of its size
FINGERPRINT = 2**16  # values of a parameter that are compared: an optimizer step changes nearly all of them

PARAMETERS = "parameters"


def require_shardable(model: nn.Module, applied: AppliedPatch) -> None:
    """Raise UnsupportedModelError for a model whose layers need more of other ranks than their keys and values."""
    report, model_type = applied.report, applied.report.model_type
    for head in applied.heads:
        if isinstance(head, EncoderDecoderForward):
            raise UnsupportedModelError(
                f"{head.name} holds an encoder and a decoder, each with tokens of its own, and ranks divide one batch "
                "of tokens. Train it without SequenceParallel."
            )
        if head.one_result:
            raise UnsupportedModelError(
                f"{head.name} gives one result for each row, and each rank has only some of its tokens. Share its base "
                "model, and compute the result from gathered hidden states."
            )
    if report.attention != "tritonpack":
        raise UnsupportedModelError(
            f"model type {model_type!r} attends by {report.attention!r} with a dense mask, which needs all keys on "
            "every rank; sequence parallelism needs attention='tritonpack' and a family that uses transformers' "
            "attention interface."
        )
    for path, layer in model.named_modules():
        if isinstance(layer.__dict__.get("forward"), (DocumentMask, EsmEmbeddings, EncoderAttention)):
            raise UnsupportedModelError(
                f"{path} ({type(layer).__name__}, model type {model_type!r}) reads other tokens of a document outside "
                "of transformers' attention interface, and each rank has only some. Train it without SequenceParallel."
            )


def require_reduction(model: nn.Module, ranks: Ranks) -> None:
    """Raise ValueError for a DDP or FSDP module that doesn't reduce gradients over all ranks that share a batch."""
    mine = set(dist.get_process_group_ranks(ranks.group))
    for module in model.modules():
        groups = []
        if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)):
            groups = [dist.get_process_group_ranks(module.process_group)]
        elif isinstance(module, FSDPModule):
            trained = (p for p in module.parameters() if isinstance(p, DTensor) and p.requires_grad)
            groups = [p.device_mesh.mesh.flatten().tolist() for p in trained]
        for reduced in groups:
            if not mine <= set(reduced):
                raise ValueError(
                    f"{type(module).__name__} reduces gradients over the ranks {sorted(reduced)}, but a batch is "
                    f"shared by the ranks {sorted(mine)}, each of which computes a part of its gradients: the "
                    "parameters of ranks would differ more with each step. Give it a mesh that holds data and sequence "
                    "ranks together: init_device_mesh(device, (dp, sp), mesh_dim_names=('dp', 'sp')), flattened, or "
                    "both its dimensions for hybrid sharding."
                )


def compared_parameters(models: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """The parameters to compare before each forward: all before the first, then the smallest ones and another in turn.

    They are the trained ones that every rank has whole, which must stay equal on all ranks.
    """
    sharded = any(isinstance(module, FullyShardedDataParallel) for model in models for module in model.modules())
    trained = (p for model in models for p in model.parameters() if p.requires_grad and p.is_floating_point())
    whole: list[Tensor] = [p for p in trained if not (sharded or isinstance(p, DTensor) or p.is_meta) and p.numel()]
    whole.sort(key=Tensor.numel)
    yield whole
    smallest, others = whole[:ALWAYS_COMPARED], whole[ALWAYS_COMPARED:]
    while True:
        yield smallest
        yield from ([*smallest, one] for one in others)


def require_same(ranks: Ranks, error: Exception | None, given: dict[str, Any]) -> None:
    """Compare named values of all ranks, tensors to the bit, which waits for their devices. Every rank calls this.

    `error` is why this rank can't go on, or None. PARAMETERS is the name of a list of parameters.

    Raises:
        ValueError: on every rank, if values differ, or if a rank has an error. That rank raises its own error, and the
            others name it.
    """
    found: dict[str, int] = {}
    said = None if error is None else f"{type(error).__name__}: {error}".removesuffix(": ")
    if error is None:
        for name, value in given.items():
            if value is not None:
                found[name] = _hash_parameters(value) if name == PARAMETERS else _hash(value)
    everywhere = gather_objects((said, found), ranks)
    if error is not None:
        raise error
    if everywhere.count((None, found)) == ranks.size:
        return
    failed = "; ".join(f"rank {rank}: {one}" for rank, (one, _) in enumerate(everywhere) if one is not None)
    if failed:
        raise ValueError(f"other ranks of the sequence-parallel group couldn't go on. {failed}")
    names = dict.fromkeys(name for _, one in everywhere for name in one)
    differ = [name for name in names if len({one.get(name) for _, one in everywhere}) > 1]
    if differ == [PARAMETERS]:
        raise ValueError(
            "the model's parameters differ between the ranks of the sequence-parallel group, so a batch would be "
            "computed by several models. Either they began with different values (seed new layers alike on all ranks, "
            "or load one state), or their gradients weren't reduced over the group: let DDP or FSDP reduce over a mesh "
            "that holds these ranks (data and sequence ranks together), or reduce gradients yourself after backward."
        )
    raise ValueError(
        f"the ranks of the sequence-parallel group were given different batches or settings: {', '.join(differ)} "
        f"{'differs' if len(differ) == 1 else 'differ'} from rank to rank. Every rank must make the same call with the "
        "same full batch: let the sampler count the group as one replica (with the rank and the size of the data "
        "dimension of the mesh), and let no rank skip a batch or call the model once more."
    )


def _hash(value: Any) -> int:
    """A hash of an argument: equal for equal values, and hardly ever equal for others. Waits for a tensor's device."""
    if isinstance(value, Tensor):
        text = f"{tuple(value.shape)} {value.dtype} {value.requires_grad}"
        return int(_hash_numbers(value, zlib.crc32(text.encode())))
    plain = value is None or isinstance(value, (Number, str))
    return zlib.crc32((repr(value) if plain else type(value).__name__).encode())


def _hash_parameters(parameters: Sequence[Tensor]) -> int:
    """A hash of the first FINGERPRINT values of each parameter; waits for the devices once."""
    total = torch.zeros((), dtype=torch.int64, device="cpu")
    for place, x in enumerate(parameters):  # layers may lie on several devices
        total = total.to(x.device) + _hash_numbers(x.detach().flatten()[:FINGERPRINT], place)
    return int(total)


def _hash_numbers(x: Tensor, seed: int) -> Tensor:
    """A hash of the bits of a tensor and of their places, 0-dim int64."""
    x = x.detach().flatten()
    if x.is_floating_point():
        x = x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    total, first = torch.zeros((), dtype=torch.int64, device=x.device), 0
    for part in x.split(CHUNK):
        places = torch.arange(first, first + part.shape[0], device=part.device)
        mixed = (part.long() * 0x1E3779B97F4A7C15 + seed) ^ (places * 0x3F58476D1CE4E5B9)
        total += ((mixed ^ (mixed >> 31)) * 0x14D049BB133111EB).sum()
        first += part.shape[0]
    return total
