"""Whether all ranks were given the same: compared before anything is exchanged, so that what differs is an error on
every rank and never a hang."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tritonpack.parallel.comm import Ranks, gather

# The arguments that are compared one by one; all others count together.
NAMED = ("input_ids", "inputs_embeds", "position_ids", "attention_mask", "labels")

_OTHERS = "another argument"

FINGERPRINT = 2**16  # numbers of a parameter that are compared: what moves ranks apart moves all of them


def require_same_batch(
    ranks: Ranks, error: Exception | None, arguments: dict[str, Any], parameters: Sequence[Tensor]
) -> None:
    """Compare what ranks are about to run a model on; waits for the device.

    Args:
        ranks: the group; all of its ranks call this.
        error: why this rank can't go on, or None.
        arguments: of the model's forward. Numbers and shapes count; of floating point, shapes and dtypes alone.
        parameters: some that are trained, and must stay equal.

    Raises:
        ValueError: on every rank, where arguments or parameters differ or a rank has an error, which it raises.
    """
    others = {name: value for name, value in arguments.items() if name not in NAMED}
    header = torch.zeros(len(NAMED) + 4, dtype=torch.int64, device=ranks.header_device())
    found: list[int | Tensor] = [error is not None, _number(torch.is_grad_enabled())]
    if error is None:
        found += [_number(arguments.get(name)) for name in NAMED]
        found += [_number(sorted(others.items()))]
        found += [sum(_mixed(_bits(x), place).to(header.device) for place, x in enumerate(parameters))]
    for place, number in enumerate(found):
        header[place] = number
    gathered, handle = gather(header, ranks)
    handle.wait()
    failed, *columns = gathered.T.tolist()
    if any(failed):
        raise_everywhere(ranks, error)
    what = ["whether gradients are computed", *NAMED, _OTHERS, "parameters"]
    differ = [name for name, column in zip(what, columns, strict=True) if len(set(column)) > 1]
    if differ == ["parameters"]:
        raise ValueError(
            "the model's parameters differ between the ranks of the sequence-parallel group: their gradients weren't "
            "reduced over it, so a batch would be computed by several models. Let DDP or FSDP reduce over a mesh that "
            "holds these ranks (data and sequence ranks together), or reduce gradients yourself after backward."
        )
    if _OTHERS in differ:  # on every rank, since all have gathered the same
        place = differ.index(_OTHERS)
        differ[place : place + 1] = _names_that_differ(ranks, others) or [_OTHERS]
    if differ:
        verb = "differs" if len(differ) == 1 else "differ"
        raise ValueError(
            f"the ranks of the sequence-parallel group were given different batches: {', '.join(differ)} {verb} from "
            "rank to rank. Every rank must pass the same full batch: let the sampler count the group as one rank (its "
            "rank and number of replicas are those of the data mesh)."
        )


def _names_that_differ(ranks: Ranks, arguments: dict[str, Any]) -> list[str]:
    """The arguments that aren't the same on all ranks, or that some ranks lack. Every rank must call this."""
    found: list[Any] = [None] * ranks.size
    numbers = {name: int(_number(value)) for name, value in arguments.items()}
    dist.all_gather_object(found, numbers, group=ranks.group)
    names = sorted({name for one in found for name in one})
    return [name for name in names if len({one.get(name) for one in found}) > 1]


def require_same_settings(ranks: Ranks, error: Exception | None, settings: dict[str, Any]) -> None:
    """Compare what ranks were configured with, and whether all could be.

    Raises:
        ValueError: on every rank, as `require_same_batch`.
    """
    found: list[Any] = [None] * ranks.size
    dist.all_gather_object(found, (error is not None, settings), group=ranks.group)
    if any(failed for failed, _ in found):
        raise_everywhere(ranks, error)
    for name in settings:
        values = [one[name] for _, one in found]
        if any(value != values[0] for value in values):
            raise ValueError(f"{name} must be the same on every rank of the group; got, in their order, {values}.")


def raise_everywhere(ranks: Ranks, error: Exception | None) -> None:
    """Raise this rank's error, or, where it has none, one that tells the others'. Every rank must call this."""
    texts: list[str | None] = [None] * ranks.size
    dist.all_gather_object(texts, None if error is None else f"{type(error).__name__}: {error}", group=ranks.group)
    if error is not None:
        raise error
    told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None)
    raise ValueError(f"other ranks of the sequence-parallel group couldn't go on. {told}")


def _number(value: Any) -> int | Tensor:
    """A number that is equal for equal values, and hardly ever else."""
    tensors: list[Tensor] = []
    seed = zlib.crc32(_text(value, tensors).encode())
    return sum((_mixed(x, seed + place) for place, x in enumerate(tensors)), start=seed)


def _text(value: Any, tensors: list[Tensor]) -> str:
    """A value without the numbers of its tensors; those that count are appended to `tensors`."""
    if isinstance(value, Tensor):
        if not (value.is_floating_point() or value.is_complex()):
            tensors.append(value)
        return f"{tuple(value.shape)} {value.dtype}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_text(part, tensors) for part in value)}]"
    return repr(value) if value is None or isinstance(value, (Number, str)) else type(value).__name__


def _mixed(x: Tensor, seed: int) -> Tensor:
    """The numbers of a tensor and their places in one."""
    numbers = x.detach().flatten().long()
    places = torch.arange(numbers.shape[0], device=numbers.device)
    mixed = (numbers * 0x1E3779B97F4A7C15 + seed) ^ (places * 0x3F58476D1CE4E5B9)
    return ((mixed ^ (mixed >> 31)) * 0x14D049BB133111EB).sum()


def _bits(x: Tensor) -> Tensor:
    """The first numbers of a floating-point tensor, as integers of the same bits."""
    widths = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.detach().flatten()[:FINGERPRINT].view(widths[x.element_size()])
