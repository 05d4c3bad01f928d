"""shrink(config): the configuration of a small model with every switch of a large one."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, TypeVar

from tritonpack.testing.shrink_rows import (
    FIRST_LAYERS,
    HEAD_DIM,
    HEAD_DIMS,
    HEADS,
    HIDDEN,
    LAST_LAYERS,
    LATENT_DIMS,
    LAYERS,
    LIMITS,
    PERIODS,
    REACH,
    ROWS,
    SHARED,
    STATE_HEADS,
    VOCAB,
    WIDTHS,
)

C = TypeVar("C")
Values = dict[str, Any]

# Of the checkpoint, not of the model; and what a class works out again.
DROPPED = (
    "_name_or_path", "_out_features", "_out_indices", "architectures", "dtype", "out_features", "out_indices",
    "quantization_config", "stage_names", "torch_dtype", "transformers_version",
)  # fmt: skip

MOST_LAYERS = 6


def shrink(config: C) -> C:
    """A configuration of the same class, so small that its model is built and run at once on any machine.

    Sizes become small, and every kind of layer stays, once and in order. What attention is made of stays as well:
    grouped heads in their proportion (up to eight), latent keys, sinks, caps, biases, scaling, recurrences. Windows,
    chunks and selections of keys become four or five tokens, and the length from which position ids change rotary
    embeddings eight, so that short documents feel them.

    Args:
        config: a transformers configuration, with or without parts; it stays as it is.

    Raises:
        ValueError: (or whatever else its class raises) the class takes no such values.
    """
    streams = {}
    for part in (*reversed(_parts(config)), config):
        sizes = _Sizes(part, _values(part), {})
        streams[sizes.hidden] = sizes.new_hidden
    return type(config).from_dict(_shrunk(config, _token_ids(config), streams, {}))  # type: ignore[attr-defined,no-any-return]


def _shrunk(config: Any, tokens: dict[int, int], streams: dict[int, int], given: Values) -> Values:
    """The small values of a configuration and its parts, those in `given` as they are there."""
    values = _values(config)
    _cut_layers(config, values)
    sizes = _Sizes(config, values, streams)
    of_parts = {name: value for name, value in sizes.fixed.items() if name not in values}
    sizes.fixed.update(given)
    for name, value in values.items():
        part = config.__dict__.get(name)
        values[name] = _shrunk(part, tokens, streams, of_parts) if _is_config(part) else sizes.of(name, value)
        if _names_tokens(name):
            values[name] = _mapped(value, tokens)
    return {**values, **ROWS.get(config.model_type, {})}


def _values(config: Any) -> Values:
    return {name: value for name, value in config.to_dict().items() if name not in DROPPED}


def _parts(config: Any) -> list[Any]:
    """The configurations inside of one, at any depth."""
    parts = [part for part in config.__dict__.values() if _is_config(part)]
    return parts + [inner for part in parts for inner in _parts(part)]


def _is_config(value: Any) -> bool:
    return hasattr(value, "to_dict") and hasattr(value, "model_type")


# Special tokens: those beyond the small vocabulary get numbers in its lower half, no two the same.


def _names_tokens(name: str) -> bool:
    return name.endswith(("_token_id", "_token_ids", "_token_index", "_tokens")) or name in TOKEN_NAMES


TOKEN_NAMES = ("bos_index", "eos_index", "pad_index", "unk_index", "mask_index")


def _token_ids(config: Any) -> dict[int, int]:
    found = sorted(special_tokens(config))
    small = [token for token in found if 0 <= token < VOCAB // 2]
    free = [token for token in reversed(range(VOCAB // 2)) if token not in small]
    return {**{token: token for token in small}, **dict(zip(sorted(set(found) - set(small)), free, strict=False))}


def special_tokens(config: Any) -> set[int]:
    """The ids that a configuration names: padding, the ends of a document, images, ..."""
    found: set[int] = set()
    for name, value in config.__dict__.items():
        if _is_config(value):
            found |= special_tokens(value)
        elif _names_tokens(name):
            values = value if isinstance(value, (list, tuple)) else [value]
            found |= {token for token in values if _is_number(token) and token >= 0}
    return found


def _mapped(value: Any, tokens: dict[int, int]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_mapped(token, tokens) for token in value]
    return tokens.get(value, value) if _is_number(value) else value


# Layers: the first of every kind.


def _cut_layers(config: Any, values: Values) -> None:
    """Keep the first layer of every kind, and two at least."""
    for period, offset in PERIODS.items():
        if isinstance(values.get(period), int):
            values[period] = min(values[period], 2)
            if offset in values:
                values[offset] = min(values[offset], values[period] - 1)
    names = [name for name in (config.attribute_map.get("num_hidden_layers"), *LAYERS) if name in values]
    total = getattr(config, "num_hidden_layers", None) or (values[names[0]] if names else None)
    if not isinstance(total, int):
        return
    kept = _kept_layers(values, total) if total > 2 else list(range(total))
    for name in names:
        values[name] = len(kept) if values[name] == total else min(values[name], 2)


def _kept_layers(values: Values, total: int) -> list[int]:
    """Which layers stay, in order; what counts, numbers or lists layers is made to fit."""
    listed = {name: value for name, value in values.items() if _lists_layers(name, value, total)}
    each = {name: v for name, v in values.items() if isinstance(v, list) and len(v) == total and name not in listed}
    first = {name: values[name] for name in FIRST_LAYERS if isinstance(values.get(name), int)}
    last = {name: total - values[name] for name in LAST_LAYERS if isinstance(values.get(name), int)}
    own = {int(layer): value for layer, value in (values.get("per_layer_config") or {}).items()}
    kinds = [
        str(
            [
                [value[i] for value in each.values()],
                [i in value for value in listed.values()],
                [i < value for value in (*first.values(), *last.values())],
                own.get(i),
            ]
        )
        for i in range(total)
    ]
    kept = [i for i, kind in enumerate(kinds) if kinds[:i].count(kind) < (2 if SHARED in kind else 1)][:MOST_LAYERS]
    pattern = values.get("block_types")  # repeated over the layers
    if pattern and len(pattern) < total:
        kept = list(range(len(pattern)))
    if len(kept) < 2:
        kept = [0, 1]
    for name, value in each.items():
        values[name] = [value[i] for i in kept]
    for name, value in listed.items():
        values[name] = [new for new, i in enumerate(kept) if i in value]
    for name, value in first.items():
        values[name] = sum(i < value for i in kept)
    for name, value in last.items():
        values[name] = sum(i >= value for i in kept)
    if own:
        values["per_layer_config"] = {str(new): own[i] for new, i in enumerate(kept) if i in own}
    return kept


def _lists_layers(name: str, value: Any, total: int) -> bool:
    """Whether a list holds numbers of layers."""
    return (
        isinstance(value, list)
        and any(part in name for part in ("layer", "idx", "indices", "indexes", "_ids"))
        and all(_is_number(item) and 0 <= item < total for item in value)
        and all(a < b for a, b in zip(value, value[1:], strict=False))
        and len(value) > 0
    )


class _Sizes:
    """What the sizes of one configuration become.

    Attributes:
        dim, new_dim: the width of a head.
        hidden, new_hidden: the width of the residual stream; `hidden` is None where there is none.
        multimodal: whether rotary embeddings have sections for time, height and width.
        streams: those of all parts of a configuration, which others may be as wide as.
    """

    def __init__(self, config: Any, values: Values, streams: dict[int, int]) -> None:
        self.values, self.streams = dict(values), streams
        self.fixed: Values = {}
        self.multimodal = "mrope_section" in (getattr(config, "ignore_keys_at_rope_validation", None) or ())
        self.hidden = values.get(config.attribute_map.get("hidden_size", "hidden_size"))
        heads = self._set_heads()
        self.dim = next((values[name] for name in HEAD_DIMS if values.get(name)), None)
        if self.dim is None:
            self.dim = self.hidden // heads[0] if self.hidden and heads else HEAD_DIM
        self.new_dim = self._rotary_width(many=heads is not None and heads[1] > 4)
        self.new_hidden = HIDDEN
        if self.hidden and heads:
            times = Fraction(heads[0] * self.dim, self.hidden)
            if _simple(times) and (heads[1] * self.new_dim / times).denominator == 1:
                self.new_hidden = int(heads[1] * self.new_dim / times)
        if latent := self._latent(values):
            self.fixed.update(latent)
            self.new_hidden = HIDDEN
        self._set_state_heads()
        self._set_reach()

    def of(self, name: str, value: Any) -> Any:
        """The small value of a field."""
        if name in self.fixed:
            return self.fixed[name]
        if name == "per_layer_config":
            return {layer: self._own(own) for layer, own in value.items()}
        if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            return self._rope(value)
        return self._free(name, value)

    def _free(self, name: str, value: Any) -> Any:
        """The small value of a field that no other decides."""
        if isinstance(value, list):
            return [self._free(name, item) for item in value]
        if not _is_number(value):
            return value
        if name in LIMITS:
            return min(value, LIMITS[name])
        if name in HEAD_DIMS:
            return self._scaled(value)
        if value >= 8 and self.hidden and (set(name.split("_")) & set(WIDTHS)) and "kernel" not in name:
            times = Fraction(value, self.hidden)
            if times != 1 and value in self.streams:
                return self.streams[value]
            if _simple(times):
                return int(times * self.new_hidden)
            return min(value, 2 * self.new_hidden)
        return value

    def _own(self, own: Values) -> Values:
        """The small values of the fields that one layer has for itself."""
        new = {name: self._free(name, value) for name, value in own.items()}
        heads = self.values.get("num_attention_heads")
        for name in ("num_attention_heads", "num_key_value_heads"):
            if name in own and heads:
                new[name] = max(1, self.fixed["num_attention_heads"] * own[name] // heads)
        latent = self._latent({**self.values, **own})
        return {**new, **{name: value for name, value in latent.items() if name in own}}

    def _set_heads(self) -> tuple[int, int] | None:
        """All numbers of heads; returns the first, old and new."""
        first = None
        known = {**(self.values.get("attn_config") or {}), **self.values}
        for name, others in HEADS.items():
            value = self.values.get(name)
            if not value:
                continue
            other = next((n for n in others if isinstance(known.get(n), int)), None)
            keys = known[other] if other else None
            if isinstance(value, list):
                self.fixed[name] = [_heads(v, keys)[0] for v in value]
                continue
            if not isinstance(value, int):
                continue
            self.fixed[name], new_keys = _heads(value, keys)
            if other:
                self.fixed[other] = new_keys
            first = first or (value, self.fixed[name])
        return first

    def _scaled(self, width: int) -> int:
        return max(4, width * self.new_dim // self.dim) if width else 0

    def _rotary_width(self, many: bool) -> int:
        """A width of which rotary embeddings take four or more, and enough for their sections."""
        width = min(self.dim, HEAD_DIM // 2 if many else HEAD_DIM)
        for _ in range(3):
            if all(int(width * share) // 2 >= max(2, sections) for share, sections in self._shares(self.values)):
                return width
            width *= 2
        return width

    def _shares(self, values: Values) -> list[tuple[float, int]]:
        found = []
        for name, value in values.items():
            if isinstance(value, dict) and name != "per_layer_config":
                found += self._shares(value)
        share = values.get("partial_rotary_factor") or 1.0
        if isinstance(values.get("rotary_dim"), int):
            share = values["rotary_dim"] / self.dim
        if isinstance(share, (int, float)):
            found.append((share, 3 if self.multimodal else len(values.get("mrope_section") or ())))
        return found

    def _latent(self, values: Values) -> Values:
        """Widths of latent attention, in proportion to 4 for the rotary part (or 8 for the other); none for other attention."""
        rope, nope, width = LATENT_DIMS
        if not (values.get(nope) and values.get(width) and _is_number(values.get(rope))):
            return {}
        whole = self.values[rope] or self.values[nope] // 2

        def scaled(old: int) -> int:
            return max(4, old * 4 // whole) if old else 0

        new = {name: scaled(values[name]) for name in LATENT_DIMS}
        known = {
            values[rope]: new[rope],
            values[width]: new[width],
            values[nope] + values[rope]: new[nope] + new[rope],
        }
        for name in ("head_dim", "qk_head_dim"):
            if isinstance(values.get(name), int):
                new[name] = known.get(values[name], scaled(values[name]))
        return new

    def _set_state_heads(self) -> None:
        for heads, width in STATE_HEADS:
            if not (isinstance(self.values.get(heads), int) and isinstance(self.values.get(width), int)):
                continue
            inner = Fraction(self.values[heads] * self.values[width] * self.new_hidden, self.hidden)
            number = math.gcd(int(inner), 4)
            self.fixed[heads], self.fixed[width] = number, int(inner) // number

    def _set_reach(self) -> None:
        """The length from which position ids count otherwise, and the longest in proportion to it."""
        name = "original_max_position_embeddings"
        rope = self.values.get("rope_parameters") or {}
        kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
        old = next((kind[name] for kind in [self.values, *kinds] if kind.get(name)), None)
        longest = self.values.get("max_position_embeddings")
        if old and longest:
            self.fixed["max_position_embeddings"] = max(int(longest * REACH / old), REACH)
            if name in self.values:
                self.fixed[name] = REACH

    def _rope(self, rope: Values) -> Values:
        """Rotary embeddings, also those of several kinds of layers."""
        new = dict(rope)
        if self.multimodal and not any(isinstance(value, dict) for value in rope.values()):
            new.setdefault("mrope_section", [16, 24, 24])  # what modeling code has where a configuration says nothing
        half = int(self.fixed.get("qk_rope_head_dim", self.new_dim) * (rope.get("partial_rotary_factor") or 1.0)) // 2
        for name, value in list(new.items()):
            if isinstance(value, dict):
                new[name] = self._rope(value)
            elif name == "original_max_position_embeddings" and value:
                new[name] = REACH
            elif name in ("short_factor", "long_factor"):
                new[name] = [value[i * len(value) // half] for i in range(half)]
            elif name == "mrope_section" and value:
                rest = [max(1, part * half // sum(value)) for part in value[1:]]
                new[name] = [half - sum(rest), *rest]
        return new


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _simple(times: Fraction) -> bool:
    return max(times.numerator, times.denominator) <= 8 and min(times.numerator, times.denominator) == 1


def _heads(queries: int, keys: int | None) -> tuple[int, int]:
    """How many query heads, and key heads if there are fewer: in the same proportion, up to eight to one."""
    if keys is None or keys == queries:
        return min(queries, 4), min(queries, 4)
    new_keys = min(keys, 2)
    return new_keys * max(1, min(queries // keys, 8)), new_keys
