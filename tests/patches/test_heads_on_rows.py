"""Heads of causal models on the row that takes the place of a padded batch: patched and stock."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForTokenClassification, PreTrainedModel

import tritonpack
from tests.patches import zoo
from tests.patches.models import COMMON, VOCAB, tiny_model
from tests.patches.test_every_model import BUILT
from tests.patches.test_unpad import LIMIT, WAYS, padded, real, results
from tests.small_copies.comparison import apart, tolerance
from tritonpack.patches.compact import LaidBack

QUICK = ("bamba", "gemma3", "gemma3_text", "gpt2", "gpt_oss", "llama", "mamba2", "mixtral", "qwen3_next")
# Heads that run on the caller's batch: without `logits_to_keep`, with a loss of their own or of all logits, or that
# call a part of the base model.
ON_BATCHES = {
    "bamba", "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "cpmant", "gemma4_unified_assistant",
    "marian", "mbart", "mvp", "pegasus", "plbart", "prophetnet", "trocr", "whisper", "xlm", "xlnet", "xlstm",
}  # fmt: skip
NOT_IN_STOCK = {"musicgen", "musicgen_melody", "rwkv"}  # labels of codebooks; a backward pass that fails
FLOAT32 = tolerance(torch.float32)  # transformers' causal loss is in float32


def completions(*, left: bool = False) -> dict[str, Tensor]:
    """Rows of which only the last two tokens have labels."""
    batch = padded(left=left)
    real = batch["attention_mask"].bool()
    after = (batch["attention_mask"].flip(1).cumsum(1).flip(1) <= 2) & real
    return {**batch, "labels": batch["labels"].masked_fill(~after, -100)}


@contextmanager
def rows_of_head(model: PreTrainedModel) -> Iterator[list[int]]:
    """On how many tokens the head runs, call by call."""
    counts: list[int] = []
    head = model.get_output_embeddings()
    handle = head.register_forward_hook(lambda module, args, output: counts.append(args[0].shape[:-1].numel()))
    yield counts
    handle.remove()


def is_read_later(output: Any) -> bool:
    """Whether the logits of an output are laid back when they are read."""
    return "logits" in vars(output) and isinstance(vars(output)["logits"], LaidBack)


def equal_as_stock(
    model: PreTrainedModel, batch: dict[str, Tensor], options: dict[str, Any], limit: float = LIMIT, **more: Any
) -> Any:
    """Compare loss, gradients and logits with stock's. Returns the patched output."""
    want, gradients = results(model, batch, **more)
    with tritonpack.patch(model, **options):
        got, found = results(model, batch, **more)
        logits = got.logits[:]
    assert apart([want.loss.detach()], [got.loss.detach()]) < limit
    assert apart(gradients, found) < limit
    assert want.logits.shape == got.logits.shape
    kept = {"attention_mask": batch["attention_mask"][:, -want.logits.shape[1] :]}
    assert apart([real(want.logits, kept)], [real(logits + 0, kept)]) < limit
    return got


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in BUILT if n not in NOT_IN_STOCK],
)
def test_every_type_trains_as_stock(name: str) -> None:
    """The sweep tries labels with `share_prefixes`, too (tests/patches/test_sweep_padded.py)."""
    model, batch = zoo.tiny_model(name), completions()
    try:
        with tritonpack.patch(model, unpad=True), torch.no_grad():
            model(**batch)
    except tritonpack.UnsupportedModelError:
        pytest.skip("refused, as the table of docs/models.md says")
    with rows_of_head(model) as rows:
        got = equal_as_stock(model, batch, {"unpad": True}, limit=FLOAT32)
    assert is_read_later(got) == (name not in ON_BATCHES), rows
    if name not in ON_BATCHES:
        assert rows[1] == batch["attention_mask"].sum() < batch["input_ids"].numel()


