"""The head and the loss on tiles of rows: loss and gradients are those of all logits, and no tensor holds these."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModel, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

import tritonpack
from tests.patches import zoo
from tests.patches.models import VOCAB, Graphs, tiny_model
from tests.patches.test_every_model import BUILT, state
from tests.patches.test_head_targets import completions, rows_of_head
from tests.patches.test_unpad import LIMIT, padded, real, results
from tritonpack.patches.tiles import TILE_ROWS
from tritonpack.patches.trial.comparison import apart, tolerance

ROOT = Path(__file__).parents[2]
QUICK = ("gemma2", "gpt2", "gpt_oss", "llama", "qwen3_next")
FLOAT32 = tolerance(torch.float32)  # transformers' causal loss is in float32
# Heads without `logits_to_keep`, with a loss of their own or of all logits, that call a part of the base model, or
# that give each document a row of its own.
REFUSED = {
    "bamba", "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "blt", "cpmant", "deepseek_v4",
    "gemma4_unified_assistant", "git", "marian", "mbart", "minimax_m3_vl_text", "musicgen", "musicgen_melody", "mvp",
    "opt", "pegasus", "plbart", "prophetnet", "reformer", "trocr", "whisper", "xlm", "xlnet", "xlstm",
}  # fmt: skip
SHARED = pytest.param({"share_prefixes": True}, marks=pytest.mark.slow)
WAYS = pytest.mark.parametrize("options", [{}, {"unpad": True}, SHARED], ids=["", "unpad", "share_prefixes"])


def packed(*lengths: int) -> dict[str, Tensor]:
    """One row of documents, the first tokens without labels."""
    ids = torch.randint(3, VOCAB, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    return {"input_ids": ids, "position_ids": places, "labels": ids.masked_fill(places == 0, -100)}


def equal_as_untiled(
    model: PreTrainedModel, batch: dict[str, Any], rows: int = 3, limit: float = FLOAT32, **options: Any
) -> Any:
    """Compare loss and gradients of the patched model with and without tiles. Returns the tiled output."""
    more = options.pop("more", {})
    with tritonpack.patch(model, **options):
        want, gradients = results(model, batch, **more)
    with tritonpack.patch(model, tiled_loss=rows, **options):
        got, found = results(model, batch, **more)
    assert got.logits is None
    assert apart([want.loss.detach()], [got.loss.detach()]) < limit
    assert apart(gradients, found) < limit
    assert got.loss.dtype == want.loss.dtype
    return got


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in BUILT])
@pytest.mark.swept(every=6)
def test_every_type_is_exact_or_refused(name: str) -> None:
    model = zoo.tiny_model(name)
    if name in REFUSED:
        with pytest.raises(tritonpack.UnsupportedModelError, match=r"tiled_loss|document per row|Train it on one"):
            tritonpack.patch(model, tiled_loss=True)
        return
    before = state(model)
    if name != "rwkv":  # its backward pass fails in stock
        equal_as_untiled(model, padded())
    assert state(model) == before


def test_guide_counts_the_types() -> None:
    said = f"Of {len(BUILT)} causal model types, {len(BUILT) - len(REFUSED)} are tiled and {len(REFUSED)} refused."
    assert said in " ".join((ROOT / "docs" / "long-context.md").read_text(encoding="utf-8").split())


def exact_loss(
    logits: Tensor, labels: Any, vocab_size: int, num_items_in_batch: Any = None, shift_labels: Any = None
) -> Tensor:
    """transformers' causal loss, without its cast to float32."""
    targets = pad(labels[:, 1:], (0, 1), value=-100) if shift_labels is None else shift_labels
    total = cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
    return total / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)


