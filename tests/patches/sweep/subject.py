"""How a class is called with documents in rows, and its outputs as values of each document."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.patches.sweep.forms import MASK, OF_TOKENS, Form, alone, form, in_rows
from tests.patches.zoo import DIFFERENTIABLE, apart, gradients_of
from tritonpack.patches.configurations import special_tokens
from tritonpack.patches.measuring import Batch, draw, parts_in
from tritonpack.patches.targets import IGNORED

# What a few classes take beside plain text: images, sounds, leading tokens. Images and sounds are the same for
# every row, or for every document, so that documents differ by their text alone.

Make = Callable[[Any, Batch], Any]  # of a configuration and a batch
MARK = 5  # a token that marks an image or a question; no document draws it


def _same(*shape: Any, per: str = "row") -> Make:
    """Make the same random numbers for every row, or for every document; the shape may be a function of the config."""

    def make(config: Any, batch: Batch) -> Tensor:
        sizes = shape[0](config) if callable(shape[0]) else shape
        values = torch.randn(sizes, generator=torch.Generator().manual_seed(4))
        return values.expand(len(batch.ids if per == "row" else batch.spans), *sizes)

    return make


def _image_shape(config: Any) -> tuple[int, ...]:
    part = next((x for x in (getattr(config, n, None) for n in ("vision_config", "encoder")) if x), config)
    size = getattr(part, "image_size", None) or getattr(config, "image_size", None) or 8
    sides = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    return getattr(part, "num_channels", 3) or 3, *sides


def _whole(value: int, *shape: int) -> Make:
    """Make [documents, *shape] of one integer."""
    return lambda config, batch: torch.full((len(batch.spans), *shape), value)


def _tokens(*values: float) -> Make:
    """Make [b, t, n] with the same values for every token."""
    return lambda config, batch: torch.tensor(values).expand(*batch.ids.shape, len(values))


def _prompts(config: Any, batch: Batch) -> Tensor:
    """[b, t], 0 for the first half of a document, its prompt, and 1 for its answer and for padding."""
    types = torch.ones_like(batch.ids)
    for row, span in batch.spans:
        length = batch.ids[row, span].numel()
        types[row, span][: (length + 1) // 2] = 0
    return types


def _ends(config: Any, batch: Batch) -> Tensor:
    if len(batch.ids) > 1:
        raise ValueError("it takes one row")
    return torch.tensor([[span.stop for _, span in batch.spans]])


# {argument: the function that makes it}, by model types or classes.
TABLE: list[tuple[str, dict[str, Make]]] = [
    ("blip sam3 owlv2 owlvit pp_formulanet", {"pixel_values": _same(_image_shape)}),
    # They compare each text with each image, so they get as many images as texts.
    ("align chinese_clip clip clipseg metaclip_2 siglip groupvit vision-text-dual-encoder blip-2 Owlv2Model "
     "OwlViTModel BlipModel", {"pixel_values": _same(_image_shape, per="document")}),
    ("paligemma ColPaliForRetrieval", {"token_type_ids": _prompts}),
    ("grounding-dino mm-grounding-dino", {"pixel_values": _same(3, 64, 64)}),
    ("idefics", {"pixel_values": _same(lambda config: (1, *_image_shape(config))), "image_attention_mask": _tokens(1)}),
    ("siglip2", {"pixel_values": _same(4, 48, per="document"), "pixel_attention_mask": _whole(1, 4),
                 "spatial_shapes": _whole(2, 2)}),
    ("udop bros", {"bbox": _tokens(0.1, 0.2, 0.5, 0.6)}),
    ("pix2struct", {"flattened_patches": lambda config, batch: torch.ones(batch.ids.shape[0], 4, 14)}),
    ("whisper", {"input_features": _same(lambda config: (config.num_mel_bins, 2 * config.max_source_positions))}),
    ("moonshine_streaming", {"input_values": _same(1600)}),
    ("speech-encoder-decoder", {"input_values": _same(200)}),
    ("canary cohere_asr", {"input_features": _same(lambda config: (24, config.encoder_config.num_mel_bins))}),
    ("jev", {"marks": _ends, "num_options": lambda config, batch: torch.ones(1, len(batch.spans), dtype=torch.long),
             "question_type_ids": lambda config, batch: torch.zeros(1, len(batch.spans), dtype=torch.long)}),
]  # fmt: skip
NEEDS = {kind: arguments for kinds, arguments in TABLE for kind in kinds.split()}

# The tokens at the beginning of every document, by model type.
LEADS: dict[str, tuple[int, ...]] = {"blip-2": (MARK,) * 2, "esm": (MARK,)}


def extras_of(model: Any) -> tuple[dict[str, Make], tuple[int, ...]]:
    """Return what a class takes beside plain text: {argument: what makes it}, and the tokens of every beginning."""
    name, kind = type(model).__name__, model.config.model_type
    arguments = NEEDS.get(name, NEEDS.get(kind, {}))
    if name not in NEEDS:  # some classes take fewer arguments than others of their type
        names = inspect.signature(model.forward).parameters
        arguments = {name: make for name, make in arguments.items() if name in names}
    return arguments, LEADS.get(kind, ())


# The lengths of a decoder's documents, by the lengths of the encoder's.
DECODER_LENGTHS = {7: 5, 1: 2, 3: 6, 11: 4}
PER_TOKEN = (*OF_TOKENS, "token_type_ids")
OF_PAIRS = ("logits_per_image", "logits_per_text")  # outputs with a value for each image and text
Outputs = dict[str, list[Tensor]]  # the values of each document, by the name of the output


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
        encodes = bool(getattr(self.config, "is_encoder_decoder", False))
        both = encodes and "decoder_input_ids" in self.names
        self.only_decoder = both and "input_ids" not in self.names
        self.both = both and not self.only_decoder and not self.sentence and "QuestionAnswering" not in self.class_name
        self.ends = encodes and "SequenceClassification" in self.class_name
        self.size = _vocabulary(model, self.config)
        named = special_tokens(self.config)
        self.ordinary = torch.tensor([token for token in range(6, self.size) if token not in named])
        self.extras, self.lead = extras_of(model)

    def draw(self, lengths: tuple[int, ...], seed: int = 1) -> list[Tensor]:
        """Draw documents `[1, n]` of these lengths from ordinary tokens, with the end token that a head looks for."""
        lead = torch.tensor([self.lead], dtype=torch.long)
        documents = [torch.cat([lead, document], dim=1) for document in draw(self.ordinary, lengths, seed)]
        if self.ends:
            for document in documents:
                document[:, -1] = self.config.eos_token_id
        return documents

    def targets(self, documents: list[Tensor]) -> list[Tensor]:
        """Return the decoder's documents: they have other lengths, and the last token of each document seeds them."""
        lengths = [DECODER_LENGTHS.get(d.numel(), d.numel()) for d in documents]
        return [draw(self.ordinary, (n,), 100 + int(d[0, -1]))[0] for n, d in zip(lengths, documents, strict=True)]

    def lay_out(self, form: Form, documents: list[Tensor]) -> Batch:
        """Lay out documents in a form; for an encoder-decoder model, those of both sides."""
        batch = form(documents)
        return dataclasses.replace(form(self.targets(documents)), source=batch) if self.both else batch

    def arguments(self, laid: Batch) -> dict[str, Any]:
        """Return the keyword arguments of a call."""
        batch, decoder = (laid, None) if laid.source is None else (laid.source, laid)
        arguments = {"input_ids": batch.ids, **batch.arguments}
        if self.only_decoder:
            per_token = ("input_ids", *PER_TOKEN)
            arguments = {f"decoder_{name}" if name in per_token else name: x for name, x in arguments.items()}
        if decoder is not None:
            arguments["decoder_input_ids"], told = decoder.ids, decoder.arguments
            for name in PER_TOKEN:
                if name in told and (f"decoder_{name}" in self.names or (name in OF_TOKENS and not self.stock)):
                    arguments[f"decoder_{name}"] = told[name]
            for name in ("cu_seq_lens", "max_length"):  # of the decoder's queries and the encoder's keys
                if f"{name}_q" in told:
                    arguments[f"{name}_k"], arguments[f"{name}_q"] = arguments[f"{name}_q"], told[f"{name}_q"]
        if self.config.model_type == "dia":  # each token is a column
            arguments["decoder_input_ids"] = torch.stack([arguments["decoder_input_ids"]] * 2, dim=-1)
        if self.choices:
            arguments = self._with_choices(arguments)
        if "use_cache" not in self.names and not self.takes_any:
            arguments.pop("use_cache", None)
        if torch.is_grad_enabled():
            arguments = {**DIFFERENTIABLE.get(self.config.model_type, {}), **arguments}
        dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
        for name in self.extras.keys() - arguments.keys():
            value = self.extras[name](self.config, batch)
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

    def call(self, batch: Batch, **more: Any) -> Outputs:
        """Return the outputs of a call that have values for each token or for each document."""
        output = self.model(**self.arguments(batch), **more)
        found = parts_in(output, batch)
        if batch.source is not None:  # both sides may have as many tokens
            found |= {name: x for name, x in parts_in(output, batch.source).items() if name.startswith("encoder_")}
        return {name: x for name, x in found.items() if isinstance(x, list) and name not in OF_PAIRS}

    def alone(self, documents: list[Tensor], **more: Any) -> Outputs:
        """Return the outputs of each document in a call of its own, with nothing but its tokens.

        An output that is the same for all documents, such as a scale, is left out.
        """
        calls = [self.call(self.lay_out(alone, [document]), **more) for document in documents]
        found = {name: [call[name][0] for call in calls if name in call] for name in calls[0]}
        return {
            name: parts for name, parts in found.items()
            if len(parts) == len(calls) and not (len(parts) > 1 and apart(parts, parts[:1] * len(parts)) == 0)
        }  # fmt: skip


