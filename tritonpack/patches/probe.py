"""Evidence that a model is packed exactly: its class is in the table of shown classes, or passes a trial."""

from __future__ import annotations

import copy
import inspect
import json
import threading
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tritonpack.errors import UnsupportedModelError
from tritonpack.patches.applied_patch import Options, applied_to
from tritonpack.patches.exact_classes import installed, is_shown, without_wrappers
from tritonpack.patches.forwards import foreign_forwards, mixing_forwards
from tritonpack.patches.interface import use_eager_if_sdpa_differs
from tritonpack.patches.names import ONE_DOCUMENT_A_ROW
from tritonpack.patches.report import layer_windows
from tritonpack.patches.rope import rope_limits
from tritonpack.patches.tokens import text_config
from tritonpack.patches.trial.comparison import tolerance
from tritonpack.patches.trial.draws import constant_draws_if_any, gives_the_same_again
from tritonpack.patches.trial.judge import Results, alone, judge
from tritonpack.patches.trial.losses import has_known_loss, losses_alone, why_loss_mixes
from tritonpack.patches.trial.packed_forms import LENGTHS, whole
from tritonpack.patches.trial.shrink import shrink
from tritonpack.patches.trial.small_copy import NotSmallError, one_line, small_model
from tritonpack.patches.trial.subject import Subject, subject_of
from tritonpack.patches.trial.undisturbed import undisturbed

# The forms of a trial. Gradients are compared for the first.
PADDED = "padded_right"
TRIED = ("position_ids", "all_ones_mask", "offsets_alone", "segments_alone", "two_rows", PADDED)
MOST_PARAMETERS = 100_000_000  # of a model that is tried itself, in a float32 copy
LONGEST_REACH = 1024  # of such a model's windows and chunks: the longest document of a trial is longer than these

PatchUntried = Callable[[nn.Module, Options], None]  # patches a model without a trial
Patch = Callable[[nn.Module], None]  # the same, with options
Trial = Callable[[Any, tuple[int, ...]], "Found"]  # of a model, with documents of these lengths

_trial = threading.local()  # marks threads that run a trial, in which a class that patches its instances isn't tried


class Found(NamedTuple):
    """The result of a trial.

    Attributes:
        wrong: why packed documents don't stay apart; empty if they do.
        loss: what is wrong with the model's own loss of packed documents; empty if nothing is known to be.
    """

    wrong: str
    loss: str = ""


# Results of trials, by class, options, forwards and small configuration.
_verdicts: dict[Hashable, Found] = {}


class CannotTryError(Exception):
    """A model can't be tried; the message says why."""


class TrialFailedError(UnsupportedModelError):
    """A trial found that packed documents don't stay apart.

    Args:
        why: why the model was tried.
        found: where documents meet.
    """

    def __init__(self, why: str, found: str) -> None:
        super().__init__(
            f"{why}, and on a few tokens its packed documents don't stay apart: {found}. Train it on padded rows, "
            "unpatched; tritonpack.testing.check_isolation shows where documents of a model meet."
        )


def require_evidence(model: nn.Module, asked: Options, patch_untried: PatchUntried) -> list[tuple[nn.Module, str]]:
    """Refuse a model that isn't known to be packed exactly.

    A model is known if `exact_classes.csv` lists its class for the installed transformers and all its forwards are
    transformers' own. The class of any other model is tried: documents of a small float32 copy with random weights are
    packed in several forms and compared with each document alone, on the CPU. The model itself, its device and the
    random state stay as they are. The result of a trial holds for the process.

    Args:
        model: a transformers model, or a module that holds some; it isn't patched yet.
        asked: the options of `patch`.
        patch_untried: patches a model without asking for evidence.

    Returns:
        The models whose own loss mixes packed documents, each with the reason.

    Raises:
        UnsupportedModelError: documents don't stay apart in the trial, or the model can't be tried.
    """
    losses: list[tuple[nn.Module, str]] = []
    for root in () if hasattr(_trial, "runs") else _roots(model):
        replaced = foreign_forwards(root)
        if not replaced and is_shown(type(root)):
            continue
        why = _why_unknown(root, replaced)
        try:
            found = _find(root, _try, Options(asked.attention), patch_untried)
        except CannotTryError as error:
            raise UnsupportedModelError(
                f"{why}, and it can't be tried on a few tokens to see whether packed documents stay apart: {error}. "
                f"Patch a {without_wrappers(type(root)).__name__} that can be built from its configuration alone, or "
                f"one of at most {MOST_PARAMETERS:,} parameters before it is sharded or quantized; or train it on "
                "padded rows, unpatched."
            ) from error
        if found.wrong:
            raise TrialFailedError(why, found.wrong)
        if found.loss:
            losses.append((root, found.loss))
    return losses


