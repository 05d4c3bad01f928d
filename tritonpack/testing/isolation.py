"""check_isolation(model): proof, on the user's own model, that the documents of a packed batch don't see each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tritonpack.checks import as_integers
from tritonpack.errors import IsolationError, UnsupportedModelError
from tritonpack.patches import patch
from tritonpack.patches.tokens import special_tokens
from tritonpack.patches.trial.comparison import influence, limits
from tritonpack.patches.trial.judge import Results, alone
from tritonpack.patches.trial.outputs import parts_of, tensors_in
from tritonpack.patches.trial.packed_forms import FORMS, Batch, whole
from tritonpack.patches.trial.small_copy import one_line
from tritonpack.patches.trial.subject import Subject, as_prompts, draw_of

# The forms that are tried, and the arguments of each.
TOLD = {"position_ids": "position_ids", "all_ones_mask": "position_ids and an all-ones attention_mask"}


@dataclass(frozen=True)
class IsolationReport:
    """The largest differences seen, relative to the largest value of the output.

    Attributes:
        lengths: tokens per document.
        packed_against_alone: between the outputs of packed documents and of each document alone.
        moved_by_others: between two calls in which only another document differs; 0.0 is bitwise equality.
        gradient_to_others: the largest gradient of a document's outputs in another document's embeddings, relative to
            the largest in its own.
        allowed: the limit of `packed_against_alone`: half the digits of the model's dtype. It is half the digits of
            float32 for a float64 model that exceeds its own limit and computes in float32 inside, as Bloom's softmax
            does. The limit of the other two is 64 units in the last place, or half the digits of the dtype where that
            is less. They are zero where no kernel's shape depends on the tokens, as in a mixture of experts.
    """

    lengths: tuple[int, ...]
    packed_against_alone: float
    moved_by_others: float
    gradient_to_others: float
    allowed: float

    def __str__(self) -> str:
        return (
            f"isolated: documents of {', '.join(map(str, self.lengths))} tokens; packed against alone "
            f"{self.packed_against_alone:.1e} (allowed {self.allowed:.1e}), moved by other documents "
            f"{self.moved_by_others:.1e}, gradient to other documents {self.gradient_to_others:.1e}"
        )


def check_isolation(
    model: nn.Module, *, lengths: Sequence[int] = (9, 1, 23, 14), vocab_size: int | None = None, seed: int = 0
) -> IsolationReport:
    """Pack documents of random tokens and show that none of them sees another.

    Outputs of packed documents must equal those of each document alone, up to rounding. A change of one document must
    not move another document's outputs, and a document's outputs must have no gradient in another document's
    embeddings. Each is shown with position ids alone and with an all-ones mask beside them, with the model's own
    default for `use_cache`. This takes about two dozen forward passes of `sum(lengths)` tokens. Weights, gradients,
    mode and random state stay as they are.

    Args:
        model: a transformers model, patched or not, on any device. Windows longer than the documents have no effect.
        lengths: tokens per document, at least two documents.
        vocab_size: tokens are drawn from this many; None means all that the model has embeddings for. Tokens that the
            configuration names, such as padding, aren't drawn.
        seed: of the random tokens.

    Returns:
        The differences seen.

    Raises:
        IsolationError: (an AssertionError) a document saw another one; the message names the layer where that begins.
        UnsupportedModelError: (a ValueError) what isn't a model, or a model that can't be called with random tokens
            alone; the message says what to check instead.
        ValueError: lengths that aren't integers, fewer than two documents, or an empty one.
    """
    if not isinstance(model, nn.Module):
        patch(model)  # raises an error that says what it is instead
    if not hasattr(model, "get_input_embeddings"):
        raise UnsupportedModelError(f"expected a transformers model; got {type(model).__name__}.")
    lengths = tuple(as_integers(lengths, "lengths").tolist())
    if len(lengths) < 2 or min(lengths) < 1:
        raise ValueError(f"lengths must hold at least two documents of at least one token; got {lengths}.")
    size = vocab_size or model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    named = special_tokens(model.config) if hasattr(model, "config") else set()
    ordinary = torch.tensor([token for token in range(size) if token not in named], device="cpu")
    if len(ordinary) < 2:
        ordinary = torch.arange(size, device="cpu")
    following = torch.arange(size, device="cpu").index_copy_(0, ordinary, ordinary.roll(-1))
    draw = partial(draw_of, ordinary)
    documents, drawn = draw(lengths, seed), draw(lengths, seed + 1)
    others = {
        i: torch.where(x == old, following[old], x) for i, (x, old) in enumerate(zip(drawn, documents, strict=True))
    }
    subject = Subject(model, draw, call=lambda ids: {"input_ids": ids, **as_prompts(model, ids)})
    with _as_found(model), _called_with_tokens_alone(model):
        expected = alone(subject, documents, gradients=False)
        found = [_check_form(subject, form, documents, others, expected) for form in TOLD]
    return IsolationReport(lengths, *(max(one) for one in zip(*found, strict=True)))


def _check_form(
    subject: Subject, form: str, documents: list[Tensor], others: dict[int, Tensor], expected: Results
) -> tuple[float, float, float, float]:
    """Return the three differences of a form, and the limit of the first.

    Raises:
        IsolationError: one of them is beyond its limit.
    """

    def run(documents: list[Tensor]) -> dict[str, list[Tensor]]:
        parts, problems = subject.parts(FORMS[form](documents), expected.outputs)
        if problems:
            raise IsolationError(
                f"documents of a batch packed by {TOLD[form]} don't have outputs of their own: {problems[0]}. "
                "Pass padded rows, with one document in each."
            )
        return parts

    with torch.no_grad():
        differs = max(expected.outputs[name].difference(parts) for name, parts in run(documents).items())
    moved = influence(run, documents, others)
    batch = FORMS[form](documents)
    gradient = max(_gradient_to_others(subject, batch, i, expected) for i in range(len(documents)))
    allowed, rounding = limits(expected.dtype)
    if differs > allowed and expected.dtype == torch.float64 and _computes_in_float32(subject, documents[0]):
        allowed = limits(torch.float32).alone
    if differs <= allowed and moved.size <= rounding and gradient <= rounding:
        return differs, moved.size, gradient, allowed
    changed = [others[i] if i == moved.document else x for i, x in enumerate(documents)]
    layer = _first_moved_layer(subject, batch, FORMS[form](changed), moved.document)
    where = f"the leak begins in {layer}" if layer else "no layer's output moved, so positions or gradients are wrong"
    if moved.size > rounding or gradient > rounding:
        what, remedy = f"see each other: {where}", "tritonpack.patch(model) keeps documents apart."
    else:
        what = "have other positions, or another precision, than each alone"
        remedy = (
            "No document sees another. tritonpack.patch(model) counts the positions of each by itself. If the "
            "model is patched, and its layers choose the best keys by scores, the best of equal ones may be others."
        )
    raise IsolationError(
        f"documents of a batch packed by {TOLD[form]} {what}. Their outputs differ from each "
        f"document's own by {differs:.1e}, move by {moved.size:.1e} when document {moved.document} changes, and have a "
        f"gradient of {gradient:.1e} in another document (all relative; {allowed:.1e}, {rounding:.1e} and "
        f"{rounding:.1e} would be rounding). {remedy}"
    )


@torch.no_grad()
def _computes_in_float32(subject: Subject, document: Tensor) -> bool:
    """Whether any operator gives float32 when a float64 model runs on a document."""
    with _RecordDtypes() as recorded:
        subject.output(whole(document))
    return torch.float32 in recorded.dtypes


class _RecordDtypes(TorchDispatchMode):
    """Record the dtypes of the outputs of all operators."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.dtypes |= {x.dtype for x in tree_leaves(result) if isinstance(x, Tensor)}
        return result


