"""Dense MLPs on tiles of rows: results and gradients are those of all rows at once, and no intermediate is larger."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import tritonpack
from tests.patches import zoo
from tests.patches.models import tiny_model
from tests.patches.test_every_model import BUILT, build, state
from tests.patches.test_tiled_loss import Largest, packed
from tests.patches.test_unpad import LIMIT, padded, results
from tritonpack.patches.tile_recompute import RowTiles, map_tiles
from tritonpack.patches.trial.comparison import apart

ROOT = Path(__file__).parents[2]
QUICK = ("gpt2", "llama", "mixtral", "opt")
# Models without a dense MLP in their layers that is wider than the states (but experts, recurrences, or linear modules
# of the layer itself), and those that give each document a row of its own.
REFUSED = {
    "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small",
    "bloom", "blt", "camembert", "cpmant", "data2vec-text", "dbrx", "deepseek_v4", "electra", "ernie", "falcon_mamba",
    "flex_olmo", "gemma4_unified_assistant", "git", "gpt_oss", "granitemoe", "inkling2_loop_text", "inkling2_text",
    "jetmoe", "kolibri1", "lara_mini", "mamba", "mamba2", "marian", "mbart", "megatron-bert", "minimax", "minimax_m2",
    "minimax_m3_vl_text", "mixtral", "moshi", "mpt", "musicgen", "musicgen_melody", "mvp", "olmoe", "opt", "pegasus",
    "phimoe", "plbart", "prophetnet", "qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next",
    "qwen4_exp", "qwen4_exp_text", "recurrent_gemma", "reformer", "rembert", "roberta", "roberta-prelayernorm",
    "roc_bert", "roformer", "rwkv", "solar_open", "trocr", "whisper", "xglm", "xlm", "xlm-roberta", "xlm-roberta-xl",
    "xlstm", "xmod", "zamba2", "zaya",
}  # fmt: skip
SLOW = pytest.mark.slow
SHARED = pytest.param({"share_prefixes": True}, marks=SLOW)


def equal_as_untiled(model: PreTrainedModel, batch: dict[str, Any], rows: int = 3, **options: Any) -> Any:
    """Compare loss and gradients of the patched model with and without tiles. Returns the report."""
    limit = options.pop("limit", LIMIT)
    with tritonpack.patch(model, **options):
        want, gradients = results(model, batch)
    with tritonpack.patch(model, tiled_mlp=rows, **options) as handle:
        got, found = results(model, batch)
    assert apart([want.loss.detach()], [got.loss.detach()]) < limit
    assert apart(gradients, found) < limit
    assert [x is None for x in gradients] == [x is None for x in found]
    return handle.report


def test_an_mlp_that_computes_in_float32_in_a_float64_model() -> None:
    """As Beam's does: another number of rows may give other last bits of float32."""
    model: Any = tiny_model("llama", dtype=torch.float64)
    for layer in model.model.layers:
        layer.mlp.act_fn.register_forward_hook(lambda m, args, out: out * (1 + 1e-7 * out.shape[-2]))
    with tritonpack.patch(model, tiled_mlp=8), torch.no_grad():
        model(**packed(9, 4))


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=SLOW) for n in BUILT])
@pytest.mark.swept(every=6)
def test_every_type_is_exact_or_refused(name: str) -> None:
    model = build(name)
    if name in REFUSED:
        with pytest.raises(tritonpack.UnsupportedModelError, match=r"tiled_mlp|document per row|Train it on one"):
            tritonpack.patch(model, tiled_mlp=True)
        return
    before = state(model)
    equal_as_untiled(model, padded())
    assert state(model) == before


def test_guide_counts_the_types() -> None:
    exact = len(BUILT) - len(REFUSED)
    said = (
        f"Of {len(BUILT)} causal model types, in the small sizes of the tests, {exact} have dense MLPs that run in "
        f"tiles and are exact; the other {len(REFUSED)} are refused"
    )
    assert said in " ".join((ROOT / "docs" / "long-context.md").read_text(encoding="utf-8").split())


