"""How a class is called with documents in rows, and how its outputs are cut into documents."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.patches import zoo
from tests.patches.sweep.extras import extras
from tests.patches.sweep.forms import OF_TOKENS, alone, end_to_end
from tests.patches.sweep.outputs import Output, UnlikeError, outputs_alone, parts_of
from tests.patches.zoo import DIFFERENTIABLE, codebooks_of, rows_for_codebooks, side_by_side
from tritonpack.patches.configurations import is_config, special_tokens
from tritonpack.patches.measuring import Batch, draw
from tritonpack.patches.parse_inputs import CACHES

# The least number of tokens in documents of a few model types.
SHORTEST = {"canine": 5, "funnel": 4, "longformer": 4}

# The lengths of a decoder's documents, by the lengths of the encoder's.
DECODER_LENGTHS = {7: 5, 1: 2, 3: 6, 11: 4}

# Caches, which packed batches don't return, and attention weights, which patched models don't compute.
LEFT_OUT = (
    *CACHES, "past_buckets_states", "encoder_past_key_values", "attentions", "encoder_attentions", "decoder_attentions",
    "cross_attentions", "loss",
)  # fmt: skip

# Encoder-decoder models whose configuration doesn't say so.
WITH_DECODER = ("BlipForQuestionAnswering",)

PER_TOKEN = (*OF_TOKENS, "token_type_ids")


@dataclasses.dataclass(frozen=True)
class Gathered:
    """The parts that documents have of the outputs of a call, by name, and what is wrong with outputs without parts."""

    parts: dict[str, list[Tensor]]
    problems: tuple[str, ...] = ()


class Subject:
    """A model, and how it is called.

    Args:
        model: in evaluation mode.
        stock: call it only with arguments that it knows; an unpatched model is called as it can be.
    """

    def __init__(self, model: nn.Module, *, stock: bool = False) -> None:
        self.model, self.stock = model, stock
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
        self.expected: dict[str, Output] = {}  # filled by `alone`, as are the names of all outputs
        self.outputs: tuple[str, ...] = ()

    def draw(self, lengths: tuple[int, ...], seed: int = 1) -> list[Tensor]:
        """Draw documents `[1, n]` of these lengths from ordinary tokens, with the end token that a head looks for."""
        shortest = SHORTEST.get(self.config.model_type, 1)
        documents = draw(self.ordinary, tuple(max(n, shortest) for n in lengths), seed)
        lead = torch.tensor([self.extras.lead], dtype=torch.long)
        documents = [torch.cat([lead, document], dim=1) for document in documents]
        if self.ends:
            for document in documents:
                document[:, -1] = self.config.eos_token_id
        return documents

    def targets(self, documents: list[Tensor]) -> list[Tensor]:
        """Return the decoder's documents: they have other lengths, and the last token of each document seeds them."""
        lengths = [DECODER_LENGTHS.get(d.numel(), d.numel()) for d in documents]
        return [draw(self.ordinary, (n,), 100 + int(d[0, -1]))[0] for n, d in zip(lengths, documents, strict=True)]

    def lay_out(self, form: Callable[[list[Tensor]], Batch], documents: list[Tensor]) -> Batch:
        """Lay out documents in a form; for an encoder-decoder model, those of both sides."""
        batch = form(documents)
        return dataclasses.replace(form(self.targets(documents)), source=batch) if self.both else batch

    def arguments(self, laid: Batch) -> dict[str, Any]:
        """Return the keyword arguments of a call."""
        batch, decoder = (laid, None) if laid.source is None else (laid.source, laid)
        ids = batch.ids if self.both else rows_for_codebooks(batch.ids, self.books, self.size)
        told = dict(batch.arguments)
        if self.only_decoder:
            told = {f"decoder_{name}" if name in PER_TOKEN else name: value for name, value in told.items()}
            arguments = {"decoder_input_ids": ids, **told}
        else:
            arguments = {**(zoo.call(self.model, ids) if self.drafts else {"input_ids": ids}), **told}
        if decoder is not None:
            arguments["decoder_input_ids"] = rows_for_codebooks(decoder.ids, self.books, self.size)
            told = decoder.arguments
            for name in PER_TOKEN:
                if name in told and (f"decoder_{name}" in self.names or (name in OF_TOKENS and not self.stock)):
                    arguments[f"decoder_{name}"] = told[name]
            for name in ("cu_seq_lens", "max_length"):  # of the decoder's queries and the encoder's keys
                if f"{name}_q" in told:
                    arguments[f"{name}_k"], arguments[f"{name}_q"] = arguments[f"{name}_q"], told[f"{name}_q"]
        if self.extras.columns:
            name, columns, size = self.extras.columns
            arguments[name] = torch.stack([(arguments[name] + i) % size for i in range(columns)], dim=-1)
        if self.choices:
            arguments = self._with_choices(arguments)
        if "use_cache" in arguments and "use_cache" not in self.names and not self.takes_any:
            del arguments["use_cache"]
        dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
        if self.config.model_type == "fsmt":  # with a cache, its decoder sees both ways
            arguments = {"use_cache": False, **arguments}
        if torch.is_grad_enabled():
            arguments = {**DIFFERENTIABLE.get(self.config.model_type, {}), **arguments}
        for name, make in self.extras.arguments.items():
            if name not in arguments:
                value = make(self.config, batch)
                arguments[name] = value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        if self.stock and not self.takes_any:
            arguments = {name: value for name, value in arguments.items() if name in self.names}
        return arguments

    def _with_choices(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call in multiple choice: each document and its copy in other tokens.

        Arguments `[b, t]` with a value for each token become `[b, 2, t]`. Offsets are taken for a single row.
        """
        table, found = torch.arange(self.size), dict(arguments)  # each ordinary token becomes another one
        table[self.ordinary] = self.ordinary.roll(1)
        for name, value in arguments.items():
            if name in ("input_ids", *OF_TOKENS):
                found[name] = torch.stack([value, table[value] if name == "input_ids" else value], dim=1)
            elif name in ("cu_seq_lens_q", "cu_seq_lens_k"):
                found[name] = torch.cat([value, value[1:] + value[-1]])
        return found

    def call(self, batch: Batch, **more: Any) -> dict[str, Tensor]:
        """Return all floating-point outputs by name, with the rows of codebooks, or of choices, side by side."""
        output = self.model(**self.arguments(batch), **more)
        found = dict(_tensors(output))
        columns = 2 if self.choices else self.books
        if columns > 1:
            encoder = batch.source or batch
            rows = {encoder.ids.shape[0] * columns, len(encoder.spans) * columns}  # or of documents
            found = {
                name: side_by_side(x, columns)
                if x.ndim == 3 and x.shape[0] in rows and (self.choices or name == "logits")
                else x
                for name, x in found.items()
            }
        return found

    def alone(self, documents: list[Tensor], **more: Any) -> dict[str, Output]:
        """Return the outputs of each document in a call of its own, with nothing but its tokens.

        `gather` cuts outputs of packed documents into such parts from then on.
        """
        calls = [self.call(self.lay_out(alone, [document]), **more) for document in documents]
        found = outputs_alone(calls, self.lay_out(end_to_end, documents))
        self.outputs = tuple(calls[0])
        self.expected = {name: output for name, output in found.items() if not output.is_constant}
        return self.expected

    def gather(self, outputs: Mapping[str, Tensor], batch: Batch, *, strict: bool = True) -> Gathered:
        """Cut the outputs of a call into documents."""
        found, problems = {}, []
        for name, expected in self.expected.items():
            value = outputs.get(name)
            if value is not None and expected.kind == "document":
                value = _one_each(value, len(batch.spans))
            try:
                found[name] = parts_of(name, expected, value, batch, strict=strict)
            except UnlikeError as error:
                problems.append(str(error))
        return Gathered(found, tuple(problems))


def _one_each(x: Tensor, count: int) -> Tensor:
    """The values (count, ...) of an output with one value for each document.

    The output may have another dimension: one image with a value for each text, or each image with each text. Each text
    then has its own image.
    """
    axes = [axis for axis, size in enumerate(x.shape) if size == count]
    if axes == [0, 1] and x.ndim == 2:
        return x.diagonal()[:, None]
    if axes and axes[0] > 0 and x.shape[0] == 1:
        return torch.cat([x.narrow(axes[0], i, 1) for i in range(count)])
    return x


def _tensors(output: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.numel():
            yield prefix or "output", output
        return
    if isinstance(output, Mapping):
        pairs: Any = output.items()
    elif isinstance(output, (tuple, list)):
        pairs = enumerate(output)
    else:
        return
    for name, value in pairs:
        if name not in LEFT_OUT:
            yield from _tensors(value, f"{prefix}[{name}]" if prefix else str(name))


def _vocabulary(model: Any, config: Any) -> int:
    for part in (config, config.get_text_config(decoder=True)):
        if type(size := getattr(part, "vocab_size", None)) is int:
            return int(size)
    try:
        return int(model.get_input_embeddings().num_embeddings)
    except (NotImplementedError, AttributeError):  # characters, hashed
        return 64
