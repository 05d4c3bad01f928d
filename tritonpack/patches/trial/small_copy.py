"""A small random copy of a model, from its configuration alone."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tritonpack.patches.families import CODEBOOKS, HEADS_SHIFT, PROMPT_TYPES
from tritonpack.patches.forwards import holds_both_sides
from tritonpack.patches.tokens import special_tokens
from tritonpack.patches.trial.packed_forms import FORMS, Batch, Form, Subject, paired, values_of, with_choices
from tritonpack.patches.trial.shrink import shrink

# What models are looked for among, in this order, and what each is called.
AUTO = {
    "AutoModelForCausalLM": "a causal language model",
    "AutoModelForImageTextToText": "a multimodal language model, given text alone",
    "AutoModel": "a model without a language head: its hidden states are compared",
}

# Wholes whose language model takes the configuration of a part.
PARTS = {"musicgen": "decoder", "musicgen_melody": "decoder"}


class NotSmallError(ValueError):
    """A configuration that no small copy can be built from; the message says why."""


@dataclass(frozen=True)
class Built:
    """A model, and what it is.

    Attributes:
        model: in evaluation mode.
        kind: the name of its class, and what it is.
        notes: what isn't as the configuration says.
    """

    model: nn.Module
    kind: str
    notes: tuple[str, ...] = ()


def small_copy(config: Any, *, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> Built:
    """Build a small random model with every switch of a configuration (see `shrink`).

    Args:
        config: a transformers configuration; it stays as it is.
        dtype: of the weights.
        seed: of the weights.
        options: as the `from_config` of transformers' auto classes takes them, such as `trust_remote_code`.

    Raises:
        NotSmallError: transformers builds no such model, or not in this size.
    """
    try:
        torch.default_generator.manual_seed(seed)  # a few parts draw their constants at construction
        auto, small = auto_class(config), shrink(config)
        small.name_or_path = config.name_or_path  # where a model's own code lies
        if config.model_type in PARTS:
            model = model_class(config)(part_of(small))
        else:  # the fused experts know no float64
            model = auto.from_config(small, experts_implementation="eager", **options)
    except Exception as error:  # whatever a configuration's or a model's own code raises
        reason = one_line(error)
        text = config.get_text_config(decoder=True)
        if text is config or text.__class__ is config.__class__:
            raise NotSmallError(reason) from error
        try:
            inside = small_copy(text, dtype=dtype, seed=seed, **options)
        except NotSmallError:
            raise NotSmallError(reason) from error
        note = f"only the language model inside was built, because the whole can't be: {reason}"
        return Built(inside.model, inside.kind, (note, *inside.notes))
    spread(model, torch.Generator().manual_seed(seed))
    return Built(model.to(dtype).eval(), f"{type(model).__name__}, {AUTO[auto.__name__]}")


def small_model(kind: type[nn.Module], config: Any, *, seed: int = 0) -> nn.Module:
    """Build a small random model of one class, in float32 and in evaluation mode, with every switch of a configuration.

    Args:
        kind: a model class whose only required argument is a configuration.
        config: as the class takes it; it stays as it is.
        seed: of the weights.

    Raises:
        NotSmallError: the class builds no such model, or not in this size.
    """
    try:
        torch.default_generator.manual_seed(seed)
        small: Any = shrink(config)
        small._experts_implementation = "eager"  # the fused experts know no float64
        model = kind(small)
        _fill(model)
    except Exception as error:  # whatever a configuration's or a model's own code raises
        raise NotSmallError(one_line(error)) from error
    spread(model, torch.Generator().manual_seed(seed))
    return model.float().eval()


def _fill(model: Any) -> None:
    """Give values to the parameters that a context of the caller has left empty: `init_empty_weights`,
    `no_init_weights`."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                fill = torch.zeros if parameter.ndim > 1 else torch.ones
                filled = nn.Parameter(fill(parameter.shape), requires_grad=parameter.requires_grad)
                module._parameters[name] = made.setdefault(id(parameter), filled)
                module._is_hf_initialized = False
    if any(buffer.is_meta for buffer in model.buffers()):
        raise ValueError("its buffers are on the meta device")
    model.initialize_weights()  # those of modules that have been initialized stay


def auto_class(config: Any) -> Any:
    """The first of the classes in `AUTO` that has a model for a configuration.

    Raises:
        ValueError: none has.
    """
    import transformers

    for name in AUTO:
        if type(config) in _mapping(name) or name in (getattr(config, "auto_map", None) or {}):
            return getattr(transformers, name)
    raise ValueError(f"transformers has no model for a {type(config).__name__}")


def model_class(config: Any) -> Any:
    """The model class of a configuration whose class transformers knows."""
    return _mapping(auto_class(config).__name__)[type(config)]


def _mapping(auto: str) -> Any:
    from transformers.models.auto import modeling_auto

    return {
        "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        "AutoModelForImageTextToText": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        "AutoModel": modeling_auto.MODEL_MAPPING,
    }[auto]


def part_of(config: Any) -> Any:
    """The part of a configuration that its language model takes, mostly all of it."""
    return getattr(config, PARTS[config.model_type]) if config.model_type in PARTS else config


def spread(model: nn.Module, generator: torch.Generator) -> None:
    """Weights under which every part contributes: transformers' own are so small that attention hardly shows."""
    done: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in done or parameter.numel() == 0:
                continue
            done.add(id(parameter))
            noise = torch.randn(parameter.shape, generator=generator)
            values = parameter.data
            settled = bool(values.isfinite().all()) and 0.1 < float(values.abs().mean()) < 100
            if isinstance(module, nn.Embedding):
                parameter.data = 0.5 * noise
            elif parameter.ndim >= 2 and not settled:
                parameter.data = noise / parameter.shape[-1] ** 0.5
            else:  # norms, decays, biases, sinks: where they were meant to be, but no two alike
                parameter.data = values + 0.2 * noise


