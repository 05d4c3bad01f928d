"""Hooks of users, second derivatives and losses of one's own beside tiles: as without tiles, or refused by name."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from transformers import PreTrainedModel

import tritonpack
from tests.patches.models import tiny_model
from tests.patches.test_head_targets import completions
from tests.patches.test_tiled_loss import FLOAT32, equal_as_untiled, exact_loss
from tests.patches.test_unpad import LIMIT, padded, real
from tritonpack.patches.trial.comparison import apart

WAYS = pytest.mark.parametrize("options", [{}, {"unpad": True}, {"share_prefixes": True}], ids=lambda x: "".join(x))


class TestHooksOfParameters:
    """They run once, on the gradient that the parameter gets."""

    @pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
    @pytest.mark.parametrize("change", [lambda g: g.clamp(-1e-3, 1e-3), lambda g: g * 2], ids=["clamp", "double"])
    def test_changes(self, change: Callable[[Tensor], Tensor], tied: bool) -> None:
        model, seen = tiny_model("llama", tie_word_embeddings=tied), []
        model.loss_function = exact_loss
        for parameter in model.parameters():
            parameter.register_hook(change)
        model.lm_head.weight.register_hook(lambda g: seen.append(g.shape))
        equal_as_untiled(model, padded(), limit=LIMIT)
        assert len(seen) == 2  # without and with tiles

    def test_set_after_the_patch_and_during_autocast(self) -> None:
        gradients = []
        for rows in (False, 4):
            model = tiny_model("llama", dtype=torch.float32)
            tritonpack.patch(model, tiled_loss=rows)
            model.lm_head.weight.register_hook(lambda g: g * 2)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**padded()).loss
            loss.backward()
            gradients.append([model.lm_head.weight.grad])
        assert apart(*gradients) < 0.03

    def test_of_adapters(self) -> None:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(target_modules=["lm_head"], r=2, init_lora_weights=False)
        model = peft.get_peft_model(tiny_model("llama"), config).double().eval()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        equal_as_untiled(model, padded())

    def test_a_parameter_that_torch_functions_do_not_see_is_refused(self) -> None:
        """An autograd function of one's own gets the parameter itself."""

        class Product(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
                ctx.save_for_backward(x, weight)
                return x @ weight.T

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
                x, weight = ctx.saved_tensors
                return gradient @ weight, gradient.flatten(0, -2).T @ x.flatten(0, -2)

        class Own(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return Product.apply(x, self.weight)

        model = tiny_model("llama")
        model.lm_head.__class__ = Own
        equal_as_untiled(model, padded())
        model.lm_head.weight.register_hook(lambda g: g * 2)
        with tritonpack.patch(model, tiled_loss=4), pytest.raises(ValueError, match="has a hook on its gradient"):
            model(**padded())

    def test_logits_that_are_read_later(self) -> None:
        gradients = []
        for options in ({}, {"unpad": True}):
            model, batch = tiny_model("llama"), completions()
            model.lm_head.weight.register_hook(lambda g: g * 2)
            tritonpack.patch(model, **options)
            output = model(**batch)
            (output.loss + real(output.logits, batch).square().mean()).backward()
            gradients.append([p.grad for p in model.parameters()])
        assert apart(*gradients) < FLOAT32


class TestHooksOfModules:
    @pytest.mark.parametrize(
        "register", ["register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook"]
    )
    def test_backward_hooks_of_the_head_are_refused(self, register: str) -> None:
        """They would run once per tile. On the model and on its base they run once."""
        model, seen = tiny_model("llama"), []
        for module in (model, model.model.norm):
            getattr(module, register)(lambda *_: seen.append(1))
        batch = padded()
        tritonpack.patch(model, tiled_loss=4)
        model(**batch).loss.backward()
        count = len(seen)
        getattr(model.lm_head, register)(lambda *_: None)
        with pytest.raises(ValueError, match=r"lm_head of LlamaForCausalLM has a backward hook, .* once per tile"):
            model(**batch)
        with torch.no_grad():
            model(**batch)
        assert 1 <= count <= 2

    def test_backward_hooks_of_all_modules_are_refused(self) -> None:
        model = tiny_model("llama")
        handle = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
        try:
            with (
                tritonpack.patch(model, tiled_loss=4),
                pytest.raises(ValueError, match="a backward hook of all modules"),
            ):
                model(**padded())
        finally:
            handle.remove()

    @WAYS
    @pytest.mark.parametrize("later", [False, True], ids=["before", "after"])
    def test_forward_hooks_of_the_base_model(self, options: dict[str, bool], later: bool) -> None:
        """They see the states of all tokens and may change them, wherever the model computes the loss or logits."""
        batch, outputs, shapes = padded(), [], []

        def double(module: nn.Module, args: Any, output: Any) -> Any:
            shapes.append(output.last_hidden_state.shape[:2])
            output = copy.copy(output)
            output["last_hidden_state"] = output.last_hidden_state * 2
            return output

        def with_hook(**more: Any) -> PreTrainedModel:
            model = tiny_model("llama")
            if not later:
                model.model.register_forward_hook(double)
            tritonpack.patch(model, **more)
            if later:
                model.model.register_forward_hook(double)
            return model

        for more in ({}, options, {**options, "tiled_loss": 4}):
            model = with_hook(**more)
            loss = model(**batch).loss
            loss.backward()
            with torch.no_grad():
                logits = real(model(**batch).logits + 0, batch)
            outputs.append([loss.detach(), logits, *(p.grad for p in model.parameters())])
            assert len(model.model._forward_hooks) == 1
        for got in outputs[1:]:
            assert apart(outputs[0], got) < FLOAT32
        assert set(shapes) == {batch["input_ids"].shape}

    def test_a_hook_of_the_base_model_that_fails(self) -> None:
        model = tiny_model("llama")

        def fail(*_: Any) -> None:
            raise KeyError("of a user")

        with tritonpack.patch(model, tiled_loss=4):
            handle = model.model.register_forward_hook(fail)
            with pytest.raises(KeyError, match="of a user"):
                model(**padded())
            handle.remove()
            assert not model.model._forward_hooks
            model(**padded())


@pytest.mark.parametrize("options", [{"tiled_loss": 4}, {"unpad": True}], ids=["tiled", "later"])
def test_second_derivatives_are_refused(options: dict[str, Any]) -> None:
    model, batch = tiny_model("llama"), completions()
    tritonpack.patch(model, **options)
    output = model(**batch)
    target = output.loss if "tiled_loss" in options else output.logits.sum()
    (gradient,) = torch.autograd.grad(target, model.lm_head.weight, create_graph=True)
    assert gradient.requires_grad
    with pytest.raises(RuntimeError, match=r"differentiate twice.* Patch the model without"):
        gradient.square().sum().backward()


def own_loss(total: Callable[..., Tensor]) -> Any:
    """A loss of `total(logits, targets, items)`, with the arguments of transformers' causal loss."""

    def loss(
        logits: Tensor, labels: Any, vocab_size: int, num_items_in_batch: Any = None, shift_labels: Any = None, **_: Any
    ) -> Tensor:
        targets = pad(labels[:, 1:], (0, 1), value=-100) if shift_labels is None else shift_labels
        items = (targets != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return total(logits.flatten(0, -2), targets.flatten(), items)

    return loss


class TestLosses:
    @pytest.mark.parametrize(
        "total",
        [
            lambda x, targets, items: cross_entropy(x, targets),
            lambda x, targets, items: cross_entropy(x, targets) / items,
            lambda x, targets, items: (
                cross_entropy(x, targets, reduction="sum") / items + 1e-2 * x.logsumexp(-1).mean()
            ),
            lambda x, targets, items: cross_entropy(x, targets, reduction="sum") / items**0.5,
            lambda x, targets, items: (
                cross_entropy(x, targets, reduction="sum") / items + 1e-2 * x.square().sum() / items
            ),
        ],
        ids=["mean", "mean over items", "mean of all", "root", "tokens without targets"],
    )
    @pytest.mark.parametrize("rows", [1, 1000])
    def test_losses_that_are_no_sums_are_refused(self, total: Callable[..., Tensor], rows: int) -> None:
        model = tiny_model("llama")
        model.loss_function = own_loss(total)
        for batch in (padded(), completions()):
            with (
                tritonpack.patch(model, tiled_loss=rows),
                pytest.raises(
                    ValueError, match=r"loss function loss of LlamaForCausalLM isn't a sum over .* num_items_in_batch"
                ),
            ):
                model(**batch)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_sums_in_low_precision(self, dtype: torch.dtype) -> None:
        """Also with labels smoothed over a large vocabulary."""
        model = tiny_model("llama", dtype=dtype, vocab_size=5000)
        model.loss_function = own_loss(
            lambda x, targets, items: cross_entropy(x, targets, reduction="sum", label_smoothing=0.1) / items
        )
        with tritonpack.patch(model, tiled_loss=4):
            model(**padded()).loss.backward()

    def test_the_check_runs_once(self) -> None:
        """In the first call with tokens, on two tokens of its own."""
        model, calls = tiny_model("llama"), []

        def total(x: Tensor, targets: Tensor, items: Any) -> Tensor:
            calls.append(len(x))
            return cross_entropy(x, targets, reduction="sum") / items

        model.loss_function = own_loss(total)
        with tritonpack.patch(model, tiled_loss=20):
            model(**padded())
            assert sorted(set(calls)) == [1, 2, 5, 20]
            calls.clear()
            model(**padded())
            assert calls == [20, 20, 5]