class TestCalls:
    @WAYS
    @pytest.mark.parametrize("rows", [1, 7, 1000])
    def test_tiles_of_any_size(self, rows: int, options: dict[str, bool]) -> None:
        equal_as_untiled(tiny_model("llama"), padded(), rows, **options)

    @WAYS
    @pytest.mark.parametrize("items", [None, 7, torch.tensor(7)], ids=["mean", "int", "tensor"])
    def test_number_of_targets(self, items: Any, options: dict[str, bool]) -> None:
        """In completions some tiles have no target."""
        more = {} if items is None else {"num_items_in_batch": items}
        equal_as_untiled(tiny_model("llama"), completions(), 2, more=more, **options)

    @WAYS
    def test_shifted_labels(self, options: dict[str, bool]) -> None:
        batch = completions()
        shifted = pad(batch["labels"][:, 1:], (0, 1), value=-100)
        equal_as_untiled(tiny_model("llama"), batch, more={"shift_labels": shifted}, **options)

    @WAYS
    @pytest.mark.parametrize("keep", [0, 4, 9, torch.tensor([2, 5, 6])], ids=str)
    def test_logits_to_keep(self, keep: Any, options: dict[str, bool]) -> None:
        batch = padded(left=True)
        labels = batch["labels"][:, -keep:] if isinstance(keep, int) else batch["labels"][:, keep]
        equal_as_untiled(tiny_model("llama"), {**batch, "labels": labels}, more={"logits_to_keep": keep}, **options)

    @WAYS
    def test_another_label_that_is_ignored(self, options: dict[str, bool]) -> None:
        batch = padded()
        batch["labels"] = batch["labels"].masked_fill(batch["labels"] == -100, 9)
        equal_as_untiled(tiny_model("llama"), batch, more={"ignore_index": 9}, **options)

    @WAYS
    def test_no_label_at_all(self, options: dict[str, bool]) -> None:
        """As without tiles: the mean of nothing is NaN, its gradients are zero."""
        model, batch = tiny_model("llama"), padded()
        batch["labels"] = torch.full_like(batch["labels"], -100)
        with tritonpack.patch(model, tiled_loss=4, **options):
            for more in ({}, {"num_items_in_batch": 5}):
                got, found = results(model, batch, **more)
                assert got.loss == 0 if more else got.loss.isnan()
                assert not any(x.any() for x in found if x is not None)

    def test_packed_rows(self) -> None:
        equal_as_untiled(tiny_model("mistral"), packed(5, 1, 11, 3))
        equal_as_untiled(tiny_model("llama"), packed(5, 1, 11, 3), attention="sdpa")

    def test_other_outputs_and_losses_stay(self) -> None:
        """Losses of routers are added once; hidden states are those of all tokens."""
        model = tiny_model("mixtral")
        more = {"output_router_logits": True, "output_hidden_states": True}
        got = equal_as_untiled(model, padded(), more=more)
        want = model(**padded(), **more)
        assert apart([want.aux_loss.detach()], [got.aux_loss.detach()]) < LIMIT
        assert want.aux_loss > 0
        assert [x.shape for x in got.hidden_states] == [x.shape for x in want.hidden_states]

    def test_as_a_tuple(self) -> None:
        model = tiny_model("llama")
        want = model(**padded()).loss
        tritonpack.patch(model, tiled_loss=True)
        output = model(**padded(), return_dict=False, use_cache=False)
        assert isinstance(output, tuple)
        assert apart([want.detach()], [output[0].detach()]) < FLOAT32
        assert len(output) == 1

    def test_without_labels_logits_are_made_in_evaluation_and_refused_in_training(self) -> None:
        model, batch = tiny_model("llama"), padded(labels=False)
        want = model(**batch).logits
        with tritonpack.patch(model, tiled_loss=True):
            assert apart([real(want, batch)], [real(model(**batch).logits, batch)]) < LIMIT
            model.train()
            with torch.no_grad():
                assert model(**batch).logits.shape == want.shape
            with pytest.raises(ValueError, match=r"label_smoothing_factor\s+and compute_loss_func do, patch the model"):
                model(**batch)
            assert model.model(**batch).last_hidden_state.shape[:2] == want.shape[:2]  # the base alone

    @WAYS
    def test_evaluation_with_labels(self, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
        """No gradients are computed, and logits if they are read."""
        model = tiny_model("llama")
        monkeypatch.delattr(torch.autograd, "grad")
        with torch.no_grad(), rows_of_head(model) as rows:
            want = model(**padded())
            tritonpack.patch(model, tiled_loss=4, **options)
            output = model(**padded())
            assert max(rows[1:]) == 4
            assert apart([real(want.logits, padded())], [real(output.logits + 0, padded())]) < LIMIT
            assert max(rows[1:]) == 45
        assert apart([want.loss], [output.loss]) < FLOAT32
        assert not output.loss.requires_grad

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"labels": torch.ones(5, 4).long()}, r"labels have shape \(5, 4\), and logits .* \(5, 9\)"),
            ({"labels": torch.ones(5, 9)}, r"labels must be int64 numbers of tokens, .*; got \(5, 9\) float32"),
            ({"labels": torch.ones(5).long()}, r"\(batch, length\); got \(5,\) int64"),
            ({"labels": torch.full((5, 9), VOCAB)}, "out of bounds"),
        ],
        ids=["shape", "dtype", "one", "id"],
    )
    def test_wrong_labels(self, change: dict[str, Any], message: str) -> None:
        model = tiny_model("llama")
        with tritonpack.patch(model, tiled_loss=4):
            with pytest.raises((ValueError, IndexError), match=message):
                model(**{**padded(), **change})
            model(**padded())  # goes on after an error

    @pytest.mark.parametrize("value", [0, -3, 2.5, "yes", None])
    def test_wrong_option(self, value: Any) -> None:
        with pytest.raises(ValueError, match=r"tiled_loss must be True, False, or the rows of a tile, 1 or more; got"):
            tritonpack.patch(tiny_model("llama"), tiled_loss=value)

    def test_report(self) -> None:
        model = tiny_model("llama")
        handle = tritonpack.patch(model, tiled_loss=True)
        assert handle.report.tile_rows == TILE_ROWS
        assert f"head and loss: in tiles of {TILE_ROWS:,} rows" in str(handle.report)
        assert tritonpack.patch(model).report.tile_rows == 0
        assert model(**padded()).logits is not None  # the later patch is in force


