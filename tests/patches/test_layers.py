"""Layers beside attention: recurrences and convolutions, routers; and masks that remote code asks transformers for."""

import functools
import importlib
import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import masking_utils

import tritonpack
from tests.patches import zoo
from tests.patches.calls import EXACT, FORMS, LENGTHS, alone, call_of, documents, relative, require_exact
from tests.patches.foreign import FIRST_IMAGE, MASKS, USES, blocks, composed, made_by
from tritonpack import UnsupportedModelError

# Layers that mix along the row run on each document by itself, or once if their kernels take boundaries


def by_document(offsets: Tensor | None, dim: int, own: Any, *rows: Tensor, **more: Tensor) -> list[Any]:
    """Run a kernel on each document, as kernels do that take boundaries."""
    bounds = [(0, rows[0].shape[dim])] if offsets is None else itertools.pairwise(offsets.tolist())
    cut = lambda x, a, b: x.narrow(dim if x.ndim > 2 else 1, a, b - a)  # noqa: E731
    return [own(*(cut(x, a, b) for x in rows), **{key: cut(x, a, b) for key, x in more.items()}) for a, b in bounds]


def convolution(own: Any, lengths: set[int], deaf: bool) -> Callable[..., Tensor]:
    """A function such as causal-conv1d's, which keeps the documents of `seq_idx` apart; (B, channels, T)."""

    def causal_conv1d_fn(x: Tensor, *args: Any, seq_idx: Tensor | None = None, **kwargs: Any) -> Tensor:
        lengths.add(x.shape[2])
        kwargs = {key: value for key, value in kwargs.items() if "cu_seq_lens" not in key}
        offsets = None if seq_idx is None or deaf else nn.functional.pad(seq_idx[0].bincount().cumsum(0), (1, 0))
        return torch.cat(by_document(offsets, 2, lambda x: own(x, *args, **kwargs), x), dim=2)

    return causal_conv1d_fn


def delta_rule(own: Any, lengths: set[int], deaf: bool) -> Callable[..., Any]:
    """A function such as flash-linear-attention's, which keeps documents of `cu_seqlens` apart; (B, T, heads, n)."""

    def chunk_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **kwargs: Any) -> Any:
        lengths.add(q.shape[1])
        offsets = kwargs.pop("cu_seqlens", None)
        kwargs = {key: value for key, value in kwargs.items() if key not in ("seq_idx", "cu_seq_lens_k")}
        if offsets is None or deaf:
            return own(q, k, v, g=g, beta=beta, **kwargs)
        parts = by_document(offsets, 1, functools.partial(own, **kwargs), q, k, v, g=g, beta=beta)
        return torch.cat([out for out, _ in parts], dim=1), None

    return chunk_gated_delta_rule


KERNELS = {"causal_conv1d_fn": convolution, "torch_chunk_gated_delta_rule": delta_rule}
# The packages' functions that have a stand-in, whether they ignore boundaries, and whether a row then runs once.
# Zamba's convolution takes boundaries, but its scan ignores them.
STAND_INS: dict[str, tuple[tuple[str, ...], bool, bool]] = {
    "lfm2": ((), False, False), "mamba2": ((), False, False), "zamba": (("causal_conv1d_fn",), False, False),
    "lfm2 with kernels": (("causal_conv1d_fn",), False, True), "qwen3_next with kernels": (tuple(KERNELS), False, True),
    "lfm2 with deaf kernels": (("causal_conv1d_fn",), True, False),
    "qwen3_next with deaf kernels": (tuple(KERNELS), True, False),
}  # fmt: skip


@pytest.mark.parametrize("name", STAND_INS)
def test_kernels_that_take_boundaries_get_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, (functions, deaf, once) = name.split()[0], STAND_INS[name]
    home, lengths = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}"), set[int]()
    for function in functions:
        monkeypatch.setattr(home, function, KERNELS[function](getattr(home, function), lengths, deaf))
    model = zoo.tiny_model(kind, dtype=torch.float64)
    expected = alone(model)
    with tritonpack.patch(model) as handle:
        handle.prove()
        require_exact(model, expected)
        lengths.clear()
        require_exact(model, expected)
        assert not functions or lengths == ({sum(LENGTHS)} if once else {*LENGTHS})
        assert bool(handle.report.by_document) != once
        require_exact(model, expected, "collator", "offsets_alone", "segments_padded", "two_rows")


@pytest.mark.parametrize("model_type", ["rwkv", "recurrent_gemma", "lfm2", "mamba"])
def test_a_cache_after_padding_on_the_left(model_type: str) -> None:
    """`generate` pads prompts of several lengths: the state is the same as without padding, or the call is refused."""
    model, (document,) = zoo.tiny_model(model_type), documents((8,))
    call = {"input_ids": torch.cat([torch.full((1, 3), 5), document], 1), "attention_mask": torch.ones(1, 11).long()}
    call["attention_mask"][0, :3] = 0
    with torch.no_grad():
        expected = model(document).logits
        tritonpack.patch(model)
        if model_type in ("rwkv", "recurrent_gemma"):
            for run in (lambda: model(**call, use_cache=True), lambda: model.generate(**call, max_new_tokens=2)):
                with pytest.raises(ValueError, match=r"would read the padding on the left.*use_cache=False"):
                    run()
        else:
            torch.testing.assert_close(model(**call, use_cache=True).logits[:, 3:], expected)
        torch.testing.assert_close(model(**call, use_cache=False).logits[:, 3:], expected)
        if model_type == "lfm2":  # a packed batch leaves no cache
            assert model(**call_of(use_cache=True)).past_key_values is None
            assert model(document, use_cache=True).past_key_values is not None


