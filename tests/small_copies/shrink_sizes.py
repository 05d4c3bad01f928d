"""The small sizes of one configuration; sizes that depend on each other are computed together."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, TypeGuard

from tests.small_copies.shrink_rows import (
    HEAD_DIM,
    HEAD_DIMS,
    HEADS,
    HIDDEN,
    LATENT_DIMS,
    LIMITS,
    REACH,
    STATE_HEADS,
    WIDTHS,
)
from tritonpack.patches.configurations import is_dynamic, rope_kinds

Values = dict[str, Any]


class Sizes:
    """The small sizes of one configuration.

    Attributes:
        fixed: the small values of fields that depend on each other.
        dim, new_dim: the width of a head.
        hidden, new_hidden: the width of the residual stream; `hidden` is None where there is none.
        multimodal: whether rotary embeddings have sections for time, height and width.
        streams: old and new widths of the residual streams of all parts, which other parts may refer to.
    """

    def __init__(self, config: Any, values: Values, streams: dict[int, int]) -> None:
        self.values, self.streams = dict(values), streams
        self.fixed: Values = {}
        self.multimodal = "mrope_section" in (getattr(config, "ignore_keys_at_rope_validation", None) or ())
        hidden = values.get(config.attribute_map.get("hidden_size", "hidden_size"))
        self.hidden: int | None = hidden if is_number(hidden) else None
        heads = self._set_heads()
        own = self.hidden // heads[0] if self.hidden and heads else HEAD_DIM
        self.dim: int = next((values[n] for n in HEAD_DIMS if is_number(values.get(n)) and values[n]), own)
        self.new_dim = self._rotary_width(many=heads is not None and heads[1] > 4)
        self.new_hidden = min(HIDDEN, self.hidden or HIDDEN)
        if self.hidden and heads:
            times = Fraction(heads[0] * self.dim, self.hidden)
            if _simple(times) and (heads[1] * self.new_dim / times).denominator == 1:
                self.new_hidden = int(heads[1] * self.new_dim / times)
        if latent := self._latent(values):
            self.fixed.update(latent)
            self.new_hidden = min(HIDDEN, self.hidden or HIDDEN)
        self._set_state_heads()
        self._set_reach()

    def of(self, name: str, value: Any) -> Any:
        """Return the small value of a field."""
        if name in self.fixed:
            return self.fixed[name]
        if name == "per_layer_config":
            return {layer: self._own(own) for layer, own in value.items()}
        if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            return self._rope(value)
        return self._free(name, value)

    def _free(self, name: str, value: Any) -> Any:
        """Return the small value of a field that doesn't depend on others."""
        if isinstance(value, list):
            return [self._free(name, item) for item in value]
        if not is_number(value):
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
        """Return the small values of the fields of a single layer."""
        new = {name: self._free(name, value) for name, value in own.items()}
        heads = self.values.get("num_attention_heads")
        for name in ("num_attention_heads", "num_key_value_heads"):
            if name in own and heads:
                new[name] = max(1, self.fixed["num_attention_heads"] * own[name] // heads)
        latent = self._latent({**self.values, **own})
        return {**new, **{name: value for name, value in latent.items() if name in own}}

    def _set_heads(self) -> tuple[int, int] | None:
        """Set all numbers of heads, and return the first, old and new."""
        first = None
        known = {**(self.values.get("attn_config") or {}), **self.values}
        for name, others in HEADS.items():
            value = self.values.get(name)
            other = next((n for n in others if is_number(known.get(n))), None)
            keys = known[other] if other else None
            if not is_number(value):
                continue
            self.fixed[name], new_keys = _heads(value, keys)
            if other:
                self.fixed[other] = new_keys
            first = first or (value, self.fixed[name])
        return first

    def _scaled(self, width: int) -> int:
        """Return the small width of a head, in proportion to the others."""
        return max(4, width * self.new_dim // self.dim) if width else 0

    def _rotary_width(self, many: bool) -> int:
        """Return a width of heads that leaves rotary embeddings at least four dimensions, and one pair per section."""
        width = min(self.dim, HEAD_DIM // 2 if many else HEAD_DIM)
        for _ in range(3):
            if all(int(width * share) // 2 >= max(2, sections) for share, sections in self._shares(self.values)):
                return width
            width *= 2
        return width

    def _shares(self, values: Values) -> list[tuple[float, int]]:
        """Return the rotated share of a head and the number of its sections, for every kind of layer."""
        found = []
        for name, value in values.items():
            if isinstance(value, dict) and name != "per_layer_config":
                found += self._shares(value)
        share = values.get("partial_rotary_factor") or 1.0
        if is_number(values.get("rotary_dim")):
            share = values["rotary_dim"] / self.dim
        if isinstance(share, (int, float)):
            found.append((share, 3 if self.multimodal else len(values.get("mrope_section") or ())))
        return found

    def _latent(self, values: Values) -> Values:
        """Return small widths of latent attention in proportion to 4 for the rotary part (or 8 for the other)."""
        rope, nope, width = LATENT_DIMS
        if not (values.get(nope) and values.get(width) and is_number(values.get(rope))):
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
            if is_number(values.get(name)):
                new[name] = known.get(values[name], scaled(values[name]))
        return new

    def _set_state_heads(self) -> None:
        """Set heads of recurrences: up to four, whose total width keeps its proportion to the residual stream."""
        for heads, width in STATE_HEADS:
            if not (self.hidden and is_number(self.values.get(heads)) and is_number(self.values.get(width))):
                continue
            inner = Fraction(self.values[heads] * self.values[width] * self.new_hidden, self.hidden)
            number = math.gcd(int(inner), 4)
            self.fixed[heads], self.fixed[width] = number, int(inner) // number

    def _set_reach(self) -> None:
        """Set the length from which rotary embeddings change, and the longest length in proportion to it."""
        name, longest = "original_max_position_embeddings", self.values.get("max_position_embeddings")
        ropes = rope_kinds(self.values.get("rope_parameters"))
        old = next((kind[name] for kind in [self.values, *ropes] if kind.get(name)), None)
        if longest and any(is_dynamic(rope.get("rope_type") or "") for rope in ropes):
            self.fixed["max_position_embeddings"] = REACH
        elif old and longest:
            self.fixed["max_position_embeddings"] = max(int(longest * REACH / old), REACH)
        if self.values.get(name):
            self.fixed[name] = REACH

    def _rope(self, rope: Values) -> Values:
        """Return small parameters of rotary embeddings, also those of several kinds of layers."""
        new = dict(rope)
        if self.multimodal and rope and not any(isinstance(value, dict) for value in rope.values()):
            new.setdefault("mrope_section", [16, 24, 24])  # the default in modeling code
        half = int(self.fixed.get("qk_rope_head_dim", self.new_dim) * (rope.get("partial_rotary_factor") or 1.0)) // 2
        for name, value in list(new.items()):
            if isinstance(value, dict):
                new[name] = self._rope(value)
            elif name == "original_max_position_embeddings" and value:
                new[name] = REACH
            elif name in ("short_factor", "long_factor"):
                new[name] = [value[i * len(value) // half] for i in range(half)]
            elif name == "mrope_section" and value:
                sections = [max(1, part * half // sum(value)) for part in value]
                # Height and width have equal sections, so another section gets the rest.
                odd = next((i for i, part in enumerate(value) if value.count(part) == 1), 0)
                sections[odd] += half - sum(sections)
                new[name] = sections
        return new


def is_number(value: Any) -> TypeGuard[int]:
    """Whether a value is an int, and neither True nor False."""
    return isinstance(value, int) and not isinstance(value, bool)


def _simple(times: Fraction) -> bool:
    return max(times.numerator, times.denominator) <= 8 and min(times.numerator, times.denominator) == 1


def _heads(queries: int, keys: int | None) -> tuple[int, int]:
    """Return small numbers of query and key heads in the same proportion, up to eight to one."""
    if keys is None or keys == queries:
        return min(queries, 4), min(queries, 4)
    new_keys = min(keys, 2)
    return new_keys * max(1, min(queries // keys, 8)), new_keys