class TestWhichModules:
    def test_report(self) -> None:
        model = tiny_model("llama")
        with tritonpack.patch(model, tiled_mlp=True) as handle:
            assert handle.report.mlps == tuple(f"model.layers.{i}.mlp" for i in range(2))
            assert handle.report.mlp_rows == 1024
            assert "2 dense MLPs: in tiles of 1,024 rows" in str(handle.report)
        with tritonpack.patch(model) as handle:
            assert (handle.report.mlps, handle.report.mlp_rows) == ((), 0)

    def test_experts_stay(self) -> None:
        with tritonpack.patch(zoo.tiny_model("deepseek_v3"), tiled_mlp=True) as handle:
            assert {name.rpartition(".")[2] for name in handle.report.mlps} <= {"shared_expert", "mlp"}
            assert all(name.endswith("mlp.experts") for name in handle.report.experts)
            assert "not in tiles: model.layers." in str(handle.report)

    def test_model_of_experts_alone(self) -> None:
        with pytest.raises(ValueError, match=r"MixtralForCausalLM has no MLP .* its experts \(model.layers.0.mlp"):
            tritonpack.patch(zoo.tiny_model("mixtral"), tiled_mlp=True)

    @pytest.mark.parametrize("given", [0, -1, 1.5, "all", None])
    def test_wrong_option(self, given: Any) -> None:
        with pytest.raises(ValueError, match="tiled_mlp must be True, False, or the rows of a tile"):
            tritonpack.patch(tiny_model("llama"), tiled_mlp=given)

    @SLOW
    def test_adapters(self) -> None:
        """Adapters of attention aren't MLPs; those of an MLP train in its tiles."""
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2, init_lora_weights=False)
        model = peft.get_peft_model(tiny_model("llama"), config).double().eval()
        report = equal_as_untiled(model, padded())
        assert [name.rpartition(".")[2] for name in report.mlps] == ["mlp", "mlp"]

    @SLOW
    def test_mlp_that_mixes_tokens_is_refused(self) -> None:
        model = tiny_model("llama")
        model.model.layers[1].mlp = MixingMlp(32)
        model.double()
        with (
            tritonpack.patch(model, tiled_mlp=3),
            pytest.raises(ValueError, match=r"layers.1.mlp \(MixingMlp\) .* depend on other rows or on its place"),
        ):
            model(**packed(9))

    def test_mlp_with_more_arguments_is_refused(self) -> None:
        model = tiny_model("llama")
        with (
            tritonpack.patch(model, tiled_mlp=3),
            pytest.raises(ValueError, match=r"2 positional and 0 named arguments, .* takes one tensor"),
        ):
            model.model.layers[0].mlp(torch.zeros(1, 4, 32), torch.zeros(()))


class MixingMlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x - x.mean(-2, keepdim=True)).relu())


class TestCalls:
    @pytest.mark.parametrize("options", [{}, {"unpad": True}, {"tiled_loss": 4}, SHARED], ids=str)
    @pytest.mark.parametrize("rows", [7, pytest.param(1, marks=SLOW), pytest.param(1000, marks=SLOW)])
    def test_tiles_of_any_size(self, rows: int, options: dict[str, Any]) -> None:
        limit = 1e-6 if options.get("tiled_loss") else LIMIT
        equal_as_untiled(tiny_model("llama"), padded(), rows, limit=limit, **options)

    @pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=SLOW)])
    def test_gradient_checkpointing(self, reentrant: bool) -> None:
        model = tiny_model("llama").train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        equal_as_untiled(model, packed(5, 1, 11))

    @pytest.mark.parametrize(("layers", "runs"), [(True, 2), (False, 2)], ids=["checkpointing", ""])
    def test_each_tile_runs_twice(self, layers: bool, runs: int) -> None:
        model = tiny_model("llama").train()
        if layers:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        calls: list[torch.Size] = []
        model.model.layers[0].mlp.down_proj.register_forward_hook(lambda _, x, y: calls.append(y.shape))
        with tritonpack.patch(model, tiled_mlp=3):
            with torch.no_grad():
                model(**packed(9))  # the first call tries each MLP
            calls.clear()
            model(**packed(9)).loss.backward()
        assert [*calls] == [torch.Size((1, 3, 32))] * 3 * runs

    def test_frozen_weights(self) -> None:
        """The first MLP gets states without gradients, the second one has no weights that train."""
        model = tiny_model("llama")
        model.requires_grad_(False)
        model.model.layers[0].mlp.requires_grad_(True)
        equal_as_untiled(model, packed(5, 1, 11))

    def test_without_gradients(self) -> None:
        model, batch = tiny_model("llama"), packed(5, 1, 11)
        with torch.no_grad(), tritonpack.patch(model):
            want = model(**batch).logits
            with tritonpack.patch(model, tiled_mlp=3):
                assert apart([want], [model(**batch).logits]) < LIMIT

    @pytest.mark.parametrize("inside", [False, True], ids=["", "backward inside"])
    @pytest.mark.parametrize("hooks", [False, pytest.param(True, marks=SLOW)], ids=["", "hooks"])
    def test_autocast(self, inside: bool, hooks: bool) -> None:
        gradients: list[list[Tensor | None]] = []
        dtypes: list[torch.dtype] = []
        for rows in (False, 4):
            model = tiny_model("llama", dtype=torch.float32)
            tritonpack.patch(model, tiled_mlp=rows)
            with torch.no_grad():
                model(**packed(9))  # the first call tries each MLP, which would fill autocast's cache
            model.model.layers[0].mlp.up_proj.register_forward_hook(lambda _, x, y: dtypes.append(y.dtype))
            if hooks:
                for parameter in model.parameters():
                    parameter.register_hook(lambda g: g * 2)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**packed(5, 1, 11)).loss
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
        assert set(dtypes) == {torch.bfloat16}
        assert all(x is not None for x in gradients[1])
        assert apart(*gradients) < 0.03

    def test_states_on_the_host(self) -> None:
        model, batch = tiny_model("llama"), packed(5, 1, 11)
        with tritonpack.patch(model, tiled_mlp=3):
            _, want = results(model, batch)
            with torch.autograd.graph.save_on_cpu():
                _, got = results(model, batch)
        assert apart(want, got) == 0

    @SLOW
    def test_compiled(self) -> None:
        model, batch = tiny_model("llama", num_hidden_layers=1), packed(5, 1, 11)
        with tritonpack.patch(model, tiled_mlp=3):
            _, want = results(model, batch)
            _, got = results(torch.compile(model, backend="aot_eager"), batch)
        assert apart(want, got) < LIMIT

    def test_largest_tensor(self) -> None:
        """At most a tile times the intermediate size, in the forward and the backward pass."""
        model, batch = tiny_model("llama", intermediate_size=1009), packed(7, 13)
        for rows, largest in ((False, 20 * 1009), (4, 4 * 1009)):
            with tritonpack.patch(model, tiled_mlp=rows), Largest(model) as seen:
                model(**batch).loss.backward()
            assert seen.numel == largest, seen.shape