# Losses of routers get a mask of 0 and 1, in whatever way the call tells documents apart, and leave out padding


def test_documents_of_padding_tokens_inside_a_row_count() -> None:
    """Only tokens that fill a row up are padding, and a row is never all padding."""
    model, pieces = zoo.tiny_model("mixtral", dtype=torch.float64, pad_token_id=0), documents((7, 4))
    middle = torch.cat([pieces[0], torch.zeros(1, 3, dtype=torch.long), pieces[1]], dim=1)
    told = {"position_ids": torch.cat([torch.arange(n) for n in (7, 3, 4)])[None], "output_router_logits": True}
    with torch.no_grad():
        batch, rows = call_of("padded_right"), torch.cat([*(torch.arange(n) for n in LENGTHS), torch.arange(3)])[None]
        want = model(batch["input_ids"], attention_mask=batch["attention_mask"], output_router_logits=True).aux_loss
        with tritonpack.patch(model):
            expected = model(middle, **told, attention_mask=torch.ones_like(middle)).aux_loss
            assert float((model(middle, **told).aux_loss - expected).abs()) < EXACT
            assert model(middle * 0, **told).aux_loss.isfinite()
            # padding at the end as a document of its own, also by offsets
            call = {"input_ids": call_of("padded_end")["input_ids"], "position_ids": rows, "output_router_logits": True}
            for more in ({}, {"cu_seq_lens_q": torch.tensor([0, 7, 8, 11, 22, 25])}):
                assert float((model(**call, **more).aux_loss - want).abs()) < EXACT


def test_forward_replaced_after_patching_is_refused() -> None:
    """Liger-Kernel replaces forwards. A wrapper that calls ours, such as accelerate's, replaces nothing."""
    model = zoo.tiny_model("mixtral", dtype=torch.float64, pad_token_id=0)
    call = call_of("segments_alone", output_router_logits=True)
    with tritonpack.patch(model):
        expected, own = model(**call).aux_loss, model.forward
        model.forward = functools.wraps(own)(lambda *args, **kwargs: own(*args, **kwargs))
        assert torch.equal(model(**call).aux_loss, expected)
        model.forward = types.MethodType(type(model).forward, model)
        assert model(**call | {"output_router_logits": False}).logits.isfinite().all()
        with pytest.raises(ValueError, match=r"the forward of MixtralForCausalLM was replaced after .* was patched"):
            model(**call)
        model.forward = own


# Masks that a model of remote code asks transformers for, and computes with by itself


def with_images() -> list[Tensor]:
    """The image at the end of a document continues in the next one by its number alone."""
    pieces = [piece % FIRST_IMAGE for piece in documents()]
    pieces[0][0, 2:5], pieces[2][0, 1:], pieces[3][0, :2], pieces[3][0, 6:9] = 41, 42, 42, 43
    return pieces


TRIED = [(mask, "where") for mask in MASKS] + [("window", use) for use in USES if use != "ignored"]


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(("mask", "use"), [*TRIED, ("images", "add")])
def test_packed_equals_alone(mask: str, use: str) -> None:
    model, pieces = composed(mask, use), with_images()
    expected = torch.cat([model(piece)[0] for piece in pieces], 1)[0]
    for form in ("position_ids", "segments_padded", "two_rows_padded"):
        batch = FORMS[form](pieces)
        with tritonpack.patch(model):
            got = batch.gather(model(batch.ids, **batch.arguments)[0])
        assert relative(expected, got) < EXACT, form


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("case", ["a window of another size", "images of two parts", "images in chunks"])
def test_masks_that_tritonpack_cannot_read_are_refused(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = with_images()
    if case == "a window of another size":  # as a later transformers may pass it
        own = masking_utils.sliding_window_causal_mask_function
        monkeypatch.setattr(masking_utils, "sliding_window_causal_mask_function", lambda size: own(size + 1))
        mask, words = "window or none", "isn't the window"
    elif case == "images of two parts":
        pieces[3][0, 0] = 43
        mask, words = "images", "aren't one interval"
    else:
        in_chunks = made_by("chunked_causal")
        monkeypatch.setitem(MASKS, "chunks", lambda ids, *given: in_chunks(*given, block_sequence_ids=blocks(ids)))
        mask, words = "chunks", "chunks, a window, or one of them"
    batch = FORMS["position_ids"](pieces)
    with tritonpack.patch(model := composed(mask)), pytest.raises((ValueError, UnsupportedModelError), match=words):
        model(batch.ids, **batch.arguments)
