"""check_isolation(model): proof, on the user's own model, that the documents of a packed batch don't see each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tritonpack.checks import as_integers, is_int
from tritonpack.errors import IsolationError, UnsupportedModelError
from tritonpack.patches import measuring, patch
from tritonpack.patches.proof import one_line


@dataclass(frozen=True)
class IsolationReport:
    """The largest differences seen, relative to the largest value of the output.

    Attributes:
        lengths: tokens per document.
        packed_against_alone: between the outputs of packed documents and of each document alone.
        moved_by_others: between two calls in which only another document differs; 0.0 is bitwise equality.
        gradient_to_others: of a document's outputs in another document's embeddings, relative to those in its own.
        allowed: the limit of `packed_against_alone`: half the digits of the model's dtype, of float32 for float64. The
            limit of the other two is 64 units in the last place, or half the digits if that is less; they are zero
            unless a kernel's shape depends on the tokens, as in a mixture of experts.
    """

    lengths: tuple[int, ...]
    packed_against_alone: float
    moved_by_others: float
    gradient_to_others: float
    allowed: float

    def __str__(self) -> str:
        return (
            f"isolated: documents of {', '.join(map(str, self.lengths))} tokens; packed against alone "
            f"{self.packed_against_alone:.1e} (allowed {self.allowed:.1e}), moved by other documents "
            f"{self.moved_by_others:.1e}, gradient to other documents {self.gradient_to_others:.1e}"
        )


def check_isolation(
    model: nn.Module, *, lengths: Sequence[int] = (9, 1, 23, 14), vocab_size: int | None = None, seed: int = 0
) -> IsolationReport:
    """Pack documents of random tokens and show that none of them sees another.

    Outputs of packed documents must equal outputs of documents alone, up to rounding. A change of one document must
    not move another document's outputs, nor may its outputs have a gradient in another document's embeddings: with
    position ids alone, and with an all-ones mask beside them. This takes about two dozen forward passes of
    `sum(lengths)` tokens. Weights, gradients, mode and random state stay as they are.

    Args:
        model: a transformers model, patched or not, on any device. Windows longer than the documents have no effect.
        lengths: tokens per document, at least two documents.
        vocab_size: tokens are drawn from this many; None means all that the model has embeddings for. Tokens that the
            configuration names, such as padding, aren't drawn.
        seed: of the random tokens.

    Raises:
        IsolationError: (an AssertionError) a document saw another one; the message names the layer where that begins.
        UnsupportedModelError: (a ValueError) what isn't a model, or a model that can't be called with random tokens
            alone; the message says what to check instead.
        ValueError: lengths, a seed or a vocab_size that aren't integers, fewer than two documents, or an empty one.
    """
    if not isinstance(model, nn.Module):
        patch(model)  # raises an error that says what it is instead
    if not hasattr(model, "get_input_embeddings"):
        raise UnsupportedModelError(f"expected a transformers model; got {type(model).__name__}.")
    lengths = tuple(as_integers(lengths, "lengths").tolist())
    if len(lengths) < 2 or min(lengths) < 1:
        raise ValueError(f"lengths must hold at least two documents of at least one token; got {lengths}.")
    if not is_int(seed) or not (vocab_size is None or (is_int(vocab_size) and vocab_size > 1)):
        raise ValueError(f"seed and vocab_size (above 1) must be integers; got {seed!r} and {vocab_size!r}.")
    ordinary = measuring.ordinary_tokens(model, vocab_size)
    documents, drawn = measuring.draw(ordinary, lengths, seed), measuring.draw(ordinary, lengths, seed + 1)
    following = torch.arange(int(ordinary.max()) + 1, device="cpu").index_copy_(0, ordinary, ordinary.roll(-1))
    others = [torch.where(x == old, following[old], x) for x, old in zip(drawn, documents, strict=True)]
    try:
        with measuring.no_trace(model):
            forms = ("position_ids",), ("position_ids", "attention_mask")
            found = [_Check(model, form, documents, others).differences() for form in forms]
    except (IsolationError, UnsupportedModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model's own code may raise anything
        name = type(model).__name__
        raise UnsupportedModelError(
            f"check_isolation couldn't call {name}: {one_line(error)}. It passes random tokens as input_ids, then as "
            "inputs_embeds, and nothing else. Give lengths that the model accepts, check the model inside "
            "(check_isolation(model.base_model)), or compare its outputs for packed documents and for each alone."
        ) from error
    return IsolationReport(lengths, *(max(one) for one in zip(*found, strict=True)))


class _Check:
    """The check of one form, for documents (1, n), each of which `others` has with other tokens."""

    def __init__(self, model: nn.Module, form: Sequence[str], documents: list[Tensor], others: list[Tensor]) -> None:
        self.model, self.form, self.documents, self.others = model, form, documents, others
        self.packed_by = f"documents of a batch packed by {' and '.join(form)}"

    def call(self, batch: measuring.Batch, **tokens: Tensor) -> Any:
        device, tokens = next(self.model.parameters()).device, tokens or {"input_ids": batch.ids}
        given = {name: x.to(device) for name, x in (tokens | batch.arguments).items()}
        return self.model(**given, **measuring.as_prompts(self.model, batch.ids.to(device)))

    def packed(self, changed: int | None = None) -> measuring.Batch:
        """All documents in one row, of which one may be changed."""
        documents = [self.others[i] if i == changed else x for i, x in enumerate(self.documents)]
        batch = measuring.lay_out([range(len(documents))], documents)
        return replace(batch, arguments={name: batch.arguments[name] for name in self.form})

    def parts(self, batch: measuring.Batch) -> dict[str, list[Tensor]]:
        """The parts of documents in the outputs that are `expected` of them."""
        found: dict[str, Any] = measuring.parts_in(self.call(batch), batch)
        for name, parts in self.expected.items():
            if not isinstance(found.get(name), list) and not all(torch.equal(parts[0], x) for x in parts):
                shape = tuple(found[name].shape) if name in found else "of none"
                raise IsolationError(
                    f"{self.packed_by} don't have outputs of their own: {name} has shape {shape} for {len(parts)} "
                    "documents. Pass padded rows, with one document in each."
                )
        return {name: found[name] for name in self.expected if isinstance(found.get(name), list)}

    def differences(self) -> tuple[float, float, float, float]:
        """Return the three differences and the limit of the first, or raise IsolationError if one is too large."""
        count = len(self.documents)
        with torch.no_grad():
            alone = [replace(measuring.lay_out([[0]], [document]), arguments={}) for document in self.documents]
            calls: list[dict[str, Any]] = [measuring.parts_in(self.call(one), one) for one in alone]
            shared = [name for name in calls[0] if all(isinstance(call.get(name), list) for call in calls)]
            self.expected = {name: [call[name][0] for call in calls] for name in shared}
            if not self.expected:
                raise ValueError("it gives no value for each token or document")
            found = self.parts(self.packed())
            differs = max((measuring.apart(self.expected[name], parts) for name, parts in found.items()), default=0.0)
            moved, by = max((self._moved(found, i), i) for i in range(count))
        self.main = "logits" if "logits" in found else next(iter(found))
        eps = torch.finfo(found[self.main][0].dtype).eps
        gradient = max(self._gradient_to_others(i) for i in range(count))
        allowed, rounding = max(eps, torch.finfo(torch.float32).eps) ** 0.5, min(64 * eps, eps**0.5)
        if differs <= allowed and max(moved, gradient) <= rounding:
            return differs, moved, gradient, allowed
        if max(moved, gradient) > rounding:
            kept = [i for i in range(count) if i != by]
            with torch.no_grad():
                layer = measuring.first_moved(self.model, self.call, self.packed(), self.packed(by), kept)
            where = f"the leak begins in {layer}" if layer else "no layer moved, so positions or gradients are wrong"
            what, remedy = f"see each other: {where}", "tritonpack.patch(model) keeps documents apart."
        else:
            what = "have other positions, or another precision, than each alone"
            remedy = (
                "No document sees another. tritonpack.patch(model) counts the positions of each by itself. If the "
                "model is patched, and its layers choose the best keys by scores, the best of equal ones may be others."
            )
        raise IsolationError(
            f"{self.packed_by} {what}. Their outputs differ from each document's own by {differs:.1e} (rounding: up to "
            f"{allowed:.1e}), move by {moved:.1e} when document {by} changes, and have a gradient of {gradient:.1e} in "
            f"another document (rounding: up to {rounding:.1e}; all relative). {remedy}"
        )

    def _moved(self, found: dict[str, list[Tensor]], document: int) -> float:
        """Return the largest movement of the other documents' outputs when one document changes."""
        changed = self.parts(self.packed(document))
        others = [i for i in range(len(self.documents)) if i != document]
        pairs = (([x[i] for i in others], [changed[name][i] for i in others]) for name, x in found.items())
        return max((measuring.apart(was, now) for was, now in pairs), default=0.0)

    def _gradient_to_others(self, document: int) -> float:
        """The gradient of other documents' outputs in one document's embeddings, relative to their own embeddings'."""
        model: Any = self.model
        batch, embed = self.packed(), model.get_input_embeddings()
        embeddings = embed(batch.ids.to(embed.weight.device)).detach().requires_grad_()
        with torch.enable_grad():
            parts = measuring.parts_in(self.call(batch, inputs_embeds=embeddings), batch)[self.main]
            rest = [part.square().sum() for i, part in enumerate(parts) if i != document]
            (gradient,) = torch.autograd.grad(torch.stack(rest).sum(), embeddings)
        sizes = [float(gradient[row, span].abs().max()) for row, span in batch.spans]
        found = sizes.pop(document) / max(sizes)
        return math.inf if math.isnan(found) else found
