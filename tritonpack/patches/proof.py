"""Proof on the model itself: the other documents of a row change no bit of a document's outputs.

A model is trusted if the tests have shown its class to be exact and all of its code is from transformers. Any other
model is proven in its first call, also if that call isn't packed, so that all ranks of FSDP do it together. A proof
runs the model six to ten times on about 30 random tokens, in evaluation mode, without gradients, and restores the
model's state.
"""

from __future__ import annotations

import textwrap
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from tritonpack.errors import UnsupportedModelError
from tritonpack.patches import measuring
from tritonpack.patches.configurations import layer_windows, rope_limits, text_config
from tritonpack.patches.families import ONE_DOCUMENT_A_ROW, REFUSED_IN_TREES, SHIFTING_HEADS
from tritonpack.patches.forwards import (
    foreign_modules,
    has_known_loss,
    installed,
    is_listed,
    is_seq2seq,
    without_wrappers,
)
from tritonpack.patches.interface import NAMES, use_eager_if_sdpa_differs
from tritonpack.patches.modules import holds, models_in, modules_in, paths_of
from tritonpack.patches.parse_inputs import TREE, tokens_of
from tritonpack.patches.targets import IGNORED, shifts_labels

SHORT, LONG, PADDING = 7, 11, 3  # tokens of the outer documents, of the middle one, and of padding
MAX_REACH = 1024  # the middle document is longer than windows and chunks of up to this many tokens
ROW_DRAWS = 8  # draws of other rows beside the row of a document
ROUNDING = 4 * torch.finfo(torch.float32).eps
MAX_ROUNDING = 0.2  # between two shapes of a call; large, because a scale of quantized layers depends on all tokens

_LOCK = threading.RLock()  # one proof at a time, because the model also runs unpatched

Parts = Mapping[str, list[Tensor] | Tensor]  # each output, cut into documents if it has a part for each


class LeakError(Exception):
    """Packed documents mix; the message says where."""


class Proof:
    """Proves that the heads of a patch, the models that users may call, keep documents apart.

    Each head gets two dicts, for rows (False) and for trees (True). `proven`: calls skip the check from now on.
    `trusted`: the same for code that torch.compile traces, which can't run a check.
    """

    def __init__(self, applied: Any) -> None:
        self.applied, self.running, self.shares = applied, False, applied.options.share_prefixes
        self.bypassed_by: int | None = None  # the thread in which heads run without the patch
        for head in applied.heads:
            head.proof, head.proven = self, {False: False, True: False}
            head.trusted = {trees: not self.why_unknown(head, trees) for trees in (False, True)}

    def require(self, head: Any, arguments: dict[str, Any], trees: bool) -> None:
        """Refuse a user's call of a head, with rows or `trees`, unless it keeps documents apart.

        A head that is neither trusted nor proven is proven here. A call with meta or fake tensors passes.

        Raises:
            UnsupportedModelError: documents mix, or the model can't be tried.
            ValueError: the head isn't trusted or proven, and torch.compile traces this call.
        """
        if torch.compiler.is_compiling():
            if not head.trusted[trees]:
                raise ValueError(
                    f"{head.name} isn't proven yet, and torch.compile can't trace a proof. Before torch.compile call "
                    "prove() on the handle of tritonpack.patch, or call the model once."
                )
            return
        sides = (tokens_of(arguments)[0], tokens_of(arguments, "decoder_")[0])
        tokens = next((x for x in sides if isinstance(x, Tensor)), None)
        if tokens is not None and not tokens.is_meta and detect_fake_mode(tokens) is None:
            self._prove(head, head, trees, tokens.device)

    def prove_now(self) -> None:
        """Prove the outermost heads now. Their proof counts for the heads inside."""
        outer = [head for head in self.applied.heads if not head.one_result]
        for head in self.applied.heads:
            if any(other is not head and holds(other.module, head.module) for other in outer):
                continue
            device = next(head.module.parameters()).device
            if device.type == "meta":
                raise ValueError("this model's weights are on the meta device; load them before you call prove().")
            self._prove(head, head.module, self.shares, device)

    def _prove(self, head: Any, run: Callable[..., Any], trees: bool, device: torch.device) -> None:
        with _LOCK:
            if self.running or head.proven[trees]:  # running in this thread, or proven meanwhile by another
                return
            self.running = True
            try:
                if trees:
                    refuse_layers_in_trees(head.module)
                for kind in sorted({False, trees}):
                    if not head.proven[kind] and (why := self.why_unknown(head, kind)):
                        _run_trial(self.applied, head, run, kind, device, why)
                    for inner in self.applied.heads:
                        if inner is head or (holds(head.module, inner.module) and not head.one_result):
                            inner.proven[kind] = inner.trusted[kind] = True
            finally:
                self.running = False

    def why_unknown(self, head: Any, trees: bool) -> str:
        """Return the reason why a head isn't trusted; empty if it is."""
        kind = without_wrappers(type(head.module))
        if not is_listed(kind, in_trees=trees) and not any(
            is_listed(type(m), in_trees=trees) and holds(m, head.module)
            for m in models_in(self.applied.model)
            if not ONE_DOCUMENT_A_ROW.fullmatch(type(m).__name__)
        ):
            where = " where documents share the tokens that they begin with" if trees and is_listed(kind) else ""
            return f"{kind.__name__} isn't a model that tritonpack knows{where} (with transformers {installed()})"
        if foreign := foreign_modules(head.module):
            paths = [path or "the model" for path in paths_of(foreign[:3], head.module)]
            named = ", ".join(f"{path} ({type(module).__name__})" for path, module in zip(paths, foreign, strict=False))
            more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
            return f"{kind.__name__} runs code that isn't transformers' own in {named}{more}"
        return ""