def difference(expected: Outputs, got: Outputs) -> float:
    """Return the largest difference over all expected outputs, relative to the largest value of each."""
    flat = {name: [part.flatten() for part in parts] for name, parts in got.items()}  # (1, n) or (n,) for one token
    return max(
        (apart([part.flatten() for part in parts], flat[name]) if name in flat else torch.inf
         for name, parts in expected.items()), default=0.0,
    )  # fmt: skip


def _vocabulary(model: Any, config: Any) -> int:
    for part in (config, config.get_text_config(decoder=True)):
        if type(size := getattr(part, "vocab_size", None)) is int:
            return int(size)
    return int(model.get_input_embeddings().num_embeddings)


# Losses with labels, auxiliary ones too: of a packed batch, compared with the same documents without a patch.
#
# A loss is a mean over labels, so the loss of a packed batch is the mean of the losses of documents alone, weighted by
# their numbers of labels. A router's loss averages over all tokens of a call but padding, and two losses of both kinds
# have no common weight. For those the reference is a padded batch of the same documents with its mask.

SCORES = ("ViltForQuestionAnswering",)  # the label of a document has a score for each answer, (documents, answers)
EVERY_TOKEN = ("ElectraForPreTraining",)  # labels of two kinds, for all tokens but padding
OF_DOCUMENTS = ("next_sentence_label", "sentence_order_label")