class TestCalls:
    @WAYS
    @pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
    def test_head_runs_on_tokens_without_padding(self, left: bool, options: dict[str, bool]) -> None:
        model = tiny_model("llama")
        for batch in (padded(left=left), completions(left=left)):
            with rows_of_head(model) as rows:
                equal_as_stock(model, batch, options)
            before = int((batch["attention_mask"][:, 0] == 0).sum())  # a token of padding right before each document
            assert rows[1] == batch["attention_mask"].sum() + before < rows[0]

    @WAYS
    @pytest.mark.parametrize(
        "more", [{"num_items_in_batch": torch.tensor(7)}, {"num_items_in_batch": 7}, {"return_dict": True}]
    )
    def test_arguments_of_the_loss(self, more: dict[str, Any], options: dict[str, bool]) -> None:
        equal_as_stock(tiny_model("llama"), completions(), options, **more)

    @WAYS
    def test_shifted_labels(self, options: dict[str, bool]) -> None:
        batch = completions()
        shifted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        got = equal_as_stock(tiny_model("llama"), batch, options, shift_labels=shifted)
        assert is_read_later(got)

    @WAYS
    @pytest.mark.parametrize("keep", [4, 9, 40, torch.tensor([2, 5, 6])], ids=str)
    def test_logits_to_keep(self, keep: Any, options: dict[str, bool]) -> None:
        batch = padded(left=True)
        labels = batch["labels"][:, -keep:] if isinstance(keep, int) else batch["labels"][:, keep]
        equal_as_stock(tiny_model("llama"), {**batch, "labels": labels}, options, logits_to_keep=keep)

    @WAYS
    def test_labels_of_another_shape_fail_as_in_stock(self, options: dict[str, bool]) -> None:
        model, batch = tiny_model("llama"), padded()
        with tritonpack.patch(model, **options), pytest.raises(ValueError, match="batch_size"):
            model(**batch, logits_to_keep=3)

    @pytest.mark.parametrize("options", [{"unpad": True}, {"share_prefixes": True}], ids=["unpad", "share"])
    def test_no_label_at_all(self, options: dict[str, bool]) -> None:
        model, batch = tiny_model("llama"), padded()
        batch["labels"] = torch.full_like(batch["labels"], -100)
        with tritonpack.patch(model, **options):
            assert model(**batch).loss.isnan()
            loss = model(**batch, num_items_in_batch=5).loss
            loss.backward()
        assert loss == 0
        assert not any(p.grad.any() for p in model.parameters())

    @WAYS
    def test_two_losses_of_one_call(self, options: dict[str, bool]) -> None:
        """A loss of the logits beside the model's own, as for distillation."""
        gradients = []
        model, batch = tiny_model("llama"), completions()
        mask = batch["attention_mask"][..., None]
        for patched in (False, True):
            handle = tritonpack.patch(model, **options) if patched else None
            model.zero_grad()
            output = model(**batch)
            with torch.no_grad():
                assert (output.logits / 2).max() > 0  # read before, without gradients
            (output.loss + (torch.nn.functional.softmax(output.logits, -1).square() * mask).mean()).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
            if handle is not None:
                handle.unpatch()
        assert apart(*gradients) < LIMIT

    @WAYS
    def test_evaluation_gives_tensors(self, options: dict[str, bool]) -> None:
        model, batch = tiny_model("llama"), completions()
        with torch.no_grad(), rows_of_head(model) as rows:
            want = model(**batch)
            with tritonpack.patch(model, **options):
                got = model(**batch)
        assert rows[1] < rows[0]
        assert type(got.logits) is Tensor
        assert apart([want.loss, real(want.logits, batch)], [got.loss, real(got.logits, batch)]) < LIMIT

    @WAYS
    def test_tuples(self, options: dict[str, bool]) -> None:
        model, batch = tiny_model("llama"), completions()
        want = model(**batch, return_dict=False)
        with tritonpack.patch(model, **options):
            loss, logits = model(**batch, return_dict=False)
        assert apart([want[0].detach(), real(want[1], batch)], [loss.detach(), real(logits + 0, batch)]) < LIMIT

    @WAYS
    def test_no_tensor_of_all_logits_is_made(self, options: dict[str, bool]) -> None:
        model, batch = tiny_model("llama"), completions()
        limit = batch["input_ids"].numel() * VOCAB
        with tritonpack.patch(model, **options), _Largest() as largest:
            results(model, batch)
        assert largest.numel < limit
        with _Largest() as largest:
            results(model, batch)
        assert largest.numel >= limit

    def test_labels_on_padding_are_refused(self) -> None:
        model, batch = tiny_model("llama"), padded()
        batch["labels"] = batch["input_ids"].clone()
        with tritonpack.patch(model, unpad=True):
            with pytest.raises(ValueError, match=r"the label 0 in row 1 would be predicted at token 6, .* to -100"):
                model(**batch)
            model(**padded())  # goes on after an error

    @WAYS
    def test_a_label_on_the_first_padding(self, options: dict[str, bool]) -> None:
        """Such as a token for the end that the mask leaves out: the last token of the document predicts it."""
        batch = completions()
        ends = batch["attention_mask"].sum(1)
        batch["labels"][1, ends[1]], batch["labels"][4, ends[4]] = 7, 8
        equal_as_stock(tiny_model("llama"), batch, options)

    @pytest.mark.parametrize("head", [AutoModelForMaskedLM, AutoModelForTokenClassification])
    def test_labels_of_padding_itself_are_refused(self, head: Any) -> None:
        """Where each token predicts its own label."""
        torch.manual_seed(0)
        kind = "bert" if head is AutoModelForMaskedLM else "llama"
        settings = {"num_labels": VOCAB} if kind == "llama" else {}
        model = head.from_config(AutoConfig.for_model(kind, **COMMON, **settings)).double().eval()
        batch = padded()
        _, want = results(model, batch)
        with tritonpack.patch(model, unpad=True):
            _, got = results(model, batch)
            assert apart(want, got) < LIMIT
            with pytest.raises(ValueError, match="the label 0 in row 1 is predicted at token 6"):
                model(**{**batch, "labels": batch["input_ids"]})

    def test_losses_that_are_not_transformers_own(self) -> None:
        """The head runs as in stock, whatever the loss reads."""
        model, batch = tiny_model("llama"), completions()
        model.loss_function = lambda logits, labels, **_: logits.square().mean() + labels.clamp(min=0).sum()
        with rows_of_head(model) as rows:
            want = model(**batch).loss
            with tritonpack.patch(model, unpad=True):
                assert apart([want.detach()], [model(**batch).loss.detach()]) < 1
        assert rows[0] == rows[1]

    def test_a_loss_of_all_logits(self) -> None:
        """Bamba may add the square of the logits' normalizers, of all tokens."""
        model, batch = zoo.tiny_model("bamba"), completions()
        model.z_loss_coefficient = 0.1
        with tritonpack.patch(model, unpad=True):
            assert not is_read_later(model(**batch))

    def test_an_adapter_on_the_head(self) -> None:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(target_modules=["q_proj", "lm_head"], r=2, init_lora_weights=False)
        model, batch = peft.get_peft_model(tiny_model("llama"), config).double(), padded()
        want = results(model, batch)[1]
        with tritonpack.patch(model, unpad=True):
            assert apart(want, results(model, batch)[1]) < LIMIT


