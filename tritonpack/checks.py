"""Checks of arguments. Values in host memory are checked at once, values on an accelerator by an assertion there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from operator import index
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

Lengths = Sequence[int] | Tensor
Window = tuple[int, int]
UNLIMITED = 2**31 - 1  # more than any number of keys
NUMBERS = (torch.int32, torch.int64)
MASKS = (*NUMBERS, torch.bool, torch.uint8, torch.int8, torch.int16)
FLOAT_MASKS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Reach(NamedTuple):
    """The visible keys of a query within its document: `left` keys before its own place, `right` keys after it, all
    within its chunk of `chunk` keys. UNLIMITED means no limit."""

    left: int
    right: int
    chunk: int


def require(condition: Tensor, message: str | Callable[[], str]) -> None:
    """Raise ValueError unless a condition in host memory is true; on an accelerator assert it there, without waiting.

    Pass a message with sizes as a function, because formatting sizes would tie a compiled graph to their values.
    """
    if torch.compiler.is_compiling() or condition.device.type == "meta":
        return
    if condition.device.type == "cpu" and bool(condition):
        return
    text = message if isinstance(message, str) else message()
    if condition.device.type == "cpu":
        raise ValueError(text)
    torch._assert_async(condition, text)


def holds_numbers(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is an int32 or int64 tensor, which can hold every place, offset or document number.

    Integers of 8 and 16 bits wrap around, and floats skip numbers: float16 above 2,048, bfloat16 above 256. Documents
    would be joined or cut.
    """
    return isinstance(value, Tensor) and value.dtype in NUMBERS


def mask_as_numbers(mask: Tensor, name: str) -> Tensor:
    """Return a mask as int32: 0 for padding, and 1, or the number of the document, for tokens.

    A mask that is neither int32 nor int64 may only mark padding. PEFT's virtual tokens make masks float32.

    Raises:
        ValueError: other values.
    """
    numbers = mask.to(torch.int32)
    good = (mask >= 0) & (mask == numbers) if holds_numbers(mask) else (mask == 0) | (mask == 1)
    other_dtype = (
        "" if holds_numbers(mask) else f"; a mask of {str(mask.dtype).removeprefix('torch.')} may only hold 0 and 1"
    )
    require(
        good.all(),
        lambda: (
            f"{name} must hold whole numbers, 0 for padding and 1, or the number of the document, for tokens"
            f"{f'; got {mask[~good][0].item():g}' if good.device.type == 'cpu' else ''}. Numbers of documents are "
            f"int32 or int64{other_dtype}. A mask that is added to scores isn't supported."
        ),
    )
    return numbers


def check_flag(value: Any, name: str) -> bool:
    """Return a value, or raise unless it is True or False."""
    if not isinstance(value, (bool, torch.SymBool)):
        raise ValueError(f"{name} must be True or False; got {describe(value)}.")
    return value  # type: ignore[return-value]