class NoLossError(Exception):
    """A class has no loss, or no reference for it; the message says why."""


class Losses(NamedTuple):
    """Losses by name, and the gradients of all parameters."""

    losses: Mapping[str, Tensor]
    gradients: Sequence[Tensor | None]

    def difference(self, got: Losses) -> float:
        """Return how far other losses and gradients are from these, relative to the largest of these."""
        losses = [apart([self.losses[name]], [got.losses[name]]) for name in self.losses.keys() & got.losses.keys()]
        return max(*losses, apart(self.gradients, got.gradients))


@torch.enable_grad()
def losses_of(subject: Subject, documents: list[Tensor], form: Form) -> Losses:
    """Return the losses of documents in a form; raise NoLossError if one isn't a single number."""
    batch = subject.lay_out(form, documents)
    output = subject.model(**{**subject.arguments(batch), **_switches(subject), **labels(subject, batch)})
    named = {"loss": output[0]} if isinstance(output, tuple) else output if isinstance(output, Mapping) else {}
    found = {
        name: value.flatten() for name, value in named.items()
        if name.endswith("loss") and isinstance(value, Tensor) and value.is_floating_point()
    }  # fmt: skip
    if "loss" not in found or any(value.numel() != 1 for value in found.values()):
        raise NoLossError(f"its losses have the shapes {[tuple(value.shape) for value in found.values()]}")
    return Losses({name: x.detach() for name, x in found.items()}, gradients_of(subject.model, found["loss"]))


