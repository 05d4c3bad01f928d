"""How a class is called with documents in rows, and what its outputs say of each document."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tests.patches import zoo
from tests.patches.sweep.extras import extras
from tests.patches.sweep.forms import alone
from tritonpack.patches.tokens import is_config, special_tokens
from tritonpack.patches.trial.packed_forms import Batch, with_choices
from tritonpack.patches.trial.small_copy import codebooks_of, exchanged, rows_for_codebooks, side_by_side

# How many tokens the documents of a few model types have at least.
SHORTEST = {"canine": 5, "funnel": 4, "longformer": 4}

# What a decoder reads beside an encoder: as many documents, of other lengths.
DECODER_LENGTHS = {7: 5, 1: 2, 3: 6, 11: 4}

# Caches, which a packed batch may not leave behind, and weights of attention, which a patched model has none of.
LEFT_OUT = (
    "past_key_values", "cache_params", "state", "mems", "past_buckets_states", "encoder_past_key_values", "attentions",
    "encoder_attentions", "decoder_attentions", "cross_attentions", "loss",
)  # fmt: skip

WHOLE = " of a document"  # after the name of an output that has more values than tokens

# What a patched encoder-decoder model reads of each side, whatever its forward takes.
READ = ("attention_mask", "position_ids", "seq_idx")

# Encoders with a decoder whose configuration doesn't say so.
WITH_DECODER = ("BlipForQuestionAnswering",)

PER_TOKEN = ("attention_mask", "position_ids", "seq_idx", "token_type_ids")


class ShapeError(Exception):
    """An output of packed documents that hasn't a value for each token, or for each document."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """What an output has a value for.

    Attributes:
        of: "token" `[b, t, ...]`, "flat" `[b * t, ...]`, "layered" `[n, b, t, ...]`, "document" `[documents, ...]`;
            "sized" `[documents, ...]` of a size that differs between documents, with zeros after each document's own;
            "constant" where all documents have the same; "other" for shapes that say nothing of tokens or documents.
        side: whose tokens, "encoder" or "decoder".
        more: how many values there are beside those of tokens, after them: of an image.
        sizes: of each document alone, where they differ.
    """

    of: str
    side: str = "encoder"
    more: int = 0
    sizes: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class Gathered:
    """What a call says of each document: values of all documents, one after the other, and the outputs that have none,
    with the reason."""

    values: dict[str, Tensor]
    problems: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Layout:
    """Documents in rows, as a class takes them: a batch for an encoder, or the only one, and one for a decoder."""

    encoder: Batch
    decoder: Batch | None = None


class Subject:
    """A model, and how it is called.

    Args:
        model: in evaluation mode.
        stock: call it only with arguments that it knows; an unpatched model is called as it can be.
        draws: in which the model runs: for one that draws random numbers, they are constant.
    """

    def __init__(
        self, model: nn.Module, *, stock: bool = False, draws: AbstractContextManager[Any] | None = None
    ) -> None:
        self.model, self.stock = model, stock
        self.draws = draws or nullcontext()
        self.config: Any = model.config
        parameters = inspect.signature(model.forward).parameters
        self.names = frozenset(parameters)
        self.takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.class_name = type(model).__name__
        self.choices = "MultipleChoice" in self.class_name
        self.sentence = self.choices or any(
            part in self.class_name for part in ("SequenceClassification", "NextSentencePrediction")
        )
        both = bool(getattr(self.config, "is_encoder_decoder", False)) and "decoder_input_ids" in self.names
        self.only_decoder = both and "input_ids" not in self.names
        self.both = both and not self.only_decoder and not self.sentence and "QuestionAnswering" not in self.class_name
        self.both = self.both or self.class_name in WITH_DECODER
        self.ends = getattr(self.config, "is_encoder_decoder", False) and "SequenceClassification" in self.class_name
        decoder = self.config.decoder if both and is_config(getattr(self.config, "decoder", None)) else self.config
        self.books = codebooks_of(decoder.get_text_config(decoder=True) if not both else decoder)
        self.size = _vocabulary(model, self.config)
        named = special_tokens(self.config)
        self.ordinary = torch.tensor([token for token in range(6, self.size) if token not in named])
        self.extras = extras(model)
        self.drafts = "shared_kv_states" in self.names
        self.kinds: dict[str, Kind] = {}

    def draw(self, lengths: tuple[int, ...], seed: int = 1) -> list[Tensor]:
        """Token ids `[1, n]` of documents of these lengths: ordinary ones, but for an end that a head looks for."""
        generator = torch.Generator().manual_seed(seed)
        shortest = SHORTEST.get(self.config.model_type, 1)
        lengths = tuple(max(n, shortest) for n in lengths)
        documents = [self.ordinary[torch.randint(len(self.ordinary), (1, n), generator=generator)] for n in lengths]
        lead = torch.tensor([self.extras.lead], dtype=torch.long)
        documents = [torch.cat([lead, document], dim=1) for document in documents]
        if self.ends:
            for document in documents:
                document[:, -1] = self.config.eos_token_id
        return documents

    def targets(self, documents: list[Tensor]) -> list[Tensor]:
        """What a decoder reads: documents of other lengths, drawn from the last token of each."""
        lengths = [DECODER_LENGTHS.get(d.numel(), d.numel()) for d in documents]
        generators = [torch.Generator().manual_seed(100 + int(d[0, -1])) for d in documents]
        return [
            self.ordinary[torch.randint(len(self.ordinary), (1, n), generator=generator)]
            for n, generator in zip(lengths, generators, strict=True)
        ]

    def lay_out(self, form: Callable[[list[Tensor]], Batch], documents: list[Tensor]) -> Layout:
        decoder = form(self.targets(documents)) if self.both else None
        return Layout(form(documents), decoder)

    def arguments(self, layout: Layout) -> dict[str, Any]:
        """The keyword arguments of a call."""
        batch = layout.encoder
        ids = batch.ids if self.both else rows_for_codebooks(batch.ids, self.books, self.size)
        told = dict(batch.arguments)
        if self.only_decoder:
            told = {f"decoder_{name}" if name in PER_TOKEN else name: value for name, value in told.items()}
            arguments = {"decoder_input_ids": ids, **told}
        else:
            arguments = {**(zoo.call(self.model, ids) if self.drafts else {"input_ids": ids}), **told}
        if layout.decoder is not None:
            arguments["decoder_input_ids"] = rows_for_codebooks(layout.decoder.ids, self.books, self.size)
            told = layout.decoder.arguments
            for name in PER_TOKEN:
                if name in told and (f"decoder_{name}" in self.names or (name in READ and not self.stock)):
                    arguments[f"decoder_{name}"] = told[name]
            for name in ("cu_seq_lens", "max_length"):  # of the decoder's queries and the encoder's keys
                if f"{name}_q" in told:
                    arguments[f"{name}_k"], arguments[f"{name}_q"] = arguments[f"{name}_q"], told[f"{name}_q"]
        if self.extras.columns:
            name, columns, size = self.extras.columns
            arguments[name] = torch.stack([(arguments[name] + i) % size for i in range(columns)], dim=-1)
        if self.choices:
            arguments = with_choices(arguments, exchanged(self.ordinary, self.size))
        if "use_cache" in arguments and "use_cache" not in self.names and not self.takes_any:
            del arguments["use_cache"]
        dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
        if self.config.model_type == "fsmt":  # with a cache, its decoder sees both ways
            arguments = {"use_cache": False, **arguments}
        if torch.is_grad_enabled():
            arguments = {**zoo.DIFFERENTIABLE.get(self.config.model_type, {}), **arguments}
        for name, make in self.extras.arguments.items():
            if name not in arguments:
                value = make(self.config, batch)
                arguments[name] = value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        if self.stock and not self.takes_any:
            arguments = {name: value for name, value in arguments.items() if name in self.names}
        return arguments

    def run(self, **arguments: Any) -> Any:
        """What the model gives."""
        with self.draws:
            return self.model(**arguments)

    def call(self, layout: Layout, **more: Any) -> dict[str, Tensor]:
        """All floating-point outputs by name, with the rows of codebooks, or of choices, side by side."""
        output = self.run(**self.arguments(layout), **more)
        found = dict(_tensors(output))
        columns = 2 if self.choices else self.books
        if columns > 1:
            rows = {layout.encoder.ids.shape[0] * columns, len(layout.encoder.spans) * columns}  # or of documents
            found = {
                name: side_by_side(x, columns)
                if x.ndim == 3 and x.shape[0] in rows and (self.choices or name == "logits")
                else x
                for name, x in found.items()
            }
        return found

    def alone(self, documents: list[Tensor], **more: Any) -> dict[str, Tensor]:
        """Outputs of each document in a call of its own, with its tokens and nothing else; those of all documents one
        after the other. Learns what each output has a value for."""
        layouts = [self.lay_out(alone, [document]) for document in documents]
        calls = [self.call(layout, **more) for layout in layouts]
        found = {}
        for name in calls[0]:
            values = [call[name] for call in calls if name in call]
            kind = self.kinds[name] = self._kind(values, layouts)
            if kind.of in ("constant", "other"):
                continue
            if kind.more:  # in packed rows, or, with all that there is beside tokens, in rows of documents
                self.kinds[name + WHOLE] = Kind("sized", sizes=tuple(tuple(x.shape[1:]) for x in values))
            if kind.more or kind.of == "sized":
                found[name + WHOLE * (kind.more > 0)] = torch.cat([x.flatten() for x in values])
            if kind.of == "sized":
                continue
            parts = [_per_document(x, kind, layout, 1, name) for x, layout in zip(values, layouts, strict=True)]
            found[name] = torch.cat(parts)
        return found

    def _kind(self, values: list[Tensor], layouts: list[Layout]) -> Kind:
        shapes = [tuple(x.shape) for x in values]
        if len(values) < len(layouts):
            return Kind("other")
        for side in ("encoder", "decoder"):
            batches = [getattr(layout, side) for layout in layouts]
            if batches[0] is None:
                continue
            lengths = [batch.ids.shape[1] for batch in batches]
            pairs = list(zip(shapes, lengths, strict=True))
            if all(len(s) >= 2 and s[0] == 1 for s in shapes):
                more = {s[1] - n for s, n in pairs}
                if len(more) == 1 and min(more) >= 0 and len(set(shapes)) > 1:
                    return Kind("token", side, more.pop())
            if all(len(s) >= 3 and s[1:3] == (1, n) for s, n in pairs):
                return Kind("layered", side)
            if all(len(s) >= 1 and s[0] == n for s, n in pairs):
                return Kind("flat", side)
        if len(set(shapes)) > 1:
            alike = {(len(s), *s[:1]) for s in shapes} == {(len(shapes[0]), 1)}
            return Kind("sized", sizes=tuple(s[1:] for s in shapes)) if alike else Kind("other")
        if all(torch.equal(values[0], x) for x in values[1:]):
            return Kind("constant")
        return Kind("document") if shapes[0] and shapes[0][0] == 1 else Kind("other")

    def gather(self, outputs: Mapping[str, Tensor], layout: Layout) -> Gathered:
        """What a call says of each document, as `alone` gives it."""
        count = len(layout.encoder.spans)
        found, problems = {}, []
        for name, kind in self.kinds.items():
            try:
                given = outputs.get(name.removesuffix(WHOLE))
                if kind.of == "constant":
                    continue
                if given is None:
                    raise ShapeError(f"{name} is missing")
                if name.endswith(WHOLE) and not given.shape[0] == count != len(layout.encoder.ids):
                    continue  # in packed rows
                found[name] = _per_document(given, kind, layout, count, name)
            except ShapeError as error:
                problems.append(str(error))
        return Gathered(found, tuple(problems))


def _per_document(x: Tensor, kind: Kind, layout: Layout, count: int, name: str) -> Tensor:
    batch = layout.decoder if kind.side == "decoder" else layout.encoder
    assert batch is not None
    rows, width = batch.ids.shape
    shape = tuple(x.shape)
    if kind.of == "document":
        return _one_each(x, count, name)
    if kind.of == "sized" and shape[0] == count == len(kind.sizes):
        return torch.cat([_own(x[i], size, name).flatten() for i, size in enumerate(kind.sizes)])
    if kind.of == "flat" and shape[0] == rows * width:
        return batch.gather(x.unflatten(0, (rows, width)))
    if kind.of == "layered" and shape[1:3] == (rows, width):
        return batch.gather(x.movedim(0, 2))
    if kind.of == "token" and shape[:2] == (rows, width + kind.more):
        return batch.gather(x)
    if kind.more and shape[0] == count:
        lengths = [span.stop - span.start for _, span in batch.spans]
        return torch.cat([x[i, :n] for i, n in enumerate(lengths)])
    raise ShapeError(f"{name} has shape {shape} for {rows} x {width} tokens")


def _own(x: Tensor, size: tuple[int, ...], name: str) -> Tensor:
    """What a document has alone, of its row: zeros must follow."""
    own = tuple(slice(n) for n in size)
    rest = x.detach().clone()
    rest[own] = 0
    if x.ndim != len(size) or any(n > m for n, m in zip(size, x.shape, strict=True)) or bool(rest.any()):
        raise ShapeError(f"{name} has other values than zeros after a document's {size}, in {tuple(x.shape)}")
    return x[own]


def _one_each(x: Tensor, count: int, name: str) -> Tensor:
    """(count, ...) of an output with a value for each document, also where it stands beside another kind of rows: that
    of an image with a value for each text, or of each image with each text, of which each text has its own."""
    axes = [axis for axis, size in enumerate(x.shape) if size == count]
    if count == 1 or axes == [0] or (axes and axes[0] == 0 and x.ndim != 2):
        return x
    if axes == [0, 1]:
        return x.diagonal()[:, None]
    if axes and x.shape[0] == 1:
        return torch.cat([x.narrow(axes[0], i, 1) for i in range(count)])
    raise ShapeError(f"{name} has shape {tuple(x.shape)} for {count} documents")


def _tensors(output: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.numel():
            yield prefix, output
        return
    if isinstance(output, Mapping):
        pairs: Any = output.items()
    elif isinstance(output, (tuple, list)):
        pairs = enumerate(output)
    else:
        return
    for name, value in pairs:
        if name not in LEFT_OUT:
            yield from _tensors(value, f"{prefix}.{name}" if prefix else str(name))


def _vocabulary(model: Any, config: Any) -> int:
    for part in (config, config.get_text_config(decoder=True)):
        if type(size := getattr(part, "vocab_size", None)) is int:
            return int(size)
    try:
        return int(model.get_input_embeddings().num_embeddings)
    except (NotImplementedError, AttributeError):  # characters, hashed
        return 64