def _roots(model: nn.Module) -> list[PreTrainedModel]:
    """The transformers models in a module that lie in no other one.

    Models inside heads with one document a row are included, because users may call those models with packed rows.
    """
    if isinstance(model, PreTrainedModel):
        apart = ONE_DOCUMENT_A_ROW.fullmatch(type(model).__name__)
        inside = model.base_model if apart else model
        return [model] if inside is model or not isinstance(inside, PreTrainedModel) else [model, inside]
    return [root for child in model.children() for root in _roots(child)]


def _why_unknown(root: PreTrainedModel, replaced: list[str]) -> str:
    name = type(root).__name__
    if replaced and is_shown(type(root)):
        modules = dict(root.named_modules())
        shown = ", ".join(f"{path or 'the model'} ({type(modules[path]).__name__})" for path in replaced[:3])
        more = f" and {len(replaced) - 3} more" if len(replaced) > 3 else ""
        return f"{name} runs code that isn't transformers' own in {shown}{more}"
    return f"{name} isn't a model that tritonpack knows (with transformers {installed()})"


def require_tree_evidence(model: nn.Module, patch_untried: PatchUntried) -> None:
    """Refuse a model in which documents that share their common tokens don't equal documents alone in a trial.

    Raises:
        UnsupportedModelError: they differ, or the model can't be tried.
    """
    for root in () if hasattr(_trial, "runs") else _roots(model):
        try:
            wrong = _find(root, _try_shared, Options(share_prefixes=True), patch_untried).wrong
        except CannotTryError as error:
            wrong = str(error)
        if wrong:
            raise UnsupportedModelError(
                f"{type(root).__name__} isn't known to be exact where documents share the tokens that they begin with. "
                "Leave share_prefixes and tree_ends out; unpad removes padding alone. A trial on a few tokens found: "
                f"{wrong}"
            )


def _find(root: PreTrainedModel, trial_of: Callable[..., Found], tried: Options, patch_untried: PatchUntried) -> Found:
    """Try a small copy on the CPU, else one on the model's device, else the model itself.

    Raises:
        CannotTryError: none of them can be tried.
    """
    kind, config = without_wrappers(type(root)), root.config
    forwards = frozenset(mixing_forwards(root))
    attempt = partial(trial_of, patch=lambda small: patch_untried(small, tried))
    on_device = (p.device for p in root.parameters() if p.device.type not in ("cpu", "meta"))
    trials: dict[str, tuple[Callable[[Any], Any], Callable[[], Found]]] = {
        f"a small copy on {device}": (shrink, partial(_try_small, kind, config, forwards, device, attempt))
        for device in (torch.device("cpu"), *islice(on_device, 1))  # some forwards of others run on a GPU alone
    }
    trials["the model itself"] = (copy.copy, partial(_try_itself, root, attempt))
    reasons = []
    for name, (changed, trial) in trials.items():
        try:
            return _remembered((kind, tried, forwards, _as_text(changed, config)), trial)
        except CannotTryError as error:
            reasons.append(f"{name}: {error}")
    raise CannotTryError("; ".join(reasons))


def _remembered(key: Hashable, trial: Callable[[], Found]) -> Found:
    """Run a trial, or return its earlier result. A trial that couldn't be run is tried again the next time."""

    def mark_and_run() -> Found:
        _trial.runs = True  # for as long as the thread lives
        return trial()

    if key not in _verdicts:
        _verdicts[key] = undisturbed(mark_and_run)
    return _verdicts[key]


def _as_text(change: Callable[[Any], Any], config: Any) -> str:
    try:
        return json.dumps(change(config).to_dict(), sort_keys=True, default=str)
    except Exception as error:  # a configuration's own code may raise anything
        raise CannotTryError(f"its configuration can't be read: {one_line(error)}") from error