def subject_of(model: nn.Module) -> Subject:
    """How a model is called with documents of ordinary tokens: none that its configuration names, such as padding."""
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    size = getattr(text, "vocab_size", None) or model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    named = special_tokens(config)
    ordinary = torch.tensor([token for token in range(size) if token not in named])

    end = end_read_by(model)

    def draw(lengths: tuple[int, ...], seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        documents = [ordinary[torch.randint(len(ordinary), (1, n), generator=generator)] for n in lengths]
        for document in documents:
            document[:, -1] = document[:, -1] if end is None else end
        return documents

    if takes_pairs(model):
        return pairs_subject(model, draw, ordinary)
    if takes_choices(model):
        return choices_subject(model, draw, exchanged(ordinary, size))
    books = codebooks_of(text)
    return Subject(
        model,
        draw,
        call=lambda ids: {"input_ids": rows_for_codebooks(ids, books, size), **as_prompts(model, ids)},
        values=lambda output: side_by_side(values_of(output), books),
    )


def end_read_by(model: nn.Module) -> int | None:
    """The token at which an encoder with a decoder reads the scores of a document; None for other models."""
    scores = any(kind.__name__.endswith("ForSequenceClassification") for kind in type(model).__mro__)
    return getattr(model.config, "eos_token_id", None) if scores and holds_both_sides(model) else None


def as_prompts(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """The argument that makes prompts of all tokens (B, T), for models that want to be told (`PROMPT_TYPES`)."""
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    typed = any(module.config.model_type in PROMPT_TYPES for module in models)
    return {"token_type_ids": torch.zeros_like(ids)} if typed else {}


def takes_pairs(model: nn.Module) -> bool:
    """Whether a model is called with tokens of an encoder and of a decoder; some make the latter of the former."""
    return holds_both_sides(model) and not type(model).__name__.endswith(HEADS_SHIFT)


def pairs_subject(
    model: nn.Module, draw: Callable[[tuple[int, ...], int], list[Tensor]], ordinary: Tensor, **options: Any
) -> Subject:
    """How an encoder with a decoder is called with pairs of documents.

    Args:
        model: the model.
        draw: as `Subject` takes it: documents of the decoder.
        ordinary: `[n]` token ids, of which the encoder's documents are drawn.
        options: of `Subject`.
    """

    def source_of(target: Tensor) -> Tensor:
        """A document of another length, and of tokens that follow from all tokens of the target."""
        weights = torch.arange(1, target.shape[1] + 1, device=target.device)
        generator = torch.Generator().manual_seed(int((target * weights).sum()))
        length = 3 * target.shape[1] % 11 + 1
        return ordinary[torch.randint(len(ordinary), (1, length), generator=generator)].to(target.device)

    def call(ids: Tensor) -> dict[str, Tensor]:
        return {"decoder_input_ids": ids, **({"input_ids": source_of(ids)} if ids.shape[0] == 1 else {})}

    forms = {name: paired(form, source_of) for name, form in FORMS.items()}
    return Subject(model, draw, call, forms=forms, **options)


def takes_choices(model: nn.Module) -> bool:
    """Whether a model is called with several choices to a row, by the names of its classes."""
    return any(kind.__name__.endswith("ForMultipleChoice") for kind in type(model).__mro__)


def choices_subject(
    model: nn.Module, draw: Callable[[tuple[int, ...], int], list[Tensor]], another: Callable[[Tensor], Tensor]
) -> Subject:
    """How a model is called that takes choices; its arguments are as `with_choices` makes them."""

    def choosing(form: Form) -> Form:
        def lay_out(documents: list[Tensor]) -> Batch:
            batch = form(documents)
            return replace(batch, arguments=with_choices(batch.arguments, another))

        return lay_out

    forms = {name: choosing(form) for name, form in FORMS.items()}
    return Subject(model, draw, lambda ids: with_choices({"input_ids": ids}, another), forms=forms)


def exchanged(ordinary: Tensor, size: int) -> Callable[[Tensor], Tensor]:
    """A function that puts another ordinary token in the place of each, and leaves others, such as padding, alone."""
    table = torch.arange(size)
    table[ordinary] = ordinary.roll(1)
    return lambda ids: table.to(ids.device)[ids]


def codebooks_of(config: Any) -> int:
    """How many rows of ids stand for one row of tokens, as in a few decoders of sound."""
    return config.num_codebooks if config.model_type in CODEBOOKS else 1


def rows_for_codebooks(ids: Tensor, books: int, size: int) -> Tensor:
    """(B * books, T) ids below `size` for ids (B, T): one row for every codebook, no two of a token alike; padding, 0,
    is the same in all."""
    if books == 1:
        return ids
    return torch.stack([torch.where(ids == 0, 0, (ids + i) % size) for i in range(books)], dim=1).flatten(0, 1)


def side_by_side(values: Tensor, books: int) -> Tensor:
    """(B, T, books * n) values of rows of codebooks (B * books, T, n)."""
    return values.unflatten(0, (-1, books)).transpose(1, 2).flatten(2) if books > 1 else values


def one_line(error: BaseException) -> str:
    """An error in one line of moderate length, without a full stop."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 240, placeholder=" [...]").rstrip(".")