class TestLogitsWhenRead:
    def output(self) -> tuple[PreTrainedModel, Any, Tensor]:
        model, batch = tiny_model("llama"), completions()
        want = model(**batch).logits
        tritonpack.patch(model, unpad=True)
        return model, model(**batch), want

    def test_they_are_a_tensor(self) -> None:
        _, output, want = self.output()
        logits, mask = output.logits, completions()["attention_mask"][..., None]
        assert type(logits) is Tensor
        assert logits.requires_grad
        assert (logits.shape, logits.dtype, logits.device) == (want.shape, want.dtype, want.device)
        for read in (
            lambda x: x.float(),
            lambda x: x[..., :-1, :].contiguous(),
            lambda x: x.argmax(-1),
            lambda x: x / 2 + 1,
            lambda x: 3 - x**2,
            lambda x: torch.log_softmax(x, -1),
            lambda x: torch.cat([x, x]),
            lambda x: torch.stack(list(x)),
            lambda x: x.view(-1, VOCAB),
            lambda x: x @ torch.ones(VOCAB, 1, dtype=x.dtype),
            lambda x: torch.tensor(x.detach().numpy()),
            lambda x: torch.tensor(x.tolist()),
            lambda x: torch.from_numpy(np.asarray(x.detach())),
            lambda x: x.detach().masked_fill(mask == 0, 0),
            lambda x: x.clone().mul_(2),
            lambda x: abs(x) > 0.01,
            lambda x: x.to(torch.bfloat16),
            lambda x: torch.func.vmap(lambda row: row.sum(-1))(x),
        ):
            got = read(logits)
            assert type(got) is Tensor or got.dtype == torch.float32
            assert got.shape == read(want).shape
        torch.testing.assert_close(logits * mask, want * mask)
        assert "tensor(" in repr(output)
        buffer = io.BytesIO()
        torch.save(logits.detach(), buffer)
        buffer.seek(0)
        assert torch.equal(torch.load(buffer), logits.detach())

    def test_gradients_flow_through_every_reading(self) -> None:
        """Views, changes in place, functions and checkpoints of one's own, and float32."""

        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, logits: Tensor) -> Tensor:
                ctx.save_for_backward(logits)
                return logits**2

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
                return 2 * ctx.saved_tensors[0] * gradient

        def in_place(logits: Tensor) -> Tensor:
            logits[..., 0] = 0
            return logits.square()

        def in_place_of_a_view(logits: Tensor) -> Tensor:
            view = logits[:, 1:]
            view *= 2
            return logits.square()

        batch = completions()
        mask = batch["attention_mask"][..., None]
        for read in (
            Square.apply,
            in_place,
            in_place_of_a_view,
            lambda x: checkpoint(torch.square, x, use_reentrant=True),
            lambda x: checkpoint(torch.square, x, use_reentrant=False),
            lambda x: x.float() ** 2,
            lambda x: x[:].log_softmax(-1),
            lambda x: x.view(5, -1, 2).flip(-1).view(x.shape) * x,
        ):
            gradients = []
            for patched in (False, True):
                model = tiny_model("llama")
                if patched:
                    tritonpack.patch(model, share_prefixes=True)
                output = model(**batch)
                (output.loss + (read(output.logits) * mask).mean()).backward()
                gradients.append([p.grad for p in model.parameters()])
            assert apart(*gradients) < FLOAT32

    def test_they_are_laid_back_once(self) -> None:
        """Also if the first that reads them needs no gradients."""
        _, output, _ = self.output()
        with torch.no_grad():
            first = output.logits
        assert output["logits"] is output[1] is first
        (output.logits.square().sum() + output[1].mean()).backward()

    def test_they_outlive_the_patch(self) -> None:
        model, output, want = self.output()
        tritonpack.unpatch(model)
        mask = completions()["attention_mask"][..., None]
        assert apart([want * mask], [output.logits * mask]) < LIMIT

    def test_mixed_precision_of_accelerate_reads_nothing(self) -> None:
        model, batch = tiny_model("llama", dtype=torch.float32), completions()
        tritonpack.patch(model, unpad=True)
        prepared = pytest.importorskip("accelerate").utils.convert_outputs_to_fp32(model.forward)
        with torch.autocast("cpu", torch.bfloat16):
            output = prepared(**batch)
        assert is_read_later(output)
        assert output.logits.dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            want = model(**batch).logits[:].float()
        assert torch.equal(output.logits[:], want)


class _Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        self.numel = max([self.numel, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out
