"""A tiny random model of every causal language model type that transformers knows, with features that matter.

Windows, chunks and selections are shorter than the documents of the tests, and every kind of layer that a family has
is present, so that a patch which forgets one of them shows. What a type needs is a row in `zoo.yaml`.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
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
from transformers.models.layoutlmv2 import modeling_layoutlmv2

from tritonpack.patches.forwards import installed, versions
from tritonpack.patches.interface import use_eager_if_sdpa_differs
from tritonpack.patches.measuring import apart as apart  # tests import it from here

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
EXACT = tuple(
    name for name in MODEL_TYPES
    if installed() in versions()["versions"].get(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name], ())
)  # fmt: skip

# A constant or a cast in the model's own code fails in float64, or gives NaN.
FLOAT32_ONLY = frozenset({"inkling2_loop_text", "inkling2_text", "prophetnet", "xglm"})
# Arguments with which a call has gradients: a state that is updated in place has none.
DIFFERENTIABLE: dict[str, dict[str, Any]] = {"rwkv": {"use_cache": False}, "xlstm": {"use_cache": False}}
UNBUILT: dict[str, str] = {
    "gemma4_assistant": "its configuration demands layers without inputs of their own that all share another model's "
    "keys, and in transformers 5.24 Gemma4TextModel fails to cut the missing inputs",
}

# The types of parts that may be of any type, in versions of transformers whose configurations name no default.
PART_TYPES = {"text_encoder": "t5", "audio_encoder": "encodec"}

# Variants that are refused. The others are exact.
REFUSED = {
    "gemma-bidirectional": "sees both directions in a batch without padding",
    "doge-experts": "its router mixes the tokens of a row",
}

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
        if isinstance(row.get(name), PreTrainedConfig):
            continue
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


@contextlib.contextmanager
def without_towers() -> Iterator[None]:
    """Leave out vision towers of timm and detectron2: text never enters them, or their models are refused."""

    def without_timm(auto: Any) -> Any:
        build = auto.from_config

        def from_config(config: PreTrainedConfig, **kwargs: Any) -> nn.Module:
            left_out = config.model_type in ("gemma3n_vision", "timm_wrapper")
            return nn.Identity() if left_out else build(config, **kwargs)

        return mock.patch.object(auto, "from_config", from_config)

    layoutlm = {"LayoutLMv2VisualBackbone": nn.Identity, "requires_backends": mock.DEFAULT}
    with (
        without_timm(transformers.AutoModel), without_timm(transformers.AutoModelForImageClassification),
        mock.patch.multiple(modeling_layoutlmv2, **layoutlm),
        mock.patch.object(modeling_layoutlmv2.LayoutLMv2PreTrainedModel, "_init_weights"),
    ):  # fmt: skip
        yield


def tiny_model(
    name: str, *, kind: str | None = None, dtype: torch.dtype = torch.float32, attention: str | None = None,
    seed: int = 0, **overrides: Any,
) -> PreTrainedModel:  # fmt: skip
    """A random model in evaluation mode, of a model type or a key of `VARIANTS`.

    `kind` is the name of its class, by default of the causal language model, `attention` its `attn_implementation`. The
    types in `FLOAT32_ONLY` fail in any other dtype. `overrides` replace keys of the configuration.
    """
    if name in UNBUILT:
        raise ValueError(UNBUILT[name])
    config = tiny_config(name, **overrides)
    # The fused experts don't support float64.
    options = {"experts_implementation": "eager", "attn_implementation": attention}
    torch.manual_seed(seed)  # a few parts draw their constants at construction
    with without_towers():
        if kind:
            cls = getattr(transformers, kind)
            model = cls._from_config(_part_for(config, cls.config_class), **options)
        else:
            model = AutoModelForCausalLM.from_config(config, **options)
    use_eager_if_sdpa_differs(model)
    spread(model, torch.Generator().manual_seed(seed))
    return model.to(dtype).eval()


def build(spec: str, **options: Any) -> PreTrainedModel:
    """A model in float64 where its code allows that: "llama" is a causal one, "BertModel/bert" one of that class, and
    "bart+" an encoder with a decoder."""
    kind, _, name = spec.removesuffix("+").rpartition("/")
    kind = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES[name] if spec.endswith("+") else kind
    dtype = torch.float32 if name in FLOAT32_ONLY else torch.float64
    return tiny_model(name, **{"kind": kind or None, "dtype": dtype, **options})


def documents(lengths: tuple[int, ...] = (7, 1, 3, 11)) -> list[Tensor]:
    """Random token ids `[1, n]` for every length."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(FIRST_TOKEN, VOCAB, (1, n), generator=generator) for n in lengths]


def tolerance(dtype: torch.dtype) -> float:
    """The limit for small models; transformers computes norms and rotary angles in float32 also in float64."""
    return (8 if dtype == torch.float64 else 64) * torch.finfo(torch.float32).eps


def gradients_of(model: nn.Module, values: Tensor) -> list[Tensor | None]:
    """Return the gradients of all parameters, with a different weight for each of the values."""
    model.zero_grad()
    weights = torch.linspace(-1, 1, values.numel(), dtype=values.dtype, device=values.device).view_as(values)
    (values * weights).sum().backward()  # torch.autograd.grad doesn't go through reentrant checkpoints
    found = [p.grad for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    return found


def _part_for(config: PreTrainedConfig, wanted: type[PreTrainedConfig]) -> PreTrainedConfig:
    """The configuration, or the part of it, that a class takes."""
    parts = [getattr(config, name, None) for name in config.sub_configs or {}]
    return next((part for part in (config, *parts) if isinstance(part, wanted)), config)


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