def _try_small(
    kind: type[nn.Module], config: Any, forwards: frozenset[Any], device: torch.device, attempt: Trial
) -> Found:
    def build(dtype: torch.dtype) -> nn.Module:
        try:
            model = small_model(kind, config).to(device=device, dtype=dtype)
        except NotSmallError as error:
            raise CannotTryError(f"it can't be built: {error}") from error
        if lacking := forwards - set(mixing_forwards(model)):
            names = ", ".join(sorted(getattr(forward, "__qualname__", repr(forward)) for forward in lacking))
            raise CannotTryError(f"it doesn't have all that the model runs: {names}")
        return model

    return _try_in_both(build, attempt, LENGTHS)


def _try_itself(root: PreTrainedModel, attempt: Trial) -> Found:
    parameters = list(root.parameters())
    if any(p.is_meta for p in parameters):
        raise CannotTryError("its weights are on the meta device; patch it once they are loaded")
    if not all(type(p) is nn.Parameter and p.is_floating_point() for p in parameters):
        raise CannotTryError("its weights are sharded or quantized")
    if (count := sum(p.numel() for p in parameters)) > MOST_PARAMETERS:
        raise CannotTryError(f"{count:,} parameters are too many for a float32 copy")
    text = text_config(root.config)
    reach = max([w or 0 for w in layer_windows(text)] + [getattr(text, "attention_chunk_size", None) or 0])
    if reach > LONGEST_REACH:
        raise CannotTryError(f"its window or chunk of {reach:,} tokens is longer than any document that would be tried")

    def build(dtype: torch.dtype) -> nn.Module:
        try:
            twin = copy.deepcopy(root)
        except Exception as error:  # parts of a model may raise anything when they are copied
            raise CannotTryError(f"it can't be copied: {one_line(error)}") from error
        for applied in applied_to(twin):
            applied.revert()
        use_eager_if_sdpa_differs(twin)
        return twin.to(dtype).eval().requires_grad_()

    return _try_in_both(build, attempt, (*LENGTHS[:-1], max(LENGTHS[-1], reach + 3)))


def _try_in_both(build: Callable[[torch.dtype], nn.Module], attempt: Trial, lengths: tuple[int, ...]) -> Found:
    """Run a trial in float32. If it finds a difference, which may be rounding, run one in float64."""
    found = attempt(build(torch.float32), lengths)
    if found.wrong or found.loss:
        try:
            exact = attempt(build(torch.float64), lengths)
            return exact._replace(wrong=found.wrong if exact.wrong else "")
        except CannotTryError:  # a constant or a cast in the model's own code
            pass
    return found


def _try(model: Any, lengths: tuple[int, ...], patch: Patch) -> Found:
    """Compare packed documents in the patched model with each document alone in the unpatched model."""
    # Rotary embeddings that have grown with a longer document shrink again for one below the limit, not at it.
    limits = [limit - 1 for _, limit in rope_limits(text_config(model.config))]
    short = tuple(min([n, *limits]) for n in lengths)
    try:
        subject = _same_each_time(subject_of(model))
        documents, longer, twins = subject.draw(short, 1), subject.draw(lengths, 1), subject.draw(short[:1] * 2, 2)
        expected = alone(subject, documents)
        expected_longer, expected_twins = (alone(subject, some, gradients=False) for some in (longer, twins))
    except CannotTryError:
        raise
    except Exception as error:  # a model's own code may raise anything
        raise CannotTryError(f"it doesn't run on tokens alone: {one_line(error)}") from error
    limit = tolerance(expected.dtype)
    wanted = {form: expected if form == TRIED[0] else expected._replace(gradients=()) for form in TRIED}
    forms = [form for form in TRIED if _takes(model, subject.forms[form](documents).arguments)]
    failing = {form for form in forms if _fails(subject, form, documents)}
    if PADDED in forms and PADDED not in failing:
        wanted[PADDED] = _unmoved_by_padding(subject, documents, expected, limit)
        forms = [form for form in forms if wanted[form].outputs]
    loss = None if has_known_loss(model) else losses_alone(subject, [*documents, *twins[:1]], expected)
    try:
        patch(model)
    except Exception as error:
        return Found(f"patching fails: {one_line(error)}")
    found = {form: judge(subject, form, documents, wanted[form], limit, always=True) for form in forms}
    failed = [one for form, one in found.items() if one.verdict == "error" and form not in failing]
    wrong = [one for one in found.values() if one.wrong] + [one for one in failed if not _is_ours(one.error)]
    if short != lengths:  # beyond the limit of rotary embeddings a call may be refused, but not wrong
        beyond = judge(subject, TRIED[0], longer, expected_longer, limit, always=True)
        wrong += [beyond] if beyond.wrong else []
    pair = judge(subject, TRIED[0], twins, expected_twins, limit)  # documents of one length may run in one call
    wrong += [pair] if pair.wrong and not wrong else []
    # Heads with one result a row refuse packed rows.
    rows_alone = ONE_DOCUMENT_A_ROW.fullmatch(type(model).__name__) and expected.main in wanted[PADDED].outputs
    exact_forms = [form for form, one in found.items() if one.verdict == "exact" and (form != PADDED or rows_alone)]
    if not exact_forms:
        wrong += list(found.values())
    if not found:
        raise CannotTryError("its forward takes nothing that tells documents apart")
    mixes = why_loss_mixes(subject, exact_forms[0], loss, limit) if loss is not None and not wrong else ""
    return Found("; ".join(dict.fromkeys(one.reason for one in wrong[:2])), mixes)