def test_twice_patched_and_copied() -> None:
    model = tiny_model("llama")
    before = state(model)
    first, second = tritonpack.patch(model, tiled_loss=4), tritonpack.patch(model, tiled_loss=5)
    twin = copy.deepcopy(model)
    for one in (model, twin):
        assert one(**padded()).logits is None
    first.unpatch()
    assert model(**padded()).logits is None
    second.unpatch()
    assert state(model) == before
    assert "_loss_function" not in vars(model)
    twin.loss_function(torch.zeros(1, 2, VOCAB), torch.ones(1, 2).long(), VOCAB)


class TestHeads:
    """What families do between head and loss; each is seen to change the loss."""

    @pytest.mark.parametrize(
        ("family", "settings", "neutral"),
        [
            ("gemma2", {"final_logit_softcapping": 0.05}, {"final_logit_softcapping": None}),
            ("gemma3_text", {"final_logit_softcapping": 0.05}, {"final_logit_softcapping": None}),
            ("cohere", {"logit_scale": 0.5}, {"logit_scale": 1.0}),
            ("granite", {"logits_scaling": 3.0}, {"logits_scaling": 1.0}),
        ],
    )
    def test_scales_and_softcaps(self, family: str, settings: dict[str, Any], neutral: dict[str, Any]) -> None:
        model = tiny_model(family, attention="eager", **settings)
        output = equal_as_untiled(model, padded())
        with torch.no_grad():
            other = tiny_model(family, attention="eager", **neutral)(**padded()).loss
        assert abs(other - output.loss) > 1e-5

    def test_bias(self) -> None:
        model = tiny_model("phi")
        with torch.no_grad():
            model.lm_head.bias.normal_()
        equal_as_untiled(model, padded())
        assert model.lm_head.bias.grad.abs().max() > 0

    @pytest.mark.parametrize("tied", [False, True])
    def test_tied_embeddings(self, tied: bool) -> None:
        model = tiny_model("llama", tie_word_embeddings=tied)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        equal_as_untiled(model, padded())

    @pytest.mark.parametrize("frozen", ["head", "base"])
    def test_frozen_parts(self, frozen: str) -> None:
        model = tiny_model("llama")
        (model.lm_head if frozen == "head" else model.model).requires_grad_(False)
        equal_as_untiled(model, padded())

    @pytest.mark.parametrize("dropout", [0.0, 0.5])
    def test_lora_on_the_head(self, dropout: float) -> None:
        """The module is called, not its weight. In training dropout draws other numbers in tiles."""
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(
            target_modules=["q_proj", "lm_head"], r=2, init_lora_weights=False, lora_dropout=dropout
        )
        model = peft.get_peft_model(tiny_model("llama"), config).double().eval()
        assert sum("lm_head" in name for name, p in model.named_parameters() if p.requires_grad) == 2
        equal_as_untiled(model, padded())
        with torch.no_grad(), tritonpack.patch(model, tiled_loss=4):
            assert model(**padded()).logits is None
        if dropout:
            model.train()
            tritonpack.patch(model, tiled_loss=4)
            model(**padded()).loss.backward()

    def test_hooks_of_the_head_run(self) -> None:
        model, seen = tiny_model("llama"), []
        model.lm_head.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[1]))
        with tritonpack.patch(model, tiled_loss=20):
            model(**padded())
        assert seen == [1, 20, 20, 5]  # one token whose logits nobody reads, and the tiles

    def test_a_tensor_from_elsewhere_is_refused(self) -> None:
        """Its gradient would be lost."""
        model, scale = tiny_model("llama"), nn.Parameter(torch.ones(VOCAB, dtype=torch.float64))
        model.lm_head.register_forward_hook(lambda module, args, output: output * scale)
        with tritonpack.patch(model, tiled_loss=4), pytest.raises(ValueError, match=r"\(64,\) that isn't a parameter"):
            model(**padded())

    def test_base_models_and_wrong_models_are_refused(self) -> None:
        base = AutoModel.from_config(tiny_model("llama").config)
        with pytest.raises(ValueError, match="LlamaModel has no head and computes no loss"):
            tritonpack.patch(base, tiled_loss=True)
        with pytest.raises(ValueError, match=r"OPTForCausalLM can't be computed in tiles: its forward reaches into"):
            tritonpack.patch(zoo.tiny_model("opt"), tiled_loss=True)


