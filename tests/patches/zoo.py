"""A tiny random model of every causal language model type that transformers knows, with features that matter.

Windows, chunks and selections are shorter than the documents of the tests, and every kind of layer that a family has
is present, so that a patch which forgets one of them shows. What a type needs is a row in `zoo.yaml`.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import transformers
import yaml
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

DATA = yaml.safe_load((Path(__file__).parent / "zoo.yaml").read_text())
VOCAB = 64


def _rows() -> dict[str, dict[str, Any]]:
    """One row for every type; later rows add to earlier ones."""
    rows: dict[str, dict[str, Any]] = {}
    for row in DATA["types"]:
        for name in row["types"].split():
            rows[name] = {**rows.get(name, {}), **row["set"]}
    return rows


COMMON: dict[str, Any] = {key: value for group in DATA["common"] for key, value in group.items()}
# What is set for each type, and for each type of a part.
ROWS = _rows()
VARIANTS: dict[str, dict[str, Any]] = DATA["variants"]
# Encoders with decoders that are packed exactly.
PAIRS = (
    "bart", "bigbird_pegasus", "encoder-decoder", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "mt5",
    "mvp", "pegasus", "plbart", "seamless_m4t", "seamless_m4t_v2", "t5", "t5gemma", "t5gemma2", "umt5",
)  # fmt: skip
MODEL_TYPES: tuple[str, ...] = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))

# A constant or a cast in the model's own code fails in float64, or gives NaN.
FLOAT32_ONLY = frozenset({"inkling2_loop_text", "inkling2_text", "prophetnet", "xglm"})
# Its backward runs only in training mode, which takes only documents whose length is a multiple of its chunks.
FORWARD_ONLY = frozenset({"reformer"})
# Arguments with which a call has gradients: a state that is updated in place has none.
DIFFERENTIABLE: dict[str, dict[str, Any]] = {"rwkv": {"use_cache": False}, "xlstm": {"use_cache": False}}
UNBUILT: dict[str, str] = {
    "gemma4_assistant": "its configuration demands layers without inputs of their own that all share another model's "
    "keys, and in transformers 5.24 Gemma4TextModel fails to cut the missing inputs",
}

# Model types whose language model takes a part of the configuration, and the name of that part.
PARTS = {"musicgen": "decoder", "musicgen_melody": "decoder"}

# The types of parts that may be of any type, in versions of transformers whose configurations name no default.
PART_TYPES = {"text_encoder": "t5", "audio_encoder": "encodec"}

# Types that are refused; `VARIANTS` of a type may be, too. The others are exact.
REFUSED = {
    "gemma4_unified_assistant": "drafts tokens from another model's cache",
    "prophetnet": "masks and position buckets of its own",
    "gemma-bidirectional": "sees both directions in a batch without padding",
    "blt": "run across documents",
    "cpmant": "position buckets of its own",
    "deepseek_v4": "pools keys across documents",
    "minimax_m3_vl_text": "counted from the beginning of the row",
    "reformer": "sorts the tokens of a row into buckets",
    "xlstm": "run over the whole row",
    "doge-experts": "its router mixes the tokens of a row",
}
EXACT = tuple(name for name in MODEL_TYPES if name not in UNBUILT and name not in REFUSED)

FIRST_TOKEN = 6  # below are padding, the ends of a document, and masks and separators of a few types


def _values(config_class: type[PreTrainedConfig], row: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a configuration: what is common and known to its class, its parts, and then the row."""
    row = dict(row)
    known = {field.name for field in dataclasses.fields(config_class)}
    renamed = getattr(config_class, "attribute_map", {})
    values = {}
    for key, value in COMMON.items():
        name = key if key in known else renamed.get(key)
        if name in known:
            values[name] = value
    for name, part_class in (config_class.sub_configs or {}).items():
        part_row = dict(row.pop(name, {}))
        if part_class is AutoConfig:
            defaults = getattr(config_class, "sub_configs_defaults", None)
            part_class = CONFIG_MAPPING[defaults[name].model_type if defaults else PART_TYPES[name]]
        values[name] = part_class(**_values(part_class, {**ROWS.get(part_class.model_type, {}), **part_row}))
    return {**values, **row}


def tiny_config(name: str, **overrides: Any) -> PreTrainedConfig:
    """The configuration of a model type, or of a variant of one."""
    variant = dict(VARIANTS.get(name, {}))
    model_type = variant.pop("model_type", name)
    row = {**ROWS.get(model_type, {}), **variant, **overrides}
    config_class = CONFIG_MAPPING[model_type]
    return config_class(**_values(config_class, row))


# Vision towers that need a package of its own.
TIMM = ("gemma3n_vision", "timm_wrapper")


