"""Documents as calls of tiny models, packed in every form, and their results beside those of each document alone."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.patches import zoo
from tests.patches.sweep import forms
from tests.patches.sweep.forms import FORMS, LENGTHS  # noqa: F401 - tests import both from here
from tests.patches.sweep.subject import Subject
from tests.patches.zoo import apart, gradients_of, tolerance
from tritonpack.patches.applied_patch import applied_to

EXACT = tolerance(torch.float64)


documents = zoo.documents


def alike() -> list[Tensor]:
    """Documents `[1, n]` with common beginnings."""
    pieces = documents((9, 6, 11, 8))
    for piece in pieces[1:]:
        piece[:, :5] = pieces[0][:, :5]
    return pieces


def told(form: str = "position_ids", pieces: list[Tensor] | None = None) -> dict[str, Any]:
    """The arguments beside the ids of a packed call."""
    return FORMS[form](pieces or documents()).arguments


def call_of(form: str = "position_ids", pieces: list[Tensor] | None = None, **more: Any) -> dict[str, Any]:
    """The arguments of a call of a causal model or an encoder."""
    batch = forms.laid_out(form)(pieces or documents())
    return {"input_ids": batch.ids, **batch.arguments, **more}


class Results(NamedTuple):
    """The main output of all documents, one after the other, (tokens, n), and the gradients of all parameters."""

    values: Tensor
    gradients: list[Tensor | None]


def alone(model: Any, pieces: list[Tensor] | None = None, *, gradients: bool = True) -> Results:
    """The results of each document in a call of its own, with nothing but its tokens."""
    return _results(Subject(model, stock=True), forms.alone, [[piece] for piece in pieces or documents()], gradients)


def packed(
    model: Any, form: str = "position_ids", pieces: list[Tensor] | None = None, *, gradients: bool = True, **more: Any
) -> Results:
    """The results of packed documents; of pairs of documents if the model has an encoder and a decoder."""
    return _results(Subject(model), forms.laid_out(form), [pieces or documents()], gradients, **more)


def _results(subject: Subject, form: forms.Form, calls: list[list[Tensor]], gradients: bool, **more: Any) -> Results:
    with torch.set_grad_enabled(gradients):
        outputs = [subject.call(subject.lay_out(form, pieces), **more) for pieces in calls]
        main = "logits" if "logits" in outputs[0] else next(iter(outputs[0]))
        values = torch.cat([part for output in outputs for part in output[main]])
    return Results(values.detach(), gradients_of(subject.model, values) if gradients else [])


def difference(expected: Results, got: Results) -> float:
    """The largest difference in values or gradients, relative to the largest expected one of each."""
    return max(apart([expected.values], [got.values]), apart(expected.gradients, got.gradients))


def require_exact(model: Any, expected: Results, *tried: str, pieces: list[Tensor] | None = None, **more: Any) -> None:
    """Packed documents in these forms have the expected results."""
    for form in tried or ("position_ids",):
        got = packed(model, form, pieces, gradients=bool(expected.gradients), **more)
        assert difference(expected, got) < tolerance(model.dtype), form


def relative(expected: Tensor, got: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    assert expected.shape == got.shape
    return float((expected - got).detach().abs().max() / expected.detach().abs().max())


def state(model: nn.Module) -> dict[str, list[Any]]:
    """All objects of each module that a patch may change, by identity; the first three are its hooks."""
    registries = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks")
    owned = ("forward", "_gradient_checkpointing_func", "_replicate_for_data_parallel")
    return {
        name: [dict(getattr(module, registry)) for registry in registries]
        + [module.__dict__.get(own) for own in owned]
        + [dict(vars(module.config)) if hasattr(module, "config") else None, id(getattr(module, "config", None))]
        for name, module in model.named_modules()
    }


def is_patched(model: nn.Module) -> bool:
    return bool(applied_to(model))


def in_threads(runs: list[Callable[[], None]]) -> None:
    """Run functions in threads at the same time, and wait for all."""
    threads = [threading.Thread(target=run) for run in runs]
    for act in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            act(thread)


def without_dropout(model: Any) -> Any:
    """The model with all of its dropout set to 0."""
    configs = [model.config, *(getattr(model.config, part) for part in model.config.sub_configs or {})]
    for holder in (*model.modules(), *configs):
        for key, value in list(vars(holder).items()):
            if "drop" in key and isinstance(value, float):
                setattr(holder, key, 0.0)
        if isinstance(holder, nn.Dropout):
            holder.p = 0.0
    return model
