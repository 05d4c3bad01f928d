"""Call a function such as flash_attn_varlen_func in its own spelling: FlashAttention 2, 3 or 4, vLLM, torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tritonpack.testing.cases import Case, Inputs

# The arguments that the kit passes, and the names of their parameters.
SPELLINGS = {
    "q": ("q", "query"),
    "k": ("k", "key"),
    "v": ("v", "value"),
    "cu_seqlens_q": ("cu_seqlens_q", "cu_seq_q", "cu_seq_lens_q"),
    "cu_seqlens_k": ("cu_seqlens_k", "cu_seq_k", "cu_seq_lens_k"),
    "max_seqlen_q": ("max_seqlen_q", "max_q", "max_length_q"),
    "max_seqlen_k": ("max_seqlen_k", "max_k", "max_length_k"),
    "dropout_p": ("dropout_p",),
    "scale": ("softmax_scale", "scale"),
    "causal": ("causal", "is_causal"),
    "window": ("window_size",),
    "softcap": ("softcap",),
    "alibi_slopes": ("alibi_slopes",),
    "sinks": ("s_aux", "learnable_sink", "sinks"),
    "deterministic": ("deterministic",),
    "lse": ("return_softmax_lse", "return_lse", "return_attn_probs", "return_aux"),
    "grouped": ("enable_gqa",),
}
_INDISPENSABLE = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
# The parameters of a function whose signature can't be read or ends in **kwargs.
_FA2 = {name: theirs[0] for name, theirs in SPELLINGS.items() if name not in ("sinks", "grouped")}
_FA2["lse"] = "return_attn_probs"


class VarlenFunction:
    """A function that is called as flash_attn_varlen_func is, with the parameters that its signature names.

    Args:
        function: called by keywords. It gets only parameters that it names (one that takes **kwargs gets all of
            FlashAttention 2's), and those with a default only where a case needs another value.

    Raises:
        ValueError: it isn't callable, lacks a parameter that every such function has, or requires one that the kit
            doesn't know.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise ValueError(
                f"a backend must be a function called as flash_attn_varlen_func is; got {type(function).__name__}."
            )
        self.function = function
        self.name = getattr(function, "__qualname__", None) or repr(function)
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):
            parameters = inspect.signature(lambda **keywords: None).parameters
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        named = {name: p for name, p in parameters.items() if p.kind not in variadic}
        self.names = {
            ours: next(name for name in theirs if name in named)
            for ours, theirs in SPELLINGS.items()
            if not named.keys().isdisjoint(theirs)
        }
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            self.names = _FA2 | self.names
        missing = [name for name in _INDISPENSABLE if name not in self.names]
        if missing:
            raise ValueError(
                f"{self.name} has no parameter for {', '.join(missing)}; it has {', '.join(named)}. The kit calls "
                "functions as flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, ...) is called; wrap yours "
                "in one."
            )
        known = set(self.names.values())
        unknown = [name for name, p in named.items() if p.default is p.empty and name not in known]
        if unknown:
            raise ValueError(
                f"{self.name} requires {', '.join(unknown)}, which the kit doesn't know; give it a default, or wrap "
                "the function in one that passes it."
            )
        window = named.get(self.names.get("window", ""))
        default = window.default if window else None
        self.unlimited = None if isinstance(default, (tuple, list)) and None in default else -1

    def lacks(self, case: Case, *, scale: float | None = None) -> str:
        """Name the first parameter that a case needs and the function lacks; empty if it has all."""
        needed = {
            "scale": scale is not None,
            "causal": case.causal and "window" not in self.names,
            "window": case.window[0] >= 0 or (case.window[1] >= 0 and not case.causal),
            "softcap": case.softcap > 0,
            "sinks": case.sinks,
            "alibi_slopes": case.alibi is not None,
            "dropout_p": case.dropout_p > 0,
        }
        lacking = (name for name, need in needed.items() if need and name not in self.names)
        return next((f"no parameter {' or '.join(SPELLINGS[name])}" for name in lacking), "")

    def __call__(
        self,
        case: Case,
        inputs: Inputs,
        *,
        scale: float | None = None,
        lse: bool = False,
        deterministic: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Call the function, and return out and the log-sum-exp as the function returns it, if it does.

        `lse` and `deterministic` ask for the log-sum-exp and for a deterministic backward pass, if the function has
        parameters for these.
        """
        lengths_q, lengths_k = case.seqlens, case.seqlens_k or case.seqlens
        given: dict[str, Any] = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
        for side, lengths in (("q", lengths_q), ("k", lengths_k)):
            offsets = torch.tensor([0, *lengths], device="cpu").cumsum(0)
            given[f"cu_seqlens_{side}"] = offsets.to(device=inputs.q.device, dtype=torch.int32)
            given[f"max_seqlen_{side}"] = max(lengths, default=0)
        left, right = case.window
        if case.causal and "causal" in self.names:
            given["causal"] = True
        elif case.causal:
            right = 0
        if (left, right) != (-1, -1):
            given["window"] = tuple(self.unlimited if side < 0 else side for side in (left, right))
        given |= {name: inputs.keywords[name] for name in ("softcap", "alibi_slopes") if name in inputs.keywords}
        optional = {
            "scale": scale,
            "sinks": inputs.sinks,
            "dropout_p": case.dropout_p or None,
            "deterministic": deterministic or None,
            "grouped": inputs.q.shape[1] != inputs.k.shape[1] or None,
            "lse": self._request() if lse and "lse" in self.names else None,
        }
        given |= {name: value for name, value in optional.items() if value is not None}
        result = self.function(**{self.names[name]: value for name, value in given.items() if name in self.names})
        if isinstance(result, Tensor):
            return result, None
        if not isinstance(result, (tuple, list)) or not result or not isinstance(result[0], Tensor):
            raise TypeError(
                f"returned {type(result).__name__}; it must return a tensor, or a tuple that begins with one"
            )
        second = result[1] if len(result) > 1 else None
        return result[0], second if isinstance(second, Tensor) else None

    def _request(self) -> Any:
        if self.names["lse"] != "return_aux":
            return True
        from torch.nn.attention.varlen import AuxRequest

        return AuxRequest(lse=True)
