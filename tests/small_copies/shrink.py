"""shrink(config): the configuration of a small model that has every switch of a large one."""

from __future__ import annotations

from typing import Any, TypeVar

from tests.small_copies.shrink_rows import FIRST_LAYERS, LAST_LAYERS, LAYERS, PERIODS, ROWS, SHARED, VOCAB
from tests.small_copies.shrink_sizes import Sizes, Values, is_number
from tritonpack.patches.configurations import is_config, names_tokens, special_tokens

C = TypeVar("C")

# Fields that describe the checkpoint, and fields that a class computes from others.
DROPPED = (
    "_name_or_path", "_out_features", "_out_indices", "architectures", "dtype", "out_features", "out_indices",
    "quantization_config", "stage_names", "torch_dtype", "transformers_version",
)  # fmt: skip


def shrink(config: C) -> C:
    """Return a configuration of the same class, so small that any machine builds and runs its model at once.

    Sizes become small, and every kind of layer stays, once and in order. All features of attention stay: grouped heads
    in their proportion (up to eight), latent keys, sinks, caps, biases, scaling, recurrences. Windows, chunks and
    selections of keys become four or five tokens, and rotary embeddings change from eight tokens on, so that short
    documents are affected by them.

    Args:
        config: a transformers configuration, with or without parts; it stays as it is.

    Raises:
        ValueError: (or any error of its class) the class takes no such values.
    """
    streams = {}
    for part in (*reversed(_parts(config)), config):
        sizes = Sizes(part, _values(part), {})
        if sizes.hidden:
            streams[sizes.hidden] = sizes.new_hidden
    small = _shrunk(config, _token_ids(config), streams, {})
    return type(config).from_dict(small)  # type: ignore[attr-defined]


def _shrunk(config: Any, tokens: dict[int, int], streams: dict[int, int], given: Values) -> Values:
    """Return the small values of a configuration and its parts; values in `given` are taken from there."""
    values = _values(config)
    _cut_layers(config, values)
    sizes = Sizes(config, values, streams)
    of_parts = {name: value for name, value in sizes.fixed.items() if name not in values}
    sizes.fixed.update(given)
    for name, value in values.items():
        part = config.__dict__.get(name)
        values[name] = _shrunk(part, tokens, streams, of_parts) if is_config(part) else sizes.of(name, value)
        if names_tokens(name):
            values[name] = _mapped(value, tokens)
    return {**values, **ROWS.get(config.model_type, {})}


def _values(config: Any) -> Values:
    """Return the fields of a configuration. Those of layers are its own: Dory writes two layers for each of them."""
    values = {name: value for name, value in config.to_dict().items() if name not in DROPPED}
    of_layers = values.keys() & {"layer_types", *LAYERS, *FIRST_LAYERS, *LAST_LAYERS} & vars(config).keys()
    return values | {name: vars(config)[name] for name in of_layers}


def _parts(config: Any) -> list[Any]:
    """Return the configurations inside of one, at any depth."""
    parts = [part for part in config.__dict__.values() if is_config(part)]
    return parts + [inner for part in parts for inner in _parts(part)]


def _token_ids(config: Any) -> dict[int, int]:
    """Number special tokens anew: those beyond the small vocabulary get different numbers in its lower half."""
    found = sorted(special_tokens(config))
    small = [token for token in found if 0 <= token < VOCAB // 2]
    free = [token for token in reversed(range(VOCAB // 2)) if token not in small]
    return {**{token: token for token in small}, **dict(zip(sorted(set(found) - set(small)), free, strict=False))}


def _mapped(value: Any, tokens: dict[int, int]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_mapped(token, tokens) for token in value]
    return tokens.get(value, value) if is_number(value) else value


def _cut_layers(config: Any, values: Values) -> None:
    """Keep the first layer of every kind, and at least two layers."""
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
    """Return which layers stay, in order, and change all fields that count, number or list layers."""
    listed = {name: value for name, value in values.items() if _lists_layers(name, value, total)}
    each = {name: v for name, v in values.items() if isinstance(v, list) and len(v) == total and name not in listed}
    first = {name: values[name] for name in FIRST_LAYERS if isinstance(values.get(name), int)}
    last = {name: total - values[name] for name in LAST_LAYERS if isinstance(values.get(name), int)}
    own = {int(layer): value for layer, value in (values.get("per_layer_config") or {}).items()}
    kinds = [
        (
            *(str(value[i]) for value in each.values()),
            *(i in value for value in listed.values()),
            *(i < value for value in (*first.values(), *last.values())),
            str(own.get(i)),
        )
        for i in range(total)
    ]
    kept = [i for i, kind in enumerate(kinds) if kinds[:i].count(kind) < (2 if SHARED in kind else 1)]
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
    """Whether a field is a sorted list of layer numbers."""
    return (
        isinstance(value, list)
        and any(part in name for part in ("layer", "idx", "indices", "indexes", "_ids"))
        and all(is_number(item) and 0 <= item < total for item in value)
        and sorted(set(value)) == value
        and len(value) > 0
    )
