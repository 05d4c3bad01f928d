"""Call a function such as flash_attn_varlen_func in its own spelling: FlashAttention 2, 3 or 4, vLLM, torch."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from types import SimpleNamespace
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
    "scale": ("softmax_scale", "scale"),
    "causal": ("causal", "is_causal"),
    "window": ("window_size",),
    **{name: (name,) for name in ("softcap", "alibi_slopes", "dropout_p", "deterministic")},
    "lse": ("return_softmax_lse", "return_lse", "return_attn_probs", "return_aux"),
    "sinks": ("s_aux", "learnable_sink", "sinks"),
    "grouped": ("enable_gqa",),
}
# The parameters of a function whose signature can't be read or ends in **kwargs.
_FA2 = {name: theirs[0] for name, theirs in SPELLINGS.items() if name not in ("sinks", "grouped")}
_FA2["lse"] = "return_attn_probs"


class NotOfferedError(Exception):
    """The function doesn't offer the feature of the case; the message names the missing part."""


class VarlenFunction:
    """A function that is called by the names of its own parameters; those with a default only where a case needs it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            what = type(function).__name__
            raise ValueError(f"a backend must be a function called as flash_attn_varlen_func is; got {what}.")
        self.function = function
        self.name = getattr(function, "__qualname__", None) or repr(function)
        try:
            parameters = list(signature(function).parameters.values())
        except (TypeError, ValueError):
            parameters = [Parameter("keywords", Parameter.VAR_KEYWORD)]
        named = {p.name: p.default for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        self.names = dict(_FA2) if any(p.kind is p.VAR_KEYWORD for p in parameters) else {}
        for ours, theirs in SPELLINGS.items():
            spelled = [name for name in theirs if name in named]
            if spelled:
                self.names[ours] = spelled[0]
        missing = [name for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k") if name not in self.names]
        if missing:
            what = f"{self.name} has no parameter for {', '.join(missing)}; it has {', '.join(named)}"
            raise ValueError(f"{what}. Wrap it in a function that is called as flash_attn_varlen_func is.")
        required = {name for name, default in named.items() if default is Parameter.empty}
        unknown = sorted(required - set(self.names.values()))
        if unknown:
            what = f"{self.name} requires {', '.join(unknown)}, which the kit doesn't know"
            raise ValueError(f"{what}; give it a default, or wrap the function in one that passes it.")
        default = named.get(self.names.get("window", ""))
        self.unlimited = None if isinstance(default, (tuple, list)) and None in default else -1

    def __call__(self, case: Case, inputs: Inputs, *, lse: bool, deterministic: bool) -> tuple[Tensor, Tensor | None]:
        """Return out, and the log-sum-exp as the function returns it. `lse` and `deterministic` ask for it and for a
        deterministic backward pass, if there are parameters for these."""
        left, right = case.window
        needed = {name: x for name, x in inputs.keywords.items() if name != "dropout_seed"}
        if case.causal and "causal" not in self.names and "window" in self.names:
            right = 0
        elif case.causal:
            needed["causal"] = True
        if (left, right) != (-1, -1):
            needed["window"] = tuple(self.unlimited if side < 0 else side for side in (left, right))
        if inputs.sinks is not None:
            needed["sinks"] = inputs.sinks
        lacking = [name for name in needed if name not in self.names]
        if lacking:
            raise NotOfferedError(f"no parameter {' or '.join(SPELLINGS[lacking[0]])}")
        given = {"q": inputs.q, "k": inputs.k, "v": inputs.v} | needed
        for side, lengths in (("q", case.seqlens), ("k", case.seqlens_k or case.seqlens)):
            offsets = torch.tensor([0, *lengths], device="cpu").cumsum(0)
            given[f"cu_seqlens_{side}"] = offsets.to(device=inputs.q.device, dtype=torch.int32)
            given[f"max_seqlen_{side}"] = max(lengths, default=0)
        if deterministic:
            given["deterministic"] = True
        if inputs.q.shape[1] != inputs.k.shape[1]:
            given["grouped"] = True
        if lse:
            given["lse"] = SimpleNamespace(lse=True) if self.names.get("lse") == "return_aux" else True
        result = self.function(**{self.names[name]: x for name, x in given.items() if name in self.names})
        results = result if isinstance(result, (tuple, list)) else [result]
        if not results or not isinstance(results[0], Tensor):
            raise TypeError(f"returned {type(result).__name__}, not a tensor or a tuple that begins with one")
        return results[0], next((x for x in results[1:2] if isinstance(x, Tensor)), None)
