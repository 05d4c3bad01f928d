"""check_isolation(model): proof, on the user's own model, that the documents of a packed batch don't see each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tritonpack.checks import as_integers
from tritonpack.errors import IsolationError, UnsupportedModelError
from tritonpack.patches import patch
from tritonpack.patches.trial import packed_forms
from tritonpack.patches.trial.small_copy import as_prompts
from tritonpack.patches.trial.undisturbed import as_found

# How packed documents reach the model: by position ids alone, and with the all-ones mask that tokenizers add; and what
# `packed_forms` calls that.
FORMS = {"position_ids": "position_ids", "attention_mask": "all_ones_mask"}


@dataclass(frozen=True)
class IsolationReport:
    """What was compared, and the largest differences seen, relative to the largest logit.

    Attributes:
        lengths: tokens per document.
        packed_against_alone: packed logits against those of each document by itself.
        moved_by_others: how far logits moved when another document changed; 0.0 is bitwise equality.
        gradient_to_others: the largest gradient that a document's loss has in another document's embeddings, relative
            to the largest in its own.
        allowed: what the first of these may be: half the digits of the model's dtype. The others may be rounding: 64
            units in the last place, or as much as the first where that is less (zero where no kernel's shape depends
            on the tokens, as a mixture of experts' does).
    """

    lengths: tuple[int, ...]
    packed_against_alone: float
    moved_by_others: float
    gradient_to_others: float
    allowed: float

    def __str__(self) -> str:
        return (
            f"isolated: documents of {', '.join(map(str, self.lengths))} tokens; packed against alone "
            f"{self.packed_against_alone:.1e} "
            f"(allowed {self.allowed:.1e}), moved by other documents {self.moved_by_others:.1e}, gradient to other "
            "documents "
            f"{self.gradient_to_others:.1e}"
        )


def check_isolation(
    model: nn.Module, *, lengths: Sequence[int] = (9, 1, 23, 14), vocab_size: int | None = None, seed: int = 0
) -> IsolationReport:
    """Pack documents of random tokens and show that none of them sees another.

    Packed logits must equal each document's logits alone, up to rounding; changing one document must not move another
    document's logits, nor may a document's loss have a gradient in another document's embeddings. Each is shown with
    position ids alone and with an all-ones mask beside them, with the model's own default for `use_cache`. Takes about
    a dozen forward passes of `sum(lengths)` tokens; weights, gradients, mode and random state stay as they are.

    Args:
        model: a transformers model, patched or not, on any device. Windows longer than the documents aren't seen.
        lengths: tokens per document, at least two documents.
        vocab_size: tokens are drawn from this many; None asks the model's config.
        seed: of the random tokens.

    Returns:
        The differences seen.

    Raises:
        IsolationError: (an AssertionError) a document saw another one; the message names the layer where that begins.
        ValueError: what isn't a model, lengths that aren't integers, fewer than two documents, or an empty one.
    """
    if not isinstance(model, nn.Module):
        patch(model)  # which refuses it, and says what it is instead
    if not hasattr(model, "get_input_embeddings"):
        raise UnsupportedModelError(f"expected a transformers model; got {type(model).__name__}.")
    lengths = as_integers(lengths, "lengths").tolist()
    if len(lengths) < 2 or min(lengths) < 1:
        raise ValueError(f"lengths must hold at least two documents of at least one token; got {tuple(lengths)}.")
    embed = model.get_input_embeddings()  # type: ignore[operator]
    device = embed.weight.device
    size = vocab_size or embed.num_embeddings
    generator = torch.Generator().manual_seed(seed)
    ids, other_ids = (torch.randint(size, (1, sum(lengths)), generator=generator).to(device) for _ in range(2))
    other_ids = torch.where(other_ids == ids, (ids + 1) % size, other_ids)
    documents = list(ids.split(list(lengths), dim=1))
    document = torch.cat([torch.full((n,), i, device=device) for i, n in enumerate(lengths)])

    worst = {"alone": 0.0, "moved": 0.0, "gradient": 0.0}
    with as_found(model):
        with torch.no_grad():
            pieces = [_logits(model, input_ids=piece, **as_prompts(model, piece)) for piece in documents]
        alone = torch.cat(pieces, dim=1)
        eps = torch.finfo(alone.dtype).eps
        allowed, rounding = eps**0.5, min(64 * eps, eps**0.5)  # 64 units would be half of the largest logit in bfloat16
        for form in FORMS:
            told = packed_forms.FORMS[FORMS[form]](documents).arguments
            packing = {**{name: value.to(device) for name, value in told.items()}, **as_prompts(model, ids)}
            for changed in range(len(lengths)):
                here = document == changed
                perturbed = torch.where(here, other_ids, ids)
                with torch.no_grad(), _record_layers(model) as before:
                    packed = _logits(model, input_ids=ids, **packing)
                with torch.no_grad(), _record_layers(model) as after:
                    moved = _logits(model, input_ids=perturbed, **packing)
                gradient = _gradient_to_others(model, embed, ids, packing, here)
                scale = float(alone.abs().max())
                found = {
                    "alone": float((packed - alone).abs().max()) / scale,
                    "moved": float((packed - moved)[:, ~here].abs().max()) / scale,
                    "gradient": gradient,
                }
                worst = {name: _max(worst[name], found[name]) for name in worst}
                if not (found["alone"] <= allowed and found["moved"] <= rounding and found["gradient"] <= rounding):
                    raise IsolationError(_explain(form, changed, found, allowed, rounding, before, after, ~here))
    return IsolationReport(tuple(lengths), worst["alone"], worst["moved"], worst["gradient"], allowed)


def _gradient_to_others(
    model: nn.Module, embed: nn.Module, ids: Tensor, packing: dict[str, Tensor], here: Tensor
) -> float:
    """The gradient of the other documents' outputs in this document's embeddings, relative to that in their own."""
    embeddings = embed(ids).detach().requires_grad_()
    with torch.enable_grad():
        logits = _logits(model, inputs_embeds=embeddings, **packing)
        (gradient,) = torch.autograd.grad(logits[:, ~here].square().sum(), embeddings)
    sizes = gradient.abs()
    return float(sizes[:, here].max() / sizes[:, ~here].max())


def _explain(
    form: str,
    changed: int,
    found: dict[str, float],
    allowed: float,
    rounding: float,
    before: dict[str, Tensor],
    after: dict[str, Tensor],
    others: Tensor,
) -> str:
    layer = next((name for name in before if not torch.equal(before[name][:, others], after[name][:, others])), None)
    where = (
        f"the leak begins in {layer}" if layer else "no layer's output moved, so positions or gradients are at fault"
    )
    told = "position_ids" if form == "position_ids" else "position_ids and an all-ones attention_mask"
    return (
        f"documents of a batch packed by {told} see each other: {where}. Packed logits differ from each document's "
        "own by "
        f"{found['alone']:.1e}, move by {found['moved']:.1e} when document {changed} changes, and reach it with a "
        "gradient of "
        f"{found['gradient']:.1e} (all relative; {allowed:.1e}, {rounding:.1e} and {rounding:.1e} would be rounding). "
        "tritonpack.patch(model) keeps documents apart."
    )


def _logits(model: nn.Module, **inputs: Tensor) -> Tensor:
    return model(**inputs)[0]


def _max(a: float, b: float) -> float:
    return b if b != b else max(a, b)  # a NaN is the worst of all


@contextmanager
def _record_layers(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The output of every decoder layer, by the layer's name, in the order of the forward pass."""
    outputs: dict[str, Tensor] = {}

    def hook_for(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            outputs[name] = (output if isinstance(output, Tensor) else output[0]).detach()

        return hook

    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    layers = [(f"{name}.{i}", layer) for name, module in lists[:1] for i, layer in enumerate(module)]
    handles = [layer.register_forward_hook(hook_for(name)) for name, layer in layers]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