def refuse_layers_in_trees(model: nn.Module) -> None:
    """Refuse a model with a layer that mixes documents in trees."""
    for layer in modules_in(model):
        if why := REFUSED_IN_TREES.get(type(layer).__name__):
            (path,) = paths_of([layer], model)
            raise UnsupportedModelError(
                f"{path} ({type(layer).__name__}) isn't exact where documents share the tokens that they begin with: "
                f"{why}. Leave share_prefixes and tree_ends out; unpad removes padding alone."
            )


def _run_trial(applied: Any, head: Any, run: Callable[..., Any], trees: bool, device: torch.device, why: str) -> None:
    """Try a head on a few tokens. If its own loss mixes documents, set the head's `mixed_loss`.

    Raises:
        UnsupportedModelError: documents mix, or the trial fails; the message begins with `why` the head was tried.
    """
    saved = None if applied.compaction is None else vars(applied.compaction.saved).copy()
    remedy = "Train it on padded rows, unpatched"
    try:
        with measuring.no_trace(head.module), torch.no_grad():
            trial = _Trial(applied, head, run, device)
            if trees:
                trial.require_tree()
            else:
                alone = trial.require_rows()
                # Causal losses of unknown forwards are tried: Moshi of transformers 5.16 shifts labels twice.
                own_forward = next(kind for kind in type(head.module).__mro__ if "forward" in vars(kind))
                shifts = shifts_labels(head.module, {}) and not is_listed(own_forward)
                known = head.one_result or (has_known_loss(head.module) and not shifts)
                head.mixed_loss = "" if known else trial.why_loss_mixes(alone)
    except torch.OutOfMemoryError:
        raise
    except (LeakError, UnsupportedModelError) as error:
        if trees and not isinstance(error, LeakError):  # a part of the model refuses trees
            raise UnsupportedModelError(f"{head.name} can't run documents with common beginnings: {error}") from error
        advice = f"{remedy}; tritonpack.testing.check_isolation shows where documents meet"
        if trees:
            advice = "Leave share_prefixes and tree_ends out; unpad removes padding alone"
        reason = str(error).rstrip(".")
        raise UnsupportedModelError(
            f"{why}, and on a few tokens its packed documents don't stay apart: {reason}. {advice}."
        ) from error
    except Exception as error:  # a model's own code may raise anything
        raise UnsupportedModelError(
            f"{why}, and it can't be tried on a few tokens to see whether packed documents stay apart: "
            f"{one_line(error)}. {remedy}."
        ) from error
    finally:
        if saved is not None:
            vars(applied.compaction.saved).update(saved)