class TestLosses:
    def test_a_loss_of_ones_own(self) -> None:
        """A sum over targets, divided by the number that it is given."""

        def with_z(
            logits: Tensor, labels: Any, vocab_size: int, num_items_in_batch: Any = None, shift_labels: Any = None
        ) -> Tensor:
            targets = pad(labels[:, 1:], (0, 1), value=-100) if shift_labels is None else shift_labels
            z = (logits.logsumexp(-1).square() * (targets != -100)).sum()
            items = (targets != -100).sum() if num_items_in_batch is None else num_items_in_batch
            return exact_loss(logits, labels, vocab_size, items, targets) + z / items

        model = tiny_model("llama")
        model.loss_function = with_z
        equal_as_untiled(model, padded(), limit=LIMIT)
        assert vars(model)["_loss_function"] is with_z

    def test_a_loss_that_is_an_object(self) -> None:
        """Its attributes stay its own."""

        class Loss:
            rows = path = None

            def __init__(self) -> None:
                self.rows, self.path, self.own = 1, "nowhere", None

            def __call__(self, logits: Any, labels: Any, vocab_size: Any, num_items_in_batch=None, shift_labels=None):
                return exact_loss(logits, labels, vocab_size, num_items_in_batch, shift_labels)

        model = tiny_model("llama")
        model.loss_function = Loss()
        equal_as_untiled(model, padded(), limit=LIMIT)

    def test_a_loss_without_targets_is_refused(self) -> None:
        model = tiny_model("llama")
        model.loss_function = lambda logits, labels, **_: logits.mean()
        with pytest.raises(
            ValueError, match=r"loss function <lambda> doesn't take shift_labels and num_items_in_batch"
        ):
            tritonpack.patch(model, tiled_loss=True)

    def test_a_loss_that_is_set_later_is_refused(self) -> None:
        model = tiny_model("llama")
        with tritonpack.patch(model, tiled_loss=4):
            model.loss_function = ForCausalLMLoss
            with pytest.raises(ValueError, match=r"loss function of LlamaForCausalLM was replaced since"):
                model(**padded())
        assert vars(model)["_loss_function"] is ForCausalLMLoss

    def test_a_forward_that_is_replaced_is_refused(self) -> None:
        model = tiny_model("llama")
        tritonpack.patch(model, tiled_loss=4)
        model.forward = type(model).forward.__get__(model)
        with pytest.raises(ValueError, match="forward of LlamaForCausalLM was replaced since"):
            model(**padded())


def losses_and_gradients(model: PreTrainedModel, tiled_loss: int, **more: Any) -> dict[str, Tensor]:
    with tritonpack.patch(model, tiled_loss=tiled_loss or False):
        model.zero_grad()
        loss = model(**packed(23, 1, 40), **more).loss
        loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_errors_are_at_most_twice_those_of_all_logits(dtype: torch.dtype, autocast: bool) -> None:
    """Against a model in float64 with a loss in float64. Tiles of one row are the worst case of their sums."""
    if autocast and dtype != torch.float32:
        pytest.skip("weights are in float32")
    settings = {"hidden_size": 64, "head_dim": 32}
    exact = tiny_model("llama", **settings)
    weights = tiny_model("llama", **settings).to(dtype)
    exact.load_state_dict(weights.double().state_dict())
    exact.loss_function = exact_loss
    want = losses_and_gradients(exact, 0)
    model = tiny_model("llama", **settings).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain, tiled = (losses_and_gradients(model, rows) for rows in (0, 1))
    eps = max(torch.finfo(x).eps for x in (torch.bfloat16 if autocast else dtype, torch.float32))  # as the loss is
    for name, expected in want.items():
        size = expected.abs().max()
        errors = [(x[name].double() - expected).abs().max() for x in (plain, tiled)]
        assert tiled[name].dtype == plain[name].dtype
        assert errors[1] <= 2 * errors[0] + 4 * eps * size, name