class FrameScores(nn.Module):
    """A stand-in for a classifier of timm: scores (n, labels) of the brightness of each image (n, channels, H, W)."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.scores = nn.Linear(3, config.num_labels)

    def forward(self, pixel_values: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.scores(pixel_values.mean((-2, -1))))


@contextlib.contextmanager
def without_timm() -> Iterator[None]:
    """Vision towers of timm are left out, since text never enters them; for classifiers there is a stand-in."""
    build = transformers.AutoModel.from_config

    def from_config(config: PreTrainedConfig, **kwargs: Any) -> nn.Module:
        return nn.Identity() if config.model_type in TIMM else build(config, **kwargs)

    classifier = transformers.AutoModelForImageClassification
    classify = classifier.from_config

    def classifier_from_config(config: PreTrainedConfig, **kwargs: Any) -> nn.Module:
        return FrameScores(config) if config.model_type in TIMM else classify(config, **kwargs)

    with (
        mock.patch.object(transformers.AutoModel, "from_config", from_config),
        mock.patch.object(classifier, "from_config", classifier_from_config),
    ):
        yield


def tiny_model(
    name: str, *, kind: str | None = None, dtype: torch.dtype = torch.float32, attention: str | None = None,
    seed: int = 0, **overrides: Any,
) -> PreTrainedModel:  # fmt: skip
    """A random model in evaluation mode.

    Args:
        name: A model type or a key of `VARIANTS`.
        kind: The name of the class; the causal language model by default.
        dtype: The types in `FLOAT32_ONLY` compute in float32 alone and fail in any other.
        attention: Its `attn_implementation`; transformers' own choice if None.
        seed: Of the weights.
        overrides: Replace keys of the configuration.
    """
    torch.manual_seed(seed)  # a few parts draw their constants at construction
    config = tiny_config(name, **overrides)
    # The fused experts don't support float64.
    options = {"experts_implementation": "eager", "attn_implementation": attention}
    with without_timm():
        if kind:
            model = getattr(transformers, kind)._from_config(config, **options)
        elif config.model_type in PARTS:
            model = AutoModelForCausalLM._model_mapping[type(config)]._from_config(part_of(config), **options)
        else:
            model = AutoModelForCausalLM.from_config(config, **options)
    spread(model, torch.Generator().manual_seed(seed))
    return model.to(dtype).eval()


def tiny_pair_model(name: str, **options: Any) -> PreTrainedModel:
    """A random encoder with a decoder, in float64 unless `options` say otherwise."""
    kind = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES[name]
    return tiny_model(name, **{"kind": kind, "dtype": torch.float64, **options})


def build(name: str) -> PreTrainedModel:
    """A model in float64 where its code allows that."""
    return tiny_model(name, dtype=torch.float32 if name in FLOAT32_ONLY else torch.float64)


def documents(lengths: tuple[int, ...], seed: int = 1) -> list[Tensor]:
    """Random token ids `[1, n]` for every length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(FIRST_TOKEN, VOCAB, (1, n), generator=generator) for n in lengths]


def drafted(model: PreTrainedModel, input_ids: Tensor) -> dict[str, Any]:
    """The arguments of a drafter: hidden states of the model that it drafts for, whose keys and values it uses."""
    generator = torch.Generator().manual_seed(2)
    text, weight = model.config.text_config, model.pre_projection.weight

    def states(*shape: int) -> Tensor:
        return torch.randn(VOCAB, *shape, generator=generator).to(weight)[input_ids]

    shared = {}
    for layer, layer_type in enumerate(text.layer_types):
        part = text.per_layer_config[layer]
        shared[layer_type] = tuple(states(part.num_key_value_heads, part.head_dim).transpose(1, 2) for _ in range(2))
    return {"inputs_embeds": states(weight.shape[1]), "shared_kv_states": shared}


def part_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of a configuration that its language model takes, which mostly is all of it."""
    return getattr(config, PARTS[config.model_type]) if config.model_type in PARTS else config


def spread(model: nn.Module, generator: torch.Generator) -> None:
    """Draw weights with which every part contributes. With transformers' small weights attention has little effect."""
    done: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in done or parameter.numel() == 0:
                continue
            done.add(id(parameter))
            noise = torch.randn(parameter.shape, generator=generator, device="cpu")
            values = parameter.data
            settled = bool(values.isfinite().all()) and 0.1 < float(values.abs().mean()) < 100
            if isinstance(module, nn.Embedding):
                parameter.data = 0.5 * noise
            elif parameter.ndim >= 2 and not settled:
                parameter.data = noise / parameter.shape[-1] ** 0.5
            else:  # norms, decays, biases, sinks: near the values that the model gives them, but no two alike
                parameter.data = values + 0.2 * noise


def codebooks_of(config: Any) -> int:
    """How many rows of ids a model takes for one row of tokens: several in a few decoders of sound."""
    return config.num_codebooks if config.model_type in ("musicgen_decoder", "musicgen_melody_decoder") else 1


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
