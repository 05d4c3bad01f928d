"""A subject: a model with all that is needed to call it on documents of random tokens, in any form."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.small_copies.outputs import Output, UnlikeError, parts_of
from tests.small_copies.packed_forms import FORMS, Form, paired
from tritonpack.patches.families import CODEBOOKS, HEADS_SHIFT
from tritonpack.patches.forwards import holds_both_sides
from tritonpack.patches.measuring import Batch, as_prompts, ordinary_tokens, tensors_in
from tritonpack.patches.measuring import draw as draw_documents

Draw = Callable[[tuple[int, ...], int], list[Tensor]]


@dataclass(frozen=True)
class Subject:
    """A model, and how it is called.

    Attributes:
        model: in evaluation mode, on any device.
        draw: returns documents `[1, n]` of random token ids, for their lengths and a seed.
        call: the keyword arguments that carry token ids `[b, t]` into the model.
        values: what is compared of an output: a tensor, or tensors in mappings, tuples and lists.
        stock: whether it is called only with arguments that it knows, as an unpatched model must be.
        forms: the forms in which documents reach it, by name.
        draws: a context in which the model runs: `ConstantDraws` for one that draws random numbers.
    """

    model: nn.Module
    draw: Draw
    call: Callable[[Tensor], dict[str, Any]] = lambda ids: {"input_ids": ids}
    values: Callable[[Any], Any] = lambda output: output
    stock: bool = False
    forms: Mapping[str, Form] = field(default_factory=lambda: FORMS)
    draws: AbstractContextManager[Any] = field(default_factory=nullcontext)

    def output(self, batch: Batch, **given: Any) -> Any:
        """Call the model with a batch and further arguments, without a cache where gradients are recorded."""
        device = next(self.model.parameters()).device
        known = inspect.signature(self.model.forward).parameters
        # States that are updated in place have no gradients.
        uncached = {"use_cache": False} if torch.is_grad_enabled() and "use_cache" in known else {}
        arguments = {**self.call(batch.ids.to(device)), **uncached, **batch.arguments, **given}
        if self.stock and not any(p.kind is p.VAR_KEYWORD for p in known.values()):
            arguments = {name: value for name, value in arguments.items() if name in known}
        arguments = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in arguments.items()}
        with self.draws:
            return self.model(**arguments)

    def tensors(self, batch: Batch) -> dict[str, Tensor]:
        """Call the model with a batch, and return the outputs that may be compared, by name."""
        return dict(tensors_in(self.values(self.output(batch))))

    def parts(
        self, batch: Batch, expected: Mapping[str, Output], *, strict: bool = True
    ) -> tuple[dict[str, list[Tensor]], list[str]]:
        """Call the model with packed documents, and cut each expected output into documents by `parts_of`.

        Returns the parts by the output's name, and what is wrong with the outputs that have none.
        """
        found, parts, problems = self.tensors(batch), {}, []
        for name, output in expected.items():
            try:
                parts[name] = parts_of(name, output, found.get(name), batch, strict=strict)
            except UnlikeError as error:
                problems.append(str(error))
        return parts, problems


def subject_of(model: nn.Module) -> Subject:
    """Return how a model is called with documents of ordinary tokens, none of which its configuration names."""
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    size = getattr(text, "vocab_size", None) or model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    ordinary = ordinary_tokens(model, size)
    names = [kind.__name__ for kind in type(model).__mro__]
    both_sides = holds_both_sides(model)
    # An encoder-decoder model reads a document's scores at this token.
    end = config.eos_token_id if both_sides and any(n.endswith("ForSequenceClassification") for n in names) else None

    def draw(lengths: tuple[int, ...], seed: int) -> list[Tensor]:
        documents = draw_documents(ordinary, lengths, seed)
        if end is not None:
            for document in documents:
                document[:, -1] = end
        return documents

    if both_sides and not names[0].endswith(HEADS_SHIFT):  # those make the decoder's tokens from the encoder's
        return pairs_subject(model, draw, ordinary)
    books = codebooks_of(text)

    def values(output: Any) -> Any:
        if books > 1 and "logits" in output:
            return {**output, "logits": side_by_side(output["logits"], books)}
        return output

    return Subject(
        model,
        draw,
        call=lambda ids: {"input_ids": rows_for_codebooks(ids, books, size), **as_prompts(model, ids)},
        values=values,
    )


def pairs_subject(model: nn.Module, draw: Draw, ordinary: Tensor, **options: Any) -> Subject:
    """Return how an encoder-decoder model is called with pairs of documents.

    `draw` makes the decoder's documents. The encoder's are drawn from the token ids `ordinary` `[n]`.
    """

    def source_of(target: Tensor) -> Tensor:
        """The encoder's document: its length differs from the target's, and all tokens of the target seed it."""
        weights = torch.arange(1, target.shape[1] + 1, device=target.device)
        length = 3 * target.shape[1] % 11 + 1
        return draw_documents(ordinary, (length,), int((target * weights).sum()))[0].to(target.device)

    def call(ids: Tensor) -> dict[str, Tensor]:
        return {"decoder_input_ids": ids, **({"input_ids": source_of(ids)} if ids.shape[0] == 1 else {})}

    forms = {name: paired(form, source_of) for name, form in FORMS.items()}
    return Subject(model, draw, call, forms=forms, **options)


def exchanged(ordinary: Tensor, size: int) -> Callable[[Tensor], Tensor]:
    """Return a function that replaces each ordinary token by another one, and keeps others, such as padding."""
    table = torch.arange(size, device="cpu")
    table[ordinary] = ordinary.roll(1)
    return lambda ids: table.to(ids.device)[ids]


def codebooks_of(config: Any) -> int:
    """How many rows of ids a model takes for one row of tokens: several in a few decoders of sound."""
    return config.num_codebooks if config.model_type in CODEBOOKS else 1


def rows_for_codebooks(ids: Tensor, books: int, size: int) -> Tensor:
    """Return (B * books, T) ids below `size` for ids (B, T).

    No two rows of a token are alike, but padding, 0, is the same in all.
    """
    if books == 1:
        return ids
    return torch.stack([torch.where(ids == 0, 0, (ids + i) % size) for i in range(books)], dim=1).flatten(0, 1)


def side_by_side(values: Tensor, books: int) -> Tensor:
    """Return (B, T, books * n) values for rows of codebooks (B * books, T, n)."""
    return values.unflatten(0, (-1, books)).transpose(1, 2).flatten(2) if books > 1 else values