class _Trial:
    """A trial of one head: draws documents, calls the head, and compares outputs."""

    def __init__(self, applied: Any, head: Any, run: Callable[..., Any], device: torch.device) -> None:
        self.applied, self.head, self.run, self.device = applied, head, run, device
        self.model: Any = head.module
        self.both = is_seq2seq(self.model) and not head.name.endswith(SHIFTING_HEADS)
        text = text_config(self.model.config)
        self.tokens = measuring.ordinary_tokens(self.model, getattr(text, "vocab_size", None))
        reach = max([w or 0 for w in layer_windows(text)] + [getattr(text, "attention_chunk_size", None) or 0])
        limits = [limit - 1 for _, limit in rope_limits(text)]  # above them rotary embeddings change
        self.long = min([max(LONG, reach + 3) if reach <= MAX_REACH else LONG, *limits])

    def draw(self, *lengths: int, seed: int = 1) -> list[Tensor]:
        documents = measuring.draw(self.tokens, lengths, seed)
        if self.head.one_result and is_seq2seq(self.model):
            for document in documents:
                document[:, -1] = self.model.config.eos_token_id  # the token at which such a head reads scores
        return documents

    def lay(self, form: str, documents: Sequence[Tensor]) -> measuring.Batch:
        """Lay out documents in a form. The encoder's are two tokens longer, with a seed from the decoder's."""
        batch = lay_out(form, documents)
        if not self.both:
            return batch
        seeds = [int((d * torch.arange(1, d.shape[1] + 1, device="cpu")).sum()) for d in documents]
        lengths = [document.shape[1] + 2 for document in documents]
        sources = [measuring.draw(self.tokens, (n,), seed)[0] for n, seed in zip(lengths, seeds, strict=True)]
        return replace(batch, source=lay_out(form, sources))

    def call(self, batch: measuring.Batch, **more: Tensor) -> Any:
        """Run the head, with the same random numbers in every call."""
        arguments = {"input_ids": batch.ids, **batch.arguments}
        if batch.source is not None:
            arguments = {"input_ids": batch.source.ids, **batch.source.arguments, "decoder_input_ids": batch.ids}
            arguments |= {f"decoder_{name}": x for name, x in batch.arguments.items()}
        arguments = {name: x.to(self.device) for name, x in (arguments | more).items()}
        arguments |= measuring.as_prompts(self.model, arguments["input_ids"])
        if self.head.name.endswith("ForMultipleChoice"):
            arguments = {name: x[:, None] for name, x in arguments.items()}
        torch.default_generator.manual_seed(0)
        if torch.cuda.is_initialized():  # otherwise torch would keep this seed until a GPU is used
            torch.cuda.manual_seed_all(0)
        return self.run(**arguments)

    def parts(self, form: str, documents: Sequence[Tensor]) -> Parts:
        batch = self.lay(form, documents)
        return measuring.parts_in(self.call(batch), batch)

    def require_rows(self) -> Parts:
        """Try packed rows, or padded rows in a head with one result for each row. Return a document's outputs alone.

        Code that reads all tokens of a call, such as a scale of a quantized layer or a mixture of experts, may change
        outputs as much as in separate rows if other tokens change. Exchanged documents keep the same tokens.
        """
        a, c, other_a, other_c, b, x, y = self.draw(*[SHORT] * 4, *[self.long] * 3)
        alone = self.alone(b)
        for form in ("padded",) if self.head.one_result else ("packed", "numbered"):
            packed, changed = self.parts(form, [a, b, c]), [other_a, b, other_c]
            if _difference(packed, self.parts(form, changed), 1, 1)[0]:
                self.require_unmoved(form, [a, b, c], packed, [c, b, a], exchanged=True)
                self.require_unmoved(form, [a, b, c], packed, changed, exchanged=False)
            self.require_close(alone, packed, form, [x, b, y])
        return alone

    def require_tree(self) -> None:
        """Try two documents that share the tokens that they begin with."""
        stem, first, second, other = self.draw(*[max(self.long // 2, 1)] * 4)
        x, b = torch.cat([stem, first], 1), torch.cat([stem, second], 1)
        alone, packed = self.alone(b), self.parts("tree", [stem, first, second])
        self.require_unmoved("tree", [stem, first, second], packed, [stem, other, second], exchanged=False)
        self.require_close(alone, packed, "tree", [x, b])

    def alone(self, document: Tensor) -> Parts:
        """Return the outputs of a document alone, after a comparison with the unpatched model."""
        with unpatched(self.applied):
            stock = self.parts("rows", [document])
        if not any(isinstance(x, list) for x in stock.values()):
            raise ValueError("it returns no values for tokens or documents")
        patched = self.parts("rows", [document])
        size, name = _difference(stock, patched, 0)
        if size > measuring.half_the_digits(_dtype(stock)):
            raise LeakError(f"{name} of a document alone differs by {size:.0e} from the unpatched model's")
        return patched

    def require_close(self, alone: Parts, packed: Parts, form: str, documents: Sequence[Tensor]) -> None:
        """Require that a document gives the outputs that it gives alone.

        Beyond the rounding of its dtype, the tolerance is 8 times the difference to the document beside `documents` in
        separate rows. In 16 bits it may also be twice the difference to the document beside padding.
        """
        size, name = _difference(alone, packed, 1)
        if size <= measuring.rounding_of(_dtype(alone)):
            return
        seen, moved = _difference(alone, self.parts("rows", documents), 1)
        if seen > MAX_ROUNDING:
            raise LeakError(f"{moved} of a document alone differs by {seen:.0e} from the document beside other rows")
        allowed = 8 * seen
        if size > allowed and _dtype(alone).itemsize == 2:
            allowed = min(2 * _difference(alone, self.parts("padded", documents), 1)[0], MAX_ROUNDING)
        if size > allowed:
            raise LeakError(f"{name} of a document{FORMS[form]} differs by {size:.0e} from the document alone")

    def require_unmoved(self, form: str, documents: Any, packed: Parts, changed: Any, *, exchanged: bool) -> None:
        """Require that the outputs of the second document keep their bits if the others are `exchanged` or changed.

        They may move by rounding in float32, because the products of an expert depend on the order of its tokens. They
        may also move as much as the outputs of the document in its own row. In a mixture of experts that depends on the
        other rows, so several are tried.
        """
        moved, name = _difference(packed, self.parts(form, changed), 1, 1)
        if moved <= ROUNDING:
            return
        before, after = self.lay(form, documents), self.lay(form, changed)
        document = before.ids[before.spans[1]][None]
        for seed in range(2, 2 + ROW_DRAWS):
            x, y, other_x, other_y = self.draw(*[document.shape[1]] * 4, seed=seed)
            pairs = (x, y), (y, x) if exchanged else (other_x, other_y)
            was, moves = (self.parts("rows", [first, document, last]) for first, last in pairs)
            if moved <= 4 * _difference(was, moves, 1, 1)[0]:
                return
        layer = measuring.first_moved(self.model, self.call, before, after, [1]) or "no single layer"
        raise LeakError(f"{name} of a document{FORMS[form]} moves by {moved:.0e} with another one, first in {layer}")

    def why_loss_mixes(self, alone: Parts) -> str:
        """Return why the model's own loss of packed documents differs from its loss of rows; empty if it doesn't.

        `alone` are the outputs of a document, whose shape shows the labels that the model takes. Logits are drawn,
        because small logits hardly change a loss. The second document has a large loss and labels in one half, so a
        mean of rows differs from a mean of tokens. If only it has labels, other logits may not change the loss.
        """
        documents, main = self.draw(*[self.long] * 3), alone.get("logits", next(iter(alone.values())))[0]
        try:
            in_rows, dtype = self.loss("rows", documents, main)
            packed, _ = self.loss("packed", documents, main)
            beside_small, beside_large = (self.loss("packed", documents, main, size, {1})[0] for size in (1, 64))
        except Exception as error:  # a model's own code may raise anything
            return f"with labels it fails: {one_line(error)}"
        if in_rows.numel() != 1 or measuring.apart([in_rows], [packed]) > measuring.rounding_of(dtype):
            losses = packed.tolist(), in_rows.tolist()
            return "it was {}, and with the documents in rows of their own {}".format(*losses)
        size = measuring.apart([beside_small], [beside_large])
        return "" if size <= ROUNDING else f"a document's loss moves by {size:.0e} with the logits of the others"

    def loss(
        self, form: str, documents: Sequence[Tensor], main: Tensor, size: int = 1, labelled: Collection[int] = range(3)
    ) -> tuple[Tensor, torch.dtype]:
        """Return the model's own loss of drawn logits, of a `size` in all documents but the second, and the logits'
        dtype. A model without such logits gives the loss's dtype."""
        batch = self.lay(form, documents)
        labels = torch.full_like(batch.ids, IGNORED)
        for number, ((row, place), document) in enumerate(zip(batch.spans, documents, strict=True)):
            count = document.shape[1] // (2 if number == 1 else 1)
            if number in labelled:
                labels[row, place.start + 1 : place.start + count] = document[0, 1:count] % main.shape[-1]
        if main.ndim < 2:
            labels = torch.cat([document[0, :1] % main.shape[-1] for document in documents])
        with measuring.logits_drawn(self.model, batch, [(size, size), (0, 16), (-size, size)]) as dtypes:
            called = self.call(batch, labels=labels)
        loss = (called["loss"] if isinstance(called, Mapping) else called[0]).flatten()
        return loss, dtypes[0] if dtypes else loss.dtype


# The forms in which documents are laid out, and their words for a message.
FORMS = {
    "rows": " in a row of its own",
    "padded": " beside padding",
    "packed": " marked by position ids",
    "numbered": " marked by a mask that numbers documents",
    "tree": " that shares the tokens that it begins with",
}


def lay_out(form: str, documents: Sequence[Tensor]) -> measuring.Batch:
    """Lay out documents (1, n) in "rows" of one length, "padded" rows, "packed" in one row, or "numbered" in two rows
    with padding. In a "tree" the first one is the common beginning of the two others."""
    if form == "tree":
        return _tree(*documents)
    count = len(documents)
    rows: dict[str, Any] = {"packed": [range(count)], "numbered": [range(count - 1), [count - 1]]}
    single = [[i] for i in range(count)]
    more = PADDING if form in ("numbered", "padded") else 0
    batch = measuring.lay_out(rows.get(form, single), documents, more=more)
    for number, place in enumerate(batch.spans, 1):
        if form == "numbered":
            batch.arguments["attention_mask"][place] = number
    names = {"rows": (), "packed": ("position_ids",)}.get(form, ("attention_mask",))
    return replace(batch, arguments={name: batch.arguments[name] for name in names})


def _tree(stem: Tensor, first: Tensor, second: Tensor) -> measuring.Batch:
    a = stem.numel()
    b, c = a + first.numel(), a + first.numel() + second.numel()
    ends = torch.tensor([c] * a + [b] * (b - a) + [c] * (c - b), device="cpu")[None]
    depths = torch.cat([torch.arange(b, device="cpu"), torch.arange(a, a + c - b, device="cpu")])[None]
    both = torch.cat([torch.arange(a, device="cpu"), torch.arange(b, c, device="cpu")])
    ids, arguments = torch.cat([stem, first, second], 1), {TREE: ends, "position_ids": depths}
    return measuring.Batch(ids, [(0, slice(b)), (0, both)], arguments)


@contextmanager
def unpatched(applied: Any) -> Iterator[None]:
    """Remove a patch for a while: modules have the attention from before it, or transformers' default.

    The heads stay, so that calls of other threads wait in `require`. In this thread heads run without the patch.
    """
    parts = [part for part in applied.parts if part not in applied.heads and not part.gone]
    for part in reversed(parts):
        part.remove()
    applied.proof.bypassed_by = threading.get_ident()
    models = {id(m.config): m for m in models_in(applied.model)}.values()
    names = [(module, module.config._attn_implementation_internal) for module in models]
    try:
        for module, name in names:
            if name in (None, *NAMES.values()):
                module.config._attn_implementation_internal = "sdpa"
        use_eager_if_sdpa_differs(applied.model)
        yield
    finally:
        for module, name in names:
            module.config._attn_implementation_internal = name
        applied.proof.bypassed_by = None
        for part in parts:
            part.install()


def one_line(error: BaseException) -> str:
    """Return an error as one line of moderate length, without a full stop."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 240, placeholder=" [...]").rstrip(".")


def _difference(expected: Parts, actual: Parts, place: int, own: int = 0) -> tuple[float, str]:
    """Return the largest difference between a document's parts at `place` and at its `own` place in another call, and
    the name of its output. 0.0 means that all bits are equal. An output without parts must be constant.

    Raises:
        LeakError: an output has no part for each document.
    """
    worst = (0.0, "")
    for name, parts in expected.items():
        got = actual.get(name)
        if not isinstance(parts, list):
            continue
        if isinstance(got, list):
            worst = max(worst, (measuring.apart([parts[own]], [got[place]]), name))
        elif got is None or not torch.equal(got.flatten(), parts[own].flatten()):
            shape = "is missing" if got is None else f"has shape {tuple(got.shape)}"
            raise LeakError(f"{name} {shape} for several documents in a row")
    return worst


def _dtype(parts: Parts) -> torch.dtype:
    return parts.get("logits", next(iter(parts.values())))[0].dtype