def _try_shared(model: Any, lengths: tuple[int, ...], patch: Patch) -> Found:
    """Compare documents that share tokens in the patched model with each document alone in the unpatched model."""
    limits = [(limit - 1) // 2 for _, limit in rope_limits(text_config(model.config))]
    half = max(min([*lengths[:1], *limits]), 1)
    try:
        subject = _same_each_time(subject_of(model))
        documents = _alike(*subject.draw((half,) * 4, 1))
        expected = alone(subject, documents)
    except CannotTryError:
        raise
    except Exception as error:  # a model's own code may raise anything
        raise CannotTryError(f"it doesn't run on tokens alone: {one_line(error)}") from error
    try:
        patch(model)
    except Exception as error:
        return Found(f"patching fails: {one_line(error)}")
    compaction = applied_to(model)[0].compaction
    assert compaction is not None
    compaction.longest = None  # the row is longer than the limit of rotary embeddings, and no document is
    form = PADDED if ONE_DOCUMENT_A_ROW.fullmatch(type(model).__name__) else TRIED[0]
    found = judge(subject, form, documents, expected, tolerance(expected.dtype))
    if found.verdict != "exact":
        return Found(found.reason)
    shared = compaction.saved.tokens_computed < compaction.saved.tokens_given
    return Found("" if shared else "its calls pass by the module in which tokens are shared")


def _alike(begin: Tensor, *rests: Tensor) -> list[Tensor]:
    """Documents (1, n) of which three begin alike, two of these further, and one is of its own; in no order."""
    first, second, own = rests
    further = torch.cat([begin, first], 1)
    return [torch.cat([begin, second], 1), own, further, torch.cat([further[:, :-1], second[:, :1]], 1), begin]


def _is_ours(error: BaseException | None) -> bool:
    """Whether tritonpack raised an error: a call that is refused isn't wrong."""
    trace = error.__traceback__ if error is not None else None
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals["__name__"].startswith("tritonpack.")


def _same_each_time(subject: Subject) -> Subject:
    """Make the random draws of a model constant, if it has any, so that its outputs can be compared.

    Raises:
        CannotTryError: two calls with the same tokens differ nevertheless.
    """
    batch = whole(subject.draw((7,), 1)[0])
    subject = replace(subject, draws=constant_draws_if_any(lambda: subject.output(batch)))
    if not gives_the_same_again(lambda: [*subject.tensors(batch).values()]):
        raise CannotTryError("two calls in evaluation mode with the same tokens give other outputs")
    return subject


@torch.no_grad()
def _unmoved_by_padding(subject: Subject, documents: list[Tensor], expected: Results, limit: float) -> Results:
    """The outputs that padding doesn't change in the unpatched model. XLNet's change: it reads a row's last token."""
    parts, _ = subject.parts(subject.forms[PADDED](documents), expected.outputs)
    kept = [name for name in parts if expected.outputs[name].difference(parts[name]) <= limit]
    return Results({name: expected.outputs[name] for name in kept})


def _takes(model: nn.Module, arguments: dict[str, Any]) -> bool:
    """Whether a model's forward takes the arguments of a form, by name or by **kwargs."""
    known = inspect.signature(model.forward).parameters
    return set(arguments) <= set(known) or any(p.kind is p.VAR_KEYWORD for p in known.values())


@torch.no_grad()
def _fails(subject: Subject, form: str, documents: list[Tensor]) -> bool:
    """Whether a call fails without a patch."""
    try:
        subject.output(subject.forms[form](documents))
    except Exception:  # a model's own code may raise anything
        return True
    return False
