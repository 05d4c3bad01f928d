"""Comparisons between ranks before they exchange data, so that a difference raises on every rank and none hangs."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from tritonpack.parallel.comm import Ranks, gather_objects

ALWAYS_COMPARED = 4  # parameters, the smallest ones: an optimizer step changes them, too
CHUNK = 2**22  # numbers that are hashed at a time, so that a large tensor needs no copies of its size
FINGERPRINT = 2**16  # values of a parameter that are compared: an optimizer step changes nearly all of them

GRADIENTS, PARAMETERS = "whether gradients are computed", "parameters"


class ComparedParameters:
    """The trained parameters that every rank has whole, the smallest first; they must stay equal on all ranks."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        sharded = any(isinstance(module, FullyShardedDataParallel) for model in models for module in model.modules())
        trained = (p for model in models for p in model.parameters() if p.requires_grad and p.is_floating_point())
        whole = [p for p in trained if not isinstance(p, DTensor) and p.numel() and not p.is_meta]
        self.parameters: list[Tensor] = [] if sharded else sorted(whole, key=Tensor.numel)
        self.forwards = 0

    def next(self) -> list[Tensor]:
        """The parameters to compare: all before the first forward, then the smallest ones and one other in turn."""
        self.forwards += 1
        others = self.parameters[ALWAYS_COMPARED:]
        turn = self.forwards % max(len(others), 1)
        return self.parameters if self.forwards == 1 else [*self.parameters[:ALWAYS_COMPARED], *others[turn : turn + 1]]


def require_same_batch(
    ranks: Ranks, error: Exception | None, arguments: dict[str, Any], parameters: Sequence[Tensor]
) -> None:
    """Compare the calls of all ranks; waits for the device of the tensors. Every rank of the group calls this.

    Args:
        ranks: the group.
        error: why this rank can't compute the batch, or None.
        arguments: of the model's forward. Shapes, dtypes and the bits of all numbers are compared.
        parameters: trained parameters, which must be equal.

    Raises:
        ValueError: on every rank, if arguments or parameters differ, or if a rank has an error. That rank raises its
            own error, and the others name it.
    """
    found: dict[str, int] = {}
    if error is None:
        for name, value in arguments.items():
            if value is not None:
                found[name] = _hash(value)
        found[GRADIENTS] = torch.is_grad_enabled()
        total = torch.zeros((), dtype=torch.int64, device="cpu")
        for place, x in enumerate(parameters):  # layers may lie on several devices
            total = total.to(x.device) + _hash_numbers(x.detach().flatten()[:FINGERPRINT], place)
        found[PARAMETERS] = int(total)
    everywhere = _gather(ranks, error, found)
    if everywhere.count(found) == ranks.size:
        return
    names = dict.fromkeys(name for one in everywhere for name in one)
    differ = [name for name in names if len({one.get(name) for one in everywhere}) > 1]
    if differ == [PARAMETERS]:
        raise ValueError(
            "the model's parameters differ between the ranks of the sequence-parallel group, so a batch would be "
            "computed by several models. Either they began with different values (seed new layers alike on all ranks, "
            "or load one state), or their gradients weren't reduced over the group: let DDP or FSDP reduce over a mesh "
            "that holds these ranks (data and sequence ranks together), or reduce gradients yourself after backward."
        )
    if differ:
        verb = "differs" if len(differ) == 1 else "differ"
        raise ValueError(
            f"the ranks of the sequence-parallel group were given different batches: {', '.join(differ)} {verb} from "
            "rank to rank. Every rank must make the same call with the same full batch: let the sampler count the "
            "group as one replica (with the rank and the size of the data dimension of the mesh), and let no rank skip "
            "a batch or call the model once more."
        )


def require_same_settings(ranks: Ranks, error: Exception | None, settings: dict[str, Any]) -> None:
    """Compare the settings of all ranks. Every rank of the group calls this.

    Raises:
        ValueError: on every rank, if settings differ, or if a rank has an error, as in `require_same_batch`.
    """
    everywhere = _gather(ranks, error, settings)
    for name in settings:
        values = [one.get(name) for one in everywhere]
        if any(value != values[0] for value in values):
            raise ValueError(f"{name} must be the same on every rank of the group; got, in rank order, {values}.")


def _gather(ranks: Ranks, error: Exception | None, values: dict[str, Any]) -> list[dict[str, Any]]:
    """The values of all ranks; raises on every rank if one has an error."""
    said = None if error is None else f"{type(error).__name__}: {error}".removesuffix(": ")
    errors, everywhere = zip(*gather_objects((said, values), ranks), strict=True)
    if error is not None:
        raise error
    if errors.count(None) < ranks.size:
        failed = "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(errors) if one is not None)
        raise ValueError(f"other ranks of the sequence-parallel group couldn't go on. {failed}")
    return list(everywhere)


def _hash(value: Any) -> int:
    """A hash of an argument: equal for equal values, and hardly ever equal for others. Waits for a tensor's device."""
    if isinstance(value, Tensor):
        text = f"{tuple(value.shape)} {value.dtype} {value.requires_grad}"
        return int(_hash_numbers(value, zlib.crc32(text.encode())))
    if isinstance(value, (tuple, list)):
        return zlib.crc32(repr([_hash(part) for part in value]).encode())
    plain = value is None or isinstance(value, (Number, str))
    return zlib.crc32((repr(value) if plain else type(value).__name__).encode())


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
