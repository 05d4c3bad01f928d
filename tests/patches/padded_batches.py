"""Padded batches of many shapes, and steps of training on them whose results are compared with stock's."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tests.patches.models import VOCAB, tiny_model
from tests.patches.zoo import apart, tolerance

UNPAD, SHARE = {"unpad": True}, {"share_prefixes": True}
BOTH_WAYS = pytest.mark.parametrize("options", [UNPAD, SHARE], ids=["unpad", "share"])
WAYS = pytest.mark.parametrize("options", [pytest.param(UNPAD, marks=pytest.mark.slow), SHARE], ids=["unpad", "share"])
LIMIT = tolerance(torch.float64)
Batch = dict[str, Any]

# The lengths of the documents of each batch. No two batches have as many rows, columns and tokens.
LENGTHS = ((9, 6, 12, 5), (13, 8, 9), (6, 20, 7, 8, 9), (15, 5), (30, 11, 12, 13), (7, 8, 17))
PROMPT = 5  # tokens that all documents of a batch begin with


def training_model(family: str = "llama", **overrides: Any) -> PreTrainedModel:
    """A model in training mode, Llama or Mistral. Its norms compute in the model's dtype: in float32 they would round
    the sum over the copies of a token where stock rounds each copy."""
    model = tiny_model(family, **overrides).train()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon, dtype=child.weight.dtype)
                setattr(module, name, norm)
    return model


def padded_batch(number: int = 0) -> dict[str, Tensor]:
    """Documents that begin alike, one in each row: padded on the right in even batches, on the left in odd ones.

    Some tokens inside of documents have no label.
    """
    lengths = LENGTHS[number % len(LENGTHS)]
    generator = torch.Generator().manual_seed(number)
    ids, mask = (torch.zeros(len(lengths), max(lengths), dtype=torch.long) for _ in range(2))
    prompt = torch.randint(3, VOCAB, (PROMPT,), generator=generator)
    for row, length in enumerate(lengths):
        document = torch.cat([prompt, torch.randint(3, VOCAB, (length - PROMPT,), generator=generator)])
        span = slice(max(lengths) - length, None) if number % 2 else slice(length)
        ids[row, span], mask[row, span] = document, 1
    labels = ids.masked_fill((mask == 0) | (ids % 5 == 0), -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def completions(number: int = 0) -> Batch:
    """A batch in which only the last two tokens of each document have labels."""
    batch = padded_batch(number)
    mask = batch["attention_mask"]
    last = (mask.flip(1).cumsum(1).flip(1) <= 2) & mask.bool()
    return {**batch, "labels": batch["input_ids"].masked_fill(~last, -100)}


def real(values: Tensor, batch: Batch) -> Tensor:
    """Values (B, T, ...), or (B * T, ...) as routers give them, with zeros for padding; other values unchanged."""
    mask = batch["attention_mask"]
    if values.shape[:1] == (mask.numel(),):
        return values * mask.view(-1, 1)
    if values.ndim < 2 or values.shape[0] != len(mask):
        return values
    mask = mask[:, : values.shape[1]]
    return values * mask.view(*mask.shape, *[1] * (values.ndim - 2))


# How users read logits.
READS: dict[str, Callable[[Tensor], Tensor]] = {
    "float": lambda logits: logits.float(),
    "shifted": lambda logits: logits[:, :-1],
    "argmax": lambda logits: logits.argmax(-1),
}


def of_logits(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """A loss of the logits that predict tokens of documents, each with another weight."""
    scores = output.logits[:, :-1].log_softmax(-1).gather(2, batch["input_ids"][:, 1:, None])[..., 0]
    weights = torch.linspace(-1, 1, scores.numel(), dtype=scores.dtype).view_as(scores)
    real = batch["attention_mask"][:, 1:] * batch["attention_mask"][:, :-1]
    return (scores * weights * real).sum() / real.sum()


OBJECTIVES: dict[str, Callable[[Any, dict[str, Tensor]], Tensor]] = {
    "loss": lambda output, batch: output.loss,
    "logits": of_logits,
    "both": lambda output, batch: output.loss + of_logits(output, batch),
}


class Step(NamedTuple):
    """The results of one call, as `read` gives them, and the gradients of its backward pass by parameter."""

    values: dict[str, Tensor]
    gradients: dict[str, Tensor | None]


def read(output: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """All values of an output but caches, and its logits by each of READS, with zeros for padding."""
    flat = {name: x if isinstance(x := output[name], tuple) else (x,) for name in output}
    values = {f"{name} {i}": x for name, parts in flat.items() for i, x in enumerate(parts) if isinstance(x, Tensor)}
    if output.logits.shape[:2] == batch["input_ids"].shape:
        values |= {name: take(output.logits) for name, take in READS.items()}
    return {name: real(x.detach(), batch) for name, x in values.items()} | {"loss": output.loss.detach().double()}


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of all gradients; of sharded parameters the whole."""
    grads = {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for name, p in model.named_parameters()
    }
    return {name: None if grad is None else grad.clone() for name, grad in grads.items()}


def step(
    model: nn.Module, batch: dict[str, Tensor], objective: str = "loss", *, called: nn.Module | None = None, **more: Any
) -> Step:
    """Call a model, or the wrapper `called` around it, read its outputs, then run the backward pass."""
    model.zero_grad()
    output = (model if called is None else called)(**batch, **more)
    values = read(output, batch)
    OBJECTIVES[objective](output, batch).backward()
    return Step(values, gradients_of(model))


def require_equal_values(want: dict[str, Tensor], got: dict[str, Tensor]) -> None:
    """All that `read` gives is equal, relative to the largest value."""
    assert want.keys() == got.keys()
    for name, value in want.items():
        assert apart([value], [got[name]]) <= (0 if name == "argmax" else LIMIT), name


def require_equal(want: Step, got: Step) -> None:
    """All values and all gradients are equal, relative to the largest value and to the largest gradient."""
    require_equal_values(want.values, got.values)
    assert apart([*want.gradients.values()], [*got.gradients.values()]) < LIMIT
    assert any(grad is not None and bool(grad.any()) for grad in want.gradients.values())


def require_as_exact(exact: Step, plain: Step, got: Step) -> None:
    """The project's tolerance rule: the error is at most twice stock's in the same dtypes, plus a band for rounding."""
    band = 4 * torch.finfo(torch.bfloat16).eps
    pairs = [([exact.values[name]], [plain.values[name]], [got.values[name]]) for name in ("loss", "float")]
    pairs += [([x], [plain.gradients[name]], [got.gradients[name]]) for name, x in exact.gradients.items()]
    for want, other, value in pairs:
        assert apart(want, value) <= 2 * apart(want, other) + band


def require_saved(saved: Any, *batches: dict[str, Tensor], options: dict[str, bool], padding: int = 0) -> None:
    """A patch has counted these calls: it ran with so much padding, and with `share_prefixes` with each prompt once."""
    assert saved is not None
    ids = [batch["input_ids"] for batch in batches]
    real = [int(batch["attention_mask"].sum()) for batch in batches]
    assert saved.tokens_given == sum(x.numel() for x in ids)
    # The padding before a document on the left stays.
    before = [int((batch["attention_mask"].diff(dim=1) == 1).sum()) for batch in batches]
    shared = [PROMPT * (len(x) - 1) if "share_prefixes" in options else 0 for x in ids]
    most = sum(real) + sum(before) - sum(shared) + padding
    assert 0 < saved.tokens_computed <= most, f"{saved}; expected at most {most}"