class TestHooks:
    def test_of_parameters_and_of_the_mlp_run_once(self) -> None:
        model, seen = tiny_model("llama"), []
        mlp = model.model.layers[0].mlp
        for parameter in model.parameters():
            parameter.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        mlp.up_proj.weight.register_hook(lambda g: seen.append("hook"))
        mlp.up_proj.weight.register_post_accumulate_grad_hook(lambda p: seen.append("after"))
        mlp.register_full_backward_hook(lambda *_: seen.append("module"))
        equal_as_untiled(model, packed(5, 1, 11))
        assert sorted(seen) == ["after"] * 2 + ["hook"] * 2 + ["module"] * 2

    def test_backward_hooks_inside_are_refused(self) -> None:
        model = tiny_model("llama")
        model.model.layers[0].mlp.up_proj.register_full_backward_hook(lambda *_: None)
        with tritonpack.patch(model, tiled_mlp=3):
            with pytest.raises(ValueError, match=r"up_proj of LlamaMLP has a backward hook.* without tiled_mlp"):
                model(**packed(9))
            with torch.no_grad():
                model(**packed(9))


def tiles_of(module: nn.Module, rows: int) -> RowTiles:
    return RowTiles(module, lambda: list(module.parameters()), rows, "the module")


class TestRecomputation:
    def test_dropout_draws_the_same_numbers(self) -> None:
        """As tile by tile without recomputation, whatever was drawn in between."""
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 9), nn.Dropout(0.5), nn.Linear(9, 4)).double()
        x = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
        inputs = [x, *module.parameters()]
        torch.manual_seed(1)
        want = torch.cat([module(tile) for tile in x.split(3)])
        torch.manual_seed(1)
        got = map_tiles(tiles_of(module, 3), x)
        assert torch.equal(want, got)
        after = torch.rand(5)
        before = torch.get_rng_state()
        gradients = torch.autograd.grad(got.square().sum(), inputs)
        assert torch.equal(torch.get_rng_state(), before)
        assert not torch.equal(after, torch.rand(5))
        assert apart(torch.autograd.grad(want.square().sum(), inputs), gradients) < LIMIT

    def test_sums_of_16_bit_gradients(self) -> None:
        """In bfloat16 the sum of 512 ones in 512 tiles would be 256."""
        module = nn.Linear(1, 1).bfloat16()
        map_tiles(tiles_of(module, 1), torch.ones(512, 1, dtype=torch.bfloat16)).sum().backward()
        assert module.bias.grad is not None
        assert module.bias.grad.item() == 512
        assert module.bias.grad.dtype == torch.bfloat16

    def test_weights_that_changed(self) -> None:
        module, x = nn.Linear(4, 4), torch.randn(7, 4)
        out = map_tiles(tiles_of(module, 3), x).sum()
        with torch.no_grad():
            module.weight.add_(1)
        with pytest.raises(RuntimeError, match=r"of the module, \(4, 4\), was changed by an inplace operation"):
            out.backward()
        out = map_tiles(tiles_of(module, 3), x).sum()
        module.weight = nn.Parameter(torch.randn(5, 4))
        with pytest.raises(RuntimeError, match="have other shapes in backward"):
            out.backward()

    def test_second_backward(self) -> None:
        module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(7, 4, requires_grad=True)
        grad = partial(torch.autograd.grad, map_tiles(tiles_of(module, 3), x).square().sum(), x)
        first = grad(retain_graph=True)
        assert torch.equal(first[0], grad(retain_graph=True)[0])
        with pytest.raises(RuntimeError, match="can't differentiate twice"):
            grad(create_graph=True)[0].sum().backward()

    def test_other_tensors_with_gradients_are_refused(self) -> None:
        scale = torch.ones((), requires_grad=True)
        tiles = RowTiles(lambda tile: tile * scale, list, 3, "the module")
        with pytest.raises(ValueError, match=r"the module reads a tensor of shape \(\) .* without tiled_mlp"):
            map_tiles(tiles, torch.randn(7, 4, requires_grad=True))
