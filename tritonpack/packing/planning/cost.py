"""CostModel: the cost of training on documents, from the sizes of a model or from timed steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tritonpack.checks import is_number
from tritonpack.packing.lengths import check_integer

# Floating-point operations per weight and token: 2 forward, 4 backward. Of attention, per pair of a query and a key and
# per dimension of a head: 4 forward, 10 backward (which computes the scores again). A causal document of n tokens has
# n**2 / 2 pairs.
_PER_WEIGHT = 6
_PER_SQUARE = 7
_BITS = 50


@dataclass(frozen=True)
class CostModel:
    """The cost of a row: `per_token * tokens + per_square * sum(length**2) + per_step`.

    The document length at which attention costs as much as all the rest:

    >>> model = CostModel.from_shape(hidden_size=4096, num_layers=32, num_heads=32, head_dim=128, num_key_value_heads=8,
    ...                              intermediate_size=14336, vocab_size=128256)
    >>> round(model.per_token / model.per_square)
    29446

    Attributes:
        per_token: the cost of everything but attention, in any unit.
        per_square: the cost of attention per squared token of a document, in the same unit.
        per_step: a constant cost of every row. It changes predictions, but no plan.

    Raises:
        ValueError: a number that is negative or not finite, or all of them zero.
    """

    per_token: float
    per_square: float
    per_step: float = 0.0

    def __post_init__(self) -> None:
        for name in ("per_token", "per_square", "per_step"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a number of at least 0; got {value!r}.")
        if not self.per_token + self.per_square:
            raise ValueError("a cost model needs per_token or per_square above 0; got 0 for both.")

    @classmethod
    def from_shape(
        cls,
        *,
        hidden_size: int,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        num_key_value_heads: int,
        intermediate_size: int,
        vocab_size: int,
        attention_efficiency: float = 0.6,
    ) -> CostModel:
        """The floating-point operations of training a decoder with gated MLPs and causal attention.

        Args:
            intermediate_size: the size of the MLP; for a mixture of experts, of all experts that a token visits.
            attention_efficiency: the speed of attention relative to matrix products, above 0; kernels reach about 0.6.

        Raises:
            ValueError: a size that isn't a positive integer, an efficiency that isn't above 0.
        """
        for name, value in list(locals().items()):
            if name not in ("cls", "attention_efficiency"):
                check_integer(value, name, 1, None)
        if not is_number(attention_efficiency) or not 0 < attention_efficiency < math.inf:
            raise ValueError(f"attention_efficiency must be above 0; got {attention_efficiency!r}.")
        queries = num_heads * head_dim
        attention = 2 * hidden_size * (queries + num_key_value_heads * head_dim)  # queries and output; keys and values
        weights = num_layers * (attention + 3 * hidden_size * intermediate_size) + hidden_size * vocab_size
        squares = num_layers * _PER_SQUARE * queries / attention_efficiency
        return cls(float(_PER_WEIGHT * weights), float(squares))

    @classmethod
    def from_config(cls, config: Any, *, attention_efficiency: float = 0.6) -> CostModel:
        """`from_shape` with the sizes of a transformers configuration, or of its text part.

        If there are `layer_types`, only layers of "full_attention" have costs per square, because a window or a
        recurrence costs about the same for each token. Of a mixture of experts, the experts that a token visits count.

        Raises:
            ValueError: a configuration without one of the sizes, or with a size that differs between layers.
        """
        config = getattr(config, "text_config", None) or config

        def size(*names: str, default: int | None = None) -> int:
            advice = "pass sizes to CostModel.from_shape, or times of a few steps to CostModel.fit."
            for name in names:
                value = getattr(config, name, None)
                if isinstance(value, int):
                    return value
                if value is not None:
                    raise ValueError(
                        f"{type(config).__name__}.{name} is {value!r:.60}, not one number for all layers; {advice}"
                    )
            if default is None:
                raise ValueError(f"{type(config).__name__} has no {' or '.join(names)}; {advice}")
            return default

        hidden, heads = size("hidden_size", "n_embd", "d_model"), size("num_attention_heads", "n_head")
        intermediate = size("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
        if experts := size("num_experts_per_tok", default=0):
            intermediate = experts * size("moe_intermediate_size", "intermediate_size")
            intermediate += size("shared_expert_intermediate_size", default=0)
        model = cls.from_shape(
            hidden_size=hidden,
            num_layers=size("num_hidden_layers", "n_layer"),
            num_heads=heads,
            head_dim=size("head_dim", default=hidden // heads),
            num_key_value_heads=size("num_key_value_heads", default=heads),
            intermediate_size=intermediate,
            vocab_size=size("vocab_size"),
            attention_efficiency=attention_efficiency,
        )
        kinds = getattr(config, "layer_types", None)
        full = sum(kind == "full_attention" for kind in kinds) / len(kinds) if kinds else 1.0
        return cls(model.per_token, model.per_square * full)

    @classmethod
    def fit(cls, tokens: Sequence[float], squares: Sequence[float], seconds: Sequence[float]) -> CostModel:
        """Fit the coefficients to timed steps of one rank by least squares; none is below 0. Use 20 steps or more.

        Args:
            tokens, squares, seconds: (steps,) the tokens, the sum of squared document lengths, the time of each step.
                Of `Units` the sums of `tokens` and `squares`.

        Raises:
            ValueError: rows of different lengths, fewer than 3 steps, a number that isn't finite, a time below 0,
                steps that are too similar to separate the coefficients.
        """
        rows = [_finite_row(values, name) for values, name in ((tokens, "tokens"), (squares, "squares"))]
        times = _finite_row(seconds, "seconds")
        if len({len(rows[0]), len(rows[1]), len(times)}) != 1 or len(times) < 3:
            raise ValueError(
                "fit needs tokens, squares and seconds of the same 3 steps or more; got "
                f"{len(rows[0])}, {len(rows[1])} and {len(times)}."
            )
        if times.min() < 0:
            raise ValueError(f"seconds must be at least 0; got {times.min()}.")
        columns = np.stack([*rows, np.ones(len(times))], axis=1)
        scale = np.abs(columns).max(axis=0)
        if not scale.all() or np.linalg.matrix_rank(columns / scale, tol=1e-9 * len(times)) < 3:
            raise ValueError(
                "the timed steps are too similar to separate the costs of tokens, of squares and of a step. Time steps "
                "with different numbers of tokens and document lengths."
            )
        # Fit each subset of the coefficients with the others at 0, and take the best fit without a negative one.
        columns = columns / scale
        best, best_error = np.zeros(3), math.inf
        for chosen in ([0, 1, 2], [0, 1], [0, 2], [1, 2], [0], [1], [2]):
            solution, *_ = np.linalg.lstsq(columns[:, chosen], times, rcond=None)
            error = float(np.square(columns[:, chosen] @ solution - times).sum())
            if (solution >= 0).all() and error < best_error:
                best, best_error = np.zeros(3), error
                best[chosen] = solution / scale[chosen]
        return cls(*best.tolist())

    def whole_weights(self, capacity: int, num_rows: int) -> tuple[int, int]:
        """`per_token` and `per_square` as integers in the same proportion, so that plans don't depend on rounding.

        `num_rows` rows of `capacity` tokens cost less than 2**62 in these units.

        Raises:
            ValueError: the two are too far apart.
        """
        scale = 2.0**_BITS / (num_rows * (self.per_token * capacity + self.per_square * capacity**2))
        ratio = 1.0 / min(value for value in (self.per_token, self.per_square) if value)
        scale = max(scale, ratio)
        weights = (round(self.per_token * scale), round(self.per_square * scale))
        if num_rows * (weights[0] * capacity + weights[1] * capacity**2) >= 2**62:
            raise ValueError(
                f"per_token and per_square of {self} are too far apart for {num_rows} rows of {capacity} tokens. Set "
                "the smaller one to 0."
            )
        return weights


def _finite_row(values: ArrayLike, name: str) -> NDArray[np.float64]:
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iuf" or not np.isfinite(array).all():
        raise ValueError(f"{name} must be a row of finite numbers; got {array.dtype} of shape {array.shape}.")
    return array.astype(np.float64)