def test_gradients_of_16_bits_add_up_in_float32() -> None:
    """512 tiles with the same gradient: a sum in bfloat16 stops growing after 256 of them."""
    head = nn.Linear(1, 1, bias=False).bfloat16()
    tiles = tritonpack.patches.tiles.Tiles(
        lambda states, _: head(states).float().sum(), torch.zeros(512), torch.tensor(True), 1, "a test"
    )
    total = tritonpack.patches.tiles.tiled_sum(tiles, torch.ones(512, 1).bfloat16(), [head.weight])
    (total / 512).backward()
    assert head.weight.grad == 1


def test_gradient_checkpointing() -> None:
    model = tiny_model("llama").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    equal_as_untiled(model, padded())


class Largest(TorchDispatchMode):
    """The largest tensor that is made, apart from weights and gradients of weights, also transposed or flat."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        weights = [p.shape for p in model.parameters() if p.ndim == 2]
        self.weights = {shape for m, n in weights for shape in ((m, n), (n, m), (m * n,))}
        self.numel, self.shape = 0, torch.Size()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and tuple(x.shape) not in self.weights and x.numel() > self.numel:
                self.numel, self.shape = x.numel(), x.shape
        return out


def largest(model: PreTrainedModel, call: Callable[[], Any]) -> int:
    with Largest(model) as seen:
        call()
    return seen.numel


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=["float32", "bfloat16"]
)
@WAYS
def test_no_tensor_is_larger_than_a_tile(dtype: torch.dtype, options: dict[str, bool]) -> None:
    """In a step of training and in evaluation. 40 tokens, 1,009 words: all logits would be 40,360 numbers."""
    model = tiny_model("llama", dtype=dtype, vocab_size=1009)
    batch = {"input_ids": packed(40)["input_ids"].view(2, 20), "labels": packed(40)["labels"].view(2, 20)}
    batch["attention_mask"] = torch.ones_like(batch["labels"])
    batch["attention_mask"][1, 17:] = 0
    batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)

    def step() -> None:
        model(**batch, use_cache=False).loss.backward()

    with tritonpack.patch(model, **options):
        assert largest(model, step) >= 35 * 1009
    with tritonpack.patch(model, tiled_loss=5, **options):
        assert largest(model, step) == 5 * 1009
        with torch.no_grad():
            assert largest(model, lambda: model(**batch)) == 5 * 1009


def test_logits_stay_where_they_are() -> None:
    """Activations may go to host memory, as docs/long-context.md shows; logits are needed at once."""
    model, moved = tiny_model("llama", vocab_size=1009), []

    def pack(x: Tensor) -> Tensor:
        moved.append(x.shape)
        return x

    with tritonpack.patch(model, tiled_loss=5), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(**packed(20)).loss.backward()
    assert moved
    assert not [shape for shape in moved if 1009 in shape and 32 not in shape]  # but for the head's weights


@pytest.mark.slow
def test_compiled() -> None:
    """Graphs end at the loss, which runs tile by tile, and later batches need no others."""
    model = tiny_model("llama", num_hidden_layers=1).train()
    batches = [packed(5, 1, 11), packed(9, 2), packed(3, 7, 20)]
    wants = []
    for batch in batches:
        with tritonpack.patch(model):
            wants.append(results(model, batch))
    with tritonpack.patch(model, tiled_loss=4):
        graphs = Graphs()
        compiled = torch.compile(model, backend=graphs, dynamic=True)
        for (want, gradients), batch in zip(wants, batches, strict=True):
            model.zero_grad()
            got = compiled(**batch)
            got.loss.backward()
            assert got.logits is None
            assert apart([want.loss.detach()], [got.loss.detach()]) < FLOAT32
            assert apart(gradients, [p.grad for p in model.parameters()]) < FLOAT32
        assert graphs.count <= 4
