"""Padded batches that run as one row: without padding, and with common beginnings once."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DynamicCache,
    PreTrainedModel,
)

import tritonpack
from tests.patches import sweep, zoo
from tests.patches.models import COMMON, NAMES_OF_CACHE, VOCAB, generate, tiny_model
from tests.patches.test_every_model import REFUSED
from tests.patches.test_patching import state
from tests.small_copies.comparison import apart, tolerance
from tritonpack.patches.compact import Compaction
from tritonpack.patches.packed_batch import PackedBatch, Serving
from tritonpack.patches.parse_inputs import CACHES

WAYS = pytest.mark.parametrize("options", [{"unpad": True}, {"share_prefixes": True}], ids=["unpad", "share"])
FORMS = ("padded_right", "padded_left", "two_rows_padded")
# What share_prefixes refuses: dense masks, layers that see later tokens, and layers that run documents one by one.
REFUSED_TREES = "dense mask|sees the tokens after it|composes a mask of its own|on each document by itself"
LIMIT = tolerance(torch.float64)


def alike() -> list[Tensor]:
    """Five documents of 4 to 10 tokens, of which four begin alike."""
    begin, first, second, own = zoo.documents((4, 3, 5, 6))
    further = torch.cat([begin, first], 1)
    return [torch.cat([begin, second], 1), own, further, torch.cat([further[:, :-1], second[:, :1]], 1), begin]


def padded(*, left: bool = False, labels: bool = True) -> dict[str, Tensor]:
    """The documents of `alike`, one in each row."""
    rows = [document[0] for document in alike()]
    width = max(map(len, rows))
    ids, mask = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(2))
    for i, row in enumerate(rows):
        span = slice(width - len(row), width) if left else slice(len(row))
        ids[i, span], mask[i, span] = row, 1
    return {
        "input_ids": ids,
        "attention_mask": mask,
        **({"labels": ids.masked_fill(mask == 0, -100)} if labels else {}),
    }


def results(model: PreTrainedModel, batch: dict[str, Any], **more: Any) -> tuple[Any, list[Tensor | None]]:
    """The output of a call, and the gradients of its loss, or of its first output where tokens aren't padding."""
    model.zero_grad()
    output = model(**batch, **more)
    target = output.loss if "labels" in batch else (output[0] * batch["attention_mask"][..., None]).square().sum()
    target.backward()
    return output, [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def real(values: Tensor, batch: dict[str, Any]) -> Tensor:
    """Values (B, T, ...), or (B * T, ...) as routers give them, with zeros for padding; other values unchanged."""
    mask = batch["attention_mask"][..., None]
    if values.shape[:2] == mask.shape[:2]:
        return values * mask
    return values * mask.flatten(0, 1) if values.shape[:1] == (mask.numel(),) else values


def equal_as_stock(model: PreTrainedModel, batch: dict[str, Any], options: dict[str, bool], **more: Any) -> Any:
    """Compare all outputs and gradients of a call in the patched model with stock's. Returns the patched output."""
    want, gradients = results(model, batch, **more)
    with tritonpack.patch(model, **options) as handle:
        got, found = results(model, batch, **more)
    assert handle.saved is not None
    assert handle.saved.tokens_computed < 0.9 * handle.saved.tokens_given
    assert apart(gradients, found) < LIMIT
    for name in (name for name in want if name not in CACHES):
        ones, others = ([x[name]] if hasattr(x[name], "shape") else list(x[name]) for x in (want, got))
        assert apart([real(x, batch) for x in ones], [real(x, batch) for x in others]) < LIMIT, name
    return got


@pytest.mark.parametrize("name", zoo.VARIANTS)
@WAYS
@pytest.mark.fast("unpad-electra-encoder", "share-gemma4-experts", "share-mistral-full")
def test_variants_equal_alone_or_are_refused(
    name: str, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The types themselves are in the sweep, tests/patches/test_sweep_padded.py."""
    handles = []

    def patch(model: PreTrainedModel) -> Any:
        handles.append(tritonpack.patch(model, **options))
        return handles[-1]

    if "share_prefixes" in options:
        documents = alike()
        monkeypatch.setattr(zoo, "documents", lambda *_: documents)
    row = sweep.run(name, patch=patch, forms=FORMS, gradients=["padded_right"])
    if row.verdict == "refused":
        known = name in REFUSED or "dense mask" in row.reason or "passes by" in row.reason
        assert known or "share_prefixes" in options, row
        return
    assert (row.verdict, row.reason) == ("exact", "")
    assert handles[0].saved.tokens_computed < 0.9 * handles[0].saved.tokens_given


class TestCalls:
    @WAYS
    @pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
    @pytest.mark.parametrize("family", ["llama", "mistral"])
    def test_loss_outputs_and_gradients_are_stocks(self, family: str, left: bool, options: dict[str, bool]) -> None:
        batch = padded(left=left)
        equal_as_stock(tiny_model(family), batch, options, output_hidden_states=True)
        equal_as_stock(tiny_model(family), batch, options, num_items_in_batch=torch.tensor(100))

    @WAYS
    @pytest.mark.parametrize("keep", [3, torch.tensor([1, 1, 4])], ids=["last", "places"])
    def test_logits_to_keep(self, keep: Any, options: dict[str, bool]) -> None:
        model, batch = tiny_model("llama"), padded(left=True, labels=False)
        want = model(**batch, logits_to_keep=keep).logits
        with tritonpack.patch(model, **options):
            got = model(**batch, logits_to_keep=keep).logits
        mask = batch["attention_mask"][:, slice(-keep, None) if isinstance(keep, int) else keep, None]
        assert apart([want * mask], [got * mask]) < LIMIT

    @WAYS
    def test_embeddings_in_place_of_tokens(self, options: dict[str, bool]) -> None:
        """Embeddings can't be compared exactly, so padding alone is removed."""
        model, batch = tiny_model("llama"), padded(labels=False)
        embeddings = model.get_input_embeddings()(batch.pop("input_ids")).detach()
        want = model(inputs_embeds=embeddings, **batch).logits
        with tritonpack.patch(model, **options) as handle:
            got = model(inputs_embeds=embeddings, **batch).logits
        mask = batch["attention_mask"][..., None]
        assert apart([want * mask], [got * mask]) < LIMIT
        assert handle.saved.tokens_computed == int(mask.sum())

    @pytest.mark.parametrize("family", ["gpt2", "llama"])
    @pytest.mark.parametrize("options", [{}, {"unpad": True}], ids=["packed", "unpad"])
    def test_weights_of_attention_are_refused(self, family: str, options: dict[str, bool]) -> None:
        model, batch = tiny_model(family), padded(labels=False)
        with tritonpack.patch(model, **options), pytest.raises(tritonpack.UnsupportedModelError, match="no weights"):
            model(**batch, output_attentions=True)

    @WAYS
    def test_router_loss_of_experts(self, options: dict[str, bool]) -> None:
        equal_as_stock(tiny_model("mixtral", router_aux_loss_coef=0.5), padded(), options, output_router_logits=True)

    @WAYS
    @pytest.mark.parametrize("head", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
    def test_other_heads(self, head: Any, options: dict[str, bool]) -> None:
        torch.manual_seed(0)
        model = head.from_config(AutoConfig.for_model("llama", **COMMON, num_labels=3)).double().eval()
        batch = padded(labels=False)
        by_row = head is AutoModelForSequenceClassification
        batch["labels"] = torch.tensor([0, 2, 1, 1, 0]) if by_row else batch["input_ids"] % 3
        if not by_row:
            batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
        equal_as_stock(model, batch, options)

    @WAYS
    def test_positions_that_were_given(self, options: dict[str, bool]) -> None:
        """Tokens at different positions aren't shared."""
        model, batch = tiny_model("llama"), padded(left=True)
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        equal_as_stock(model, batch, options)
        batch["position_ids"] = batch["position_ids"] + torch.arange(5)[:, None]
        equal_as_stock(model, batch, {"unpad": True})
        with tritonpack.patch(model, share_prefixes=True) as handle:
            model(**batch)
        assert handle.saved.tokens_computed >= int(batch["attention_mask"].sum())

    @WAYS
    def test_packed_rows_beside_padding(self, options: dict[str, bool]) -> None:
        """Rows with several documents and padding; common beginnings are found in the whole batch."""
        first, own, second, *_ = (document[0] for document in alike())
        ids = torch.zeros(2, 20, dtype=torch.long)
        places = ids.clone()
        for row, at, document in ((0, 0, first), (0, len(first), own), (1, 2, second)):
            ids[row, at : at + len(document)] = document
            places[row, at : at + len(document)] = torch.arange(len(document))
        batch = {"input_ids": ids, "attention_mask": (ids != 0).long(), "position_ids": places}
        model = tiny_model("llama")
        with tritonpack.patch(model):
            want, gradients = results(model, batch)
        with tritonpack.patch(model, **options) as handle:
            got, found = results(model, batch)
        assert apart([real(want.logits, batch)], [real(got.logits, batch)]) < LIMIT
        assert apart(gradients, found) < LIMIT
        shared = 4 if "share_prefixes" in options else 0
        assert handle.saved.tokens_computed <= int(batch["attention_mask"].sum()) + 1 - shared

    @WAYS
    def test_rotary_embeddings_that_change_with_long_rows(self, options: dict[str, bool]) -> None:
        """Rows beyond the limit run as they are: stock chooses frequencies by the padded length."""
        rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
        for limit in (16, 6):
            model = tiny_model("llama", rope_parameters=rope, max_position_embeddings=limit)
            batch = padded(labels=False)
            want = model(**batch).logits
            with tritonpack.patch(model, **options) as handle:
                got = model(**batch).logits
            assert apart([real(want, batch)], [real(got, batch)]) < LIMIT
            assert (handle.saved.tokens_computed < handle.saved.tokens_given) == (limit == 16)

    def test_beginnings_too_short_to_be_worth_a_tree(self) -> None:
        """Documents that have only their first token in common lie in a packed row."""
        model, ids = tiny_model("llama"), torch.randint(3, VOCAB, (3, 30))
        ids[:, 0], mask = 1, torch.ones_like(ids)
        mask[0, 20:] = 0
        with tritonpack.patch(model, share_prefixes=True) as handle:
            model(ids, attention_mask=mask)
        assert handle.saved.tokens_computed == 80

    def test_nothing_to_save_leaves_the_call_as_it_is(self) -> None:
        model, ids = tiny_model("llama"), torch.randint(3, VOCAB, (2, 9))
        for arguments in ({}, {"attention_mask": torch.ones_like(ids)}):
            with tritonpack.patch(model):
                want = model(ids, **arguments)
            with tritonpack.patch(model, share_prefixes=True) as handle:
                got = model(ids, **arguments)
            assert torch.equal(want.logits, got.logits)
            assert got.past_key_values is not None
            assert str(handle.saved) == "18 of 18 tokens computed, 0.0% saved"

    def test_equal_rows_run_once(self) -> None:
        model, ids = tiny_model("llama"), torch.randint(3, VOCAB, (1, 9)).expand(4, -1)
        want = model(ids).logits
        with tritonpack.patch(model, share_prefixes=True) as handle:
            assert apart([want], [model(ids).logits]) < LIMIT
        assert (handle.saved.tokens_given, handle.saved.tokens_computed) == (36, 9)

    @WAYS
    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    def test_generate_as_stock(self, cache: str, options: dict[str, bool]) -> None:
        model, ids = tiny_model("mistral"), torch.randint(3, VOCAB, (2, 9))
        want, _ = generate(model, ids, cache=cache, padding=4)
        with tritonpack.patch(model, **options):
            got, _ = generate(model, ids, cache=cache, padding=4)
            asked = model(**padded(labels=False), use_cache=True)
            assert asked.past_key_values.get_seq_length() == asked.logits.shape[1]
            assert model(**padded(labels=False)).past_key_values is None
        assert torch.equal(want, got)

    @WAYS
    def test_waits_once_for_the_device_whatever_the_number_of_layers(self, options: dict[str, bool]) -> None:
        batch, counts = padded(labels=False), []
        for layers in (1, 3):
            model = tiny_model("llama", num_hidden_layers=layers)
            with tritonpack.patch(model, **options), torch.no_grad():
                model(**batch)
                with _Waits() as waits:
                    model(**batch)
            counts.append(waits.names)
        assert counts[0] == counts[1]

    def test_waits_for_the_number_of_tokens_alone(self) -> None:
        batch = padded(labels=False)
        mask, tokens = batch["attention_mask"].int(), batch["input_ids"].shape
        given = PackedBatch(mask, None, None, tokens, mask.device, Serving("tritonpack", "auto"))
        with _Waits() as waits:
            Compaction(share_prefixes=False)(given, dict(batch))
        assert sorted(set(waits.names)) == ["_local_scalar_dense", "cpu"]  # `checks.require` reads on the host alone
        assert waits.names.count("cpu") == 1

    def test_a_packed_row_waits_for_nothing(self) -> None:
        """Position ids tell its documents apart, and there is no padding to look for."""
        ids, positions = torch.randint(3, VOCAB, (1, 12)), torch.arange(12)[None] % 5
        given = PackedBatch(None, positions, None, ids.shape, ids.device, Serving("tritonpack", "auto"))
        with _Waits() as waits:
            assert Compaction(share_prefixes=False)(given, {"input_ids": ids, "position_ids": positions}) is given
        assert not {"cpu", "nonzero", "item"} & set(waits.names)


class _Waits(TorchDispatchMode):
    """Counts operators that wait for a device, and calls of `Tensor.cpu`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __enter__(self) -> Any:
        self.patch = pytest.MonkeyPatch()
        own = Tensor.cpu
        self.patch.setattr(Tensor, "cpu", lambda tensor: (self.names.append("cpu"), own(tensor))[1])
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        self.patch.undo()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        if name in ("nonzero", "_local_scalar_dense", "item", "equal", "masked_select", "unique"):
            self.names.append(name)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("options", [{}, {"unpad": True}], ids=["packed", "unpad"])
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("name", NAMES_OF_CACHE)
def test_a_cache_is_continued_without_position_ids(name: str, left: bool, options: dict[str, bool]) -> None:
    """As in a loop of one's own: the mask covers the cache, and says where documents begin."""
    model = tiny_model("llama", initializer_range=0.3)
    ids = torch.randint(3, VOCAB, (2, 8))
    mask = torch.ones_like(ids)
    if left:
        mask[1, :4] = 0
    alone = [model(row[live.bool()][None]).logits[0, -2:] for row, live in zip(ids, mask, strict=True)]
    for cache in (None, DynamicCache()):
        with tritonpack.patch(model, **options):
            kept = model(ids[:, :6], attention_mask=mask[:, :6], use_cache=True, **{name: cache})[name]
            steps = [
                model(ids[:, n : n + 1], attention_mask=mask[:, : n + 1], **{name: kept}).logits[:, 0] for n in (6, 7)
            ]
        assert apart(alone, list(torch.stack(steps, 1))) < LIMIT


class TestModels:
    @WAYS
    def test_unpatching_copies_and_pickles(self, options: dict[str, bool]) -> None:
        model, batch = tiny_model("llama"), padded(labels=False)
        before = state(model)
        handle = tritonpack.patch(model, **options)
        want = model(**batch).logits
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(**batch).logits, want)
        assert tritonpack.patch(model, **options).saved is handle.saved  # one patch, two handles
        tritonpack.unpatch(model)
        handle.unpatch()
        assert state(model) == before

    def test_a_later_patch_without_the_options_suspends_them(self) -> None:
        model, batch = tiny_model("llama"), padded(labels=False)
        with tritonpack.patch(model, unpad=True) as outer:
            with tritonpack.patch(model) as inner:
                model(**batch)
                assert inner.saved is None
                assert outer.saved.tokens_given == 0
            model(**batch)
            assert outer.saved.tokens_given == batch["input_ids"].numel()

    @WAYS
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_gradient_checkpointing(self, reentrant: bool, options: dict[str, bool]) -> None:
        model, batch = tiny_model("qwen3").train(), padded()
        _, want = results(model, batch)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        with tritonpack.patch(model, **options):
            _, got = results(model, batch)
        assert apart(want, got) < LIMIT

    @WAYS
    def test_peft(self, options: dict[str, bool]) -> None:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
        equal_as_stock(peft.get_peft_model(tiny_model("llama"), config).double(), padded(), options)

    @WAYS
    def test_autocast(self, options: dict[str, bool]) -> None:
        model, batch = tiny_model("llama", dtype=torch.float32), padded(labels=False)
        with torch.autocast("cpu", torch.bfloat16):
            want = model(**batch).logits
            with tritonpack.patch(model, **options):
                got = model(**batch).logits
        assert got.dtype == want.dtype
        assert apart([real(want.float(), batch)], [real(got.float(), batch)]) < 0.05


class TestTreeEnds:
    """`tree_ends` say that a row holds a tree, as `TreeCollator` gives it."""

    def call(self) -> tuple[dict[str, Tensor], Callable[[Tensor], Tensor]]:
        """The arguments of a call, and what brings values of the row to all documents, one after the other."""
        batch = tritonpack.pack_tree([document[0] for document in alike()])
        inputs = {name: x for name, x in batch.inputs().items() if name in ("input_ids", "position_ids", "tree_ends")}
        return inputs, lambda values: torch.cat(batch.gather(values))

    @pytest.mark.fast("gpt2", "mistral")
    @pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "gpt_oss", "llama4_text"])
    def test_sequences_equal_alone(self, family: str) -> None:
        model, (call, gather) = zoo.tiny_model(family), self.call()
        want = torch.cat([model(document).logits[0] for document in alike()])
        for given in (call, {name: x for name, x in call.items() if name != "position_ids"}):
            with tritonpack.patch(model):
                got = gather(model(**given).logits)
            assert apart([want], [got]) < LIMIT

    def test_loss_and_gradients_of_a_collated_tree(self) -> None:
        model, batch = tiny_model("mistral"), padded()
        _, want = results(model, batch)
        rows = [
            ids[mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        with tritonpack.patch(model):
            output, got = results(model, tritonpack.TreeCollator()([{"input_ids": row} for row in rows]))
        assert apart([model(**batch).loss.detach()], [output.loss.detach()]) < LIMIT
        assert apart(want, got) < LIMIT

    @pytest.mark.parametrize("family", ["mamba2", "electra-encoder"])
    def test_models_that_take_no_trees_are_refused(self, family: str) -> None:
        model, (call, _) = zoo.tiny_model(family), self.call()
        with tritonpack.patch(model), pytest.raises(tritonpack.UnsupportedModelError, match="without tree_ends"):
            model(**call)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"tree_ends": torch.zeros(1, 19)}, "tree_ends must be an integer tensor.*got"),
            ({"tree_ends": torch.zeros(1, 3, dtype=torch.long)}, r"tree_ends has shape \(1, 3\)"),
            ({"tree_ends": torch.full((1, 19), 99)}, r"ends\[0\] is 99"),
            ({"attention_mask": torch.ones(1, 19)}, "tree_ends and attention_mask both say"),
            ({"seq_idx": torch.zeros(1, 19, dtype=torch.int32)}, "tree_ends and seq_idx both say"),
            ({"tree_ends": None, "parents": torch.zeros(1, 19)}, "'parents', which nothing reads.*Pass tree_ends"),
        ],
    )
    def test_bad_calls(self, changes: dict[str, Any], message: str) -> None:
        model, (call, _) = tiny_model("llama"), self.call()
        assert call["input_ids"].shape == (1, 19)
        with tritonpack.patch(model), pytest.raises(ValueError, match=message):
            model(**{**call, **changes})

    def test_labels_across_branches_are_refused(self) -> None:
        model, (call, _) = tiny_model("llama"), self.call()
        with tritonpack.patch(model), pytest.raises(ValueError, match=r"other branches.*shift_labels"):
            model(**call, labels=call["input_ids"])

    def test_no_cache_is_left(self) -> None:
        model, (call, _) = tiny_model("llama"), self.call()
        with tritonpack.patch(model):
            assert model(**call).past_key_values is None
            with pytest.raises(ValueError, match="Leave use_cache out"):
                model(**call, use_cache=True)

    def test_a_cache_is_refused(self) -> None:
        model, (call, _) = tiny_model("llama"), self.call()
        with tritonpack.patch(model):
            cache = model(torch.randint(3, VOCAB, (1, 4)), use_cache=True).past_key_values
            with pytest.raises(ValueError, match="tree_ends describe a batch of whole documents"):
                model(**call, past_key_values=cache)

    def test_one_score_a_row_is_refused(self) -> None:
        model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("llama", **COMMON))
        call, _ = self.call()
        with tritonpack.patch(model), pytest.raises(tritonpack.UnsupportedModelError, match="for several documents in"):
            model(**call)