def _gradient_to_others(subject: Subject, batch: Batch, document: int, expected: Results) -> float:
    """The gradient of the other documents' outputs in one document's embeddings, relative to their own embeddings'."""
    model: Any = subject.model
    embed = model.get_input_embeddings()
    ids = batch.ids.to(embed.weight.device)
    embeddings = embed(ids).detach().requires_grad_()
    given = {name: x.to(ids.device) for name, x in batch.arguments.items()} | as_prompts(model, ids)
    with torch.enable_grad():
        tensors = dict(tensors_in(model(inputs_embeds=embeddings, **given)))
        parts = parts_of(expected.main, expected.outputs[expected.main], tensors.get(expected.main), batch)
        rest = [part.square().sum() for i, part in enumerate(parts) if i != document]
        (gradient,) = torch.autograd.grad(torch.stack(rest).sum(), embeddings)
    sizes = [float(gradient[row, span].abs().max()) for row, span in batch.spans]
    found = sizes.pop(document) / max(sizes)
    return math.inf if math.isnan(found) else found


def _first_moved_layer(subject: Subject, before: Batch, after: Batch, document: int) -> str:
    """The first layer whose output for other documents differs between two batches; empty if there is none."""
    with torch.no_grad():
        outputs = []
        for batch in (before, after):
            with _record_layers(subject.model) as recorded:
                subject.output(batch)
            outputs.append(recorded)
    for name, one in outputs[0].items():
        for i, place in enumerate(before.spans):
            if i != document and not torch.equal(one[place], outputs[1][name][place]):
                return name
    return ""


@contextmanager
def _record_layers(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Record the output of every decoder layer, by the layer's name, in the order of the forward pass."""
    outputs: dict[str, Tensor] = {}

    def record(name: str, module: nn.Module, args: Any, output: Any) -> None:
        outputs[name] = (output if isinstance(output, Tensor) else output[0]).detach()

    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    layers = [(f"{name}.{i}", layer) for name, module in lists[:1] for i, layer in enumerate(module)]
    handles = [layer.register_forward_hook(partial(record, name)) for name, layer in layers]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _called_with_tokens_alone(model: nn.Module) -> Iterator[None]:
    """Turn errors of the model's own code into one that says what can be checked."""
    try:
        yield
    except (IsolationError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model's own code may raise anything
        name = type(model).__name__
        raise UnsupportedModelError(
            f"check_isolation couldn't call {name}: {one_line(error)}. It passes random tokens as input_ids, then as "
            "inputs_embeds, and nothing else. Give lengths that the model accepts, check the model inside "
            f"(check_isolation(model.base_model)), or compare outputs of {name} with those of each document alone."
        ) from error


@contextmanager
def _as_found(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and restore its modes and the random state afterwards."""
    training = [module for module in model.modules() if module.training]
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    model.eval()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for module in training:
            module.training = True