def check_choice(value: Any, allowed: Sequence[str], name: str) -> str:
    """Return a value, or raise unless it is one of the allowed names."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r:.100}.")
    return value


def check_device(device: Any) -> torch.device:
    """Return the torch.device of a device or of its name, or raise unless tensors can be made on it."""
    try:
        torch_device = torch.device(device)
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            f"device must be a torch.device, or the name of one such as 'cpu' or 'cuda:0'; got {describe(device)}, "
            "which torch doesn't know."
        ) from error
    try:
        if torch_device.type not in ("cpu", "meta") and not torch.compiler.is_compiling():
            torch.empty(0, device=torch_device)  # launches nothing
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without CUDA
        raise ValueError(
            f"device must be available on this machine, such as 'cpu'; got {describe(device)}"
            f"{'' if torch.cuda.is_available() else ', and torch sees no GPU'}."
        ) from error
    return torch_device


def check_reach(window: Window, causal: bool, chunk_size: int | None) -> Reach:
    """Return the `Reach` of a window, causality and a chunk size."""
    check_flag(causal, "causal")
    if isinstance(window, (tuple, list)):
        window = tuple(map(plain_int, window))
    if not isinstance(window, tuple) or len(window) != 2 or not all(map(is_int, window)) or min(window) < -1:
        raise ValueError(
            f"window must be two integers (left, right) of at least -1, where -1 means no limit; got {window!r}."
        )
    chunk_size = plain_int(chunk_size)
    if chunk_size is not None and not (is_int(chunk_size) and chunk_size >= 1):
        raise ValueError(
            f"chunk_size must be an integer of at least 1, or None for attention without chunks; got {chunk_size!r}."
        )
    left, right = window
    return Reach(
        UNLIMITED if left == -1 else min(left, UNLIMITED),
        0 if causal else UNLIMITED if right == -1 else min(right, UNLIMITED),
        UNLIMITED if chunk_size is None else min(chunk_size, UNLIMITED),
    )


def check_documents(cu_q: Tensor, cu_k: Tensor) -> None:
    """Raise unless queries and keys have the same number of documents."""
    if cu_q.shape != cu_k.shape:
        raise ValueError(
            f"queries have {cu_q.shape[0] - 1} documents and keys {cu_k.shape[0] - 1}; each document needs a length on "
            "both sides (0 is allowed)."
        )


def offsets_from_lengths(seqlens: Lengths, name: str) -> Tensor:
    """Return the cumulative offsets of lengths in host memory."""
    if isinstance(seqlens, Tensor) and seqlens.device.type != "cpu":
        raise ValueError(
            f"{name} lies on {seqlens.device}; reading its sum would wait for the device. Pass lengths in host memory, "
            "or use from_cu_seqlens(..., total_q=...)."
        )
    lengths = as_integers(seqlens, name).to(torch.int64)
    if lengths.numel() and int(lengths.min()) < 0:
        raise ValueError(f"{name} must not be negative; got {int(lengths.min())} at index {int(lengths.argmin())}.")
    if lengths.numel() and int(lengths.max()) >= 2**31:  # so that no sum of lengths exceeds 63 bits
        raise ValueError(
            f"{name} must be at most 2**31 - 1 each; got {int(lengths.max())} at index {int(lengths.argmax())}."
        )
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def as_offsets(offsets: Lengths, name: str) -> Tensor:
    """Return offsets as a tensor, or raise if there is none."""
    offsets = as_integers(offsets, name)
    if offsets.numel() == 0:
        raise ValueError(f"{name} must hold at least one offset, 0; it is empty.")
    return offsets


def as_integers(values: Lengths, name: str) -> Tensor:
    """Return a list, an iterator or a tensor of integers as a one-dimensional tensor."""
    if not isinstance(values, Tensor):
        try:
            if isinstance(values, (str, bytes, Mapping, Set)):
                raise TypeError
            values = list(values)  # once: an iterator is empty afterwards
            if any(isinstance(value, bool) for value in values):
                raise TypeError
            numbers = [index(value) for value in values]
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(f"{name} must hold integers; got {values!r:.200}.") from None
        if any(abs(number) >= 2**63 for number in numbers):
            raise ValueError(f"{name} must hold integers of up to 63 bits; got {values!r:.200}.")
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")
    if values.ndim != 1 or not holds_numbers(values):
        raise ValueError(f"{name} must be a one-dimensional int32 or int64 tensor; got {describe(values)}.")
    return values


def check_total(cu: Tensor, total: int | None, total_name: str, name: str) -> int:
    """Return the number of rows of a stream: `total`, or the last offset if that is None."""
    on_host = cu.device.type == "cpu" and not torch.compiler.is_compiling()
    if total is None:
        if not on_host:
            raise ValueError(
                f"{name} lies on {cu.device}, where reading its last offset would wait for the device; pass "
                f"{total_name}, the number of rows of the stream."
            )
        total = int(cu[-1])
    total = plain_int(total)
    if not is_length(total):
        raise ValueError(f"{total_name} must be an integer from 0 to 2**31 - 1; got {total!r}.")
    return total


def check_sound(cu: Tensor, total: int, total_name: str, name: str) -> None:
    """Raise, or assert on the device, unless offsets begin with 0, never decrease and end at most at the total."""
    require(
        (cu[0] == 0) & (cu[1:] >= cu[:-1]).all() & (cu[-1] <= total),
        lambda: (
            f"{name} must begin with 0, never decrease, and end at most at {total_name} = {total}"
            + (f"; got {cu.tolist()!r:.200}." if cu.device.type == "cpu" else ".")
        ),
    )


def check_spans(spans: Tensor, num_queries: int, device: torch.device) -> Tensor:
    """Return the span ids of every query, as (num_queries,)."""
    flat = check_rows(spans, "spans").reshape(-1)
    if flat.shape[0] != num_queries or flat.device != device:
        raise ValueError(
            f"spans must hold an id for each of the {num_queries} tokens, as (T,) or (B, T), on {device}; got "
            f"{describe(spans)}."
        )
    require(
        (flat >= 0).all(),
        "spans must not be negative: 0 marks ordinary tokens, larger ids the tokens of a span. Where -1 marks ordinary "
        "tokens pass spans + 1.",
    )
    return flat


def check_rows(ids: Tensor, name: str, *, mask: bool = False) -> Tensor:
    """Return integers (T,) or (B, T) as (B, T). They must be int32 or int64; a `mask` may have any integer type or
    bool."""
    if not isinstance(ids, Tensor) or ids.ndim not in (1, 2) or ids.dtype not in (MASKS if mask else NUMBERS):
        kind = "a bool or integer" if mask else "an integer"
        hint = " For a padding mask use from_padding_mask." if name == "segment_ids" else ""
        types = "" if mask else ", int32 or int64"
        raise ValueError(f"{name} must be {kind} tensor of shape (T,) or (B, T){types}; got {describe(ids)}.{hint}")
    return ids if ids.ndim == 2 else ids[None]


def check_indices(indices: Tensor, name: str, bound: int, device: torch.device) -> Tensor:
    """Return indices, or raise unless they ascend strictly from 0 to below a bound."""
    indices = as_integers(indices, name)
    if indices.device != device:
        raise ValueError(f"{name} is on {indices.device} and the mask on {device}; move them together.")
    if indices.numel():
        require(
            (indices[0] >= 0) & (indices[-1] < bound) & (indices[1:] > indices[:-1]).all(),
            lambda: (
                f"{name} must ascend strictly within 0..{bound - 1}"
                + (f"; got {indices.tolist()!r:.200}." if on_host(indices) else ".")
            ),
        )
    return indices


def plain_int(value: Any) -> Any:
    """Return a NumPy integer, or any object with `__index__`, as an int. Return other values unchanged, tensors too,
    because reading a tensor may wait for a device."""
    if isinstance(value, (int, torch.SymInt, Tensor)):
        return value
    try:
        return index(value)
    except TypeError:
        return value


def is_length(value: object) -> bool:
    """Return whether a value is an integer from 0 to 2**31 - 1; it may be symbolic while torch traces."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool) and 0 <= value < 2**31


def on_host(x: Tensor) -> bool:
    """Return whether a tensor can be read without waiting: it is plain, in host memory, and outside of
    torch.compile."""
    return type(x) is Tensor and x.device.type == "cpu" and not torch.compiler.is_compiling()


def is_int(value: object) -> TypeGuard[int]:
    """Return whether a value is an int but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether a value is an int or a float but not a bool; it may be symbolic while torch traces."""
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)


def describe(value: object) -> str:
    """Return a short description of a value for error messages."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype} on {value.device}".replace("torch.", "")
    return f"{type(value).__name__} {value!r:.100}"