def expected_losses(subject: Subject, documents: list[Tensor], limit: float) -> Losses:
    """Return the losses of a model without a patch; raise NoLossError if it has none, or padding changes it."""
    if not {"labels", "start_positions"} & subject.names:
        raise NoLossError
    if _switches(subject) or subject.names & {*OF_DOCUMENTS}:  # two losses have no common weight
        found, longer = (losses_of(subject, documents, form(MASK, rows=in_rows, more=more)) for more in (0, 3))
        if len(found.losses) > 1 or not _switches(subject):
            if (apart := found.difference(longer)) > limit:
                raise NoLossError(f"padding moves its loss without a patch, by {apart:.0e}")
            return found
    return _mean_of(subject, documents)


def _mean_of(subject: Subject, documents: list[Tensor]) -> Losses:
    """Return the mean of the losses of documents alone, weighted by their numbers of labels."""
    given = [labels(subject, subject.lay_out(alone, [document])) for document in documents]
    counts = [int((one.get("start_positions", one.get("labels")) != IGNORED).sum()) for one in given]
    found = [(n, losses_of(subject, [d], alone)) for n, d in zip(counts, documents, strict=True) if n]

    def mean(values: Sequence[Tensor | None]) -> Any:
        weighted = [n * x for (n, _), x in zip(found, values, strict=True) if x is not None]
        return sum(weighted) / sum(counts) if weighted else None

    loss = mean([one.losses["loss"] for _, one in found])
    return Losses({"loss": loss}, [mean(one) for one in zip(*(x.gradients for _, x in found), strict=True)])


def _switches(subject: Subject) -> dict[str, Any]:
    """Return the arguments that turn auxiliary losses on, if a class has any."""
    text = subject.config.get_text_config(decoder=True)
    routed = any(hasattr(config, "router_aux_loss_coef") for config in (subject.config, text))
    if "output_router_logits" in subject.names or (routed and subject.takes_any):
        return {"output_router_logits": True}
    return {}


def labels(subject: Subject, batch: Batch) -> dict[str, Tensor]:
    """Return labels of every kind that a class takes: for each token but a document's first, and for each document."""
    first = torch.stack([batch.ids[row, span.start] for row, span in batch.spans])  # the first token of each document
    lengths = torch.tensor([span.stop - span.start for _, span in batch.spans])
    classes = int(getattr(subject.config, "num_labels", 2))
    given: dict[str, Tensor] = {}
    if "labels" in subject.names:
        if subject.sentence:
            two = subject.choices or "NextSentence" in subject.class_name
            given["labels"] = first % (2 if two else classes)
        elif subject.class_name in SCORES:
            scores = (first[:, None] + torch.arange(classes)) % 3 / 2
            given["labels"] = scores.to(next(subject.model.parameters()).dtype)
        elif subject.class_name in EVERY_TOKEN:
            given["labels"] = batch.ids % 2
        else:
            limit = classes if "TokenClassification" in subject.class_name else subject.size
            given["labels"] = token_labels(batch, limit)
    for name in {*OF_DOCUMENTS} & subject.names:
        given[name] = first % 2
    if "start_positions" in subject.names:
        given |= {"start_positions": (lengths - 1) // 2, "end_positions": lengths - 1}
    return given


def token_labels(batch: Batch, classes: int) -> Tensor:
    """(B, T) tokens modulo the number of classes; `IGNORED` for padding and the first token of each document."""
    labels = torch.full_like(batch.ids, IGNORED)
    for row, span in batch.spans:
        labels[row, span] = batch.ids[row, span] % classes
        labels[row, span.start] = IGNORED
    return labels
