"""Whether a loss function is a sum over targets divided by a number, so that it can be computed on parts of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


@torch.no_grad()
def why_no_sum(loss: Callable[[Tensor, Tensor, int], Tensor], like: Tensor, ignored: int) -> str | None:
    """What a loss of two made-up tokens shows; None if it is a sum over targets divided by a number.

    Args:
        loss: (logits (1, n, vocabulary), targets (1, n), the number to divide by) -> a number.
        like: logits (1, n, vocabulary) of the shape, dtype and device that the loss gets.
        ignored: the target that counts as none.
    """
    words, device = like.shape[-1], like.device
    row = torch.linspace(-1, 1, words, dtype=torch.float32, device=device).to(like.dtype).expand(1, 1, *like.shape[2:])
    logits = torch.cat([row, row.flip(-1)], 1)
    first, second = [x for x in (words // 2, words // 3, words // 4) if x != ignored][:2]

    def of(tokens: slice, targets: list[int], items: int = 1) -> Tensor:
        return loss(logits[:, tokens], torch.tensor([targets], device=device), items)

    one, other, both = of(slice(1), [first]), of(slice(1, 2), [second]), of(slice(2), [first, second])
    share = 1e-3 if torch.finfo(both.dtype).bits >= 32 else 0.02  # of a number, its rounding
    halved, alone = of(slice(2), [first, second], 2), of(slice(2), [first, ignored])
    for got, want, what in (
        (halved, both / 2, "two targets with num_items_in_batch=2 give {0:.4g} and not {1:.4g}, half of that with 1"),
        (
            both,
            one + other,
            "two targets with num_items_in_batch=1 give {0:.4g} and not {1:.4g}, the sum of both alone",
        ),
        (alone, one, "a target beside a token without one gives {0:.4g} and not {1:.4g}, as alone"),
    ):
        a, b = float(got), float(want)
        if not abs(a - b) <= share * max(abs(a), abs(b)):  # also if one is NaN
            return what.format(a, b)
    return None