class TestRefusals:
    def test_options_that_are_no_flags(self) -> None:
        with pytest.raises(ValueError, match="unpad must be True or False; got str 'no'"):
            tritonpack.patch(tiny_model("llama"), unpad="no")  # type: ignore[arg-type]

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @WAYS
    def test_attention_of_all_pairs(self, attention: Any, options: dict[str, bool]) -> None:
        with pytest.raises(ValueError, match=f"attention='{attention}' computes all pairs"):
            tritonpack.patch(tiny_model("llama"), attention=attention, **options)

    def test_a_head_that_calls_a_module_inside_of_the_one_that_removes_padding(self) -> None:
        with (
            tritonpack.patch(zoo.tiny_model("opt"), unpad=True) as handle,
            pytest.raises(tritonpack.UnsupportedModelError, match="OPTDecoder passes by the OPTModel around it"),
        ):
            handle.model(**padded(labels=False))

    def test_a_known_decoder_that_is_configured_as_an_encoder(self) -> None:
        ids = torch.randint(3, VOCAB, (1, 9)).expand(4, -1)
        with (
            tritonpack.patch(zoo.tiny_model("electra-encoder"), share_prefixes=True) as handle,
            pytest.raises(tritonpack.UnsupportedModelError, match="also sees the tokens after it"),
        ):
            handle.model(ids)

    @pytest.mark.parametrize(
        ("name", "options", "reason"),
        [
            ("bloom", {"unpad": True}, "takes a dense mask"),
            ("t5", {"unpad": True}, "an encoder with a decoder"),
            ("mamba2", {"share_prefixes": True}, "on each document by itself"),
            ("opt", {"share_prefixes": True}, "passes by the OPTModel around it"),
        ],
    )
    def test_models(self, name: str, options: dict[str, bool], reason: str) -> None:
        from tests.patches.pairs import tiny_pair_model

        model = tiny_pair_model(name) if name == "t5" else zoo.tiny_model(name)
        with pytest.raises(tritonpack.UnsupportedModelError, match=reason):
            tritonpack.patch(model, **options).prove()
