"""`tritonpack/flash-attn`: accepted wherever transformers takes a name, with and without the `kernels` library."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations import hub_kernels
from transformers.utils import is_kernels_available

import tritonpack
from tests.ecosystem.training import no_warning
from tests.patches import zoo
from tests.patches.models import tiny_model
from tests.patches.test_patching import (
    EXACT,
    FORMS,
    alone,
    difference,
    documents,
    logits_and_gradients,
    positions,
    state,
)
from tritonpack import flash_attn, hub
from tritonpack.hub.loading import answer_for_alias

ALIAS = "tritonpack/flash-attn"
FOLDER = Path(hub.__file__).parent
ROOT = FOLDER.parents[1]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_packed_equals_alone(family: str) -> None:
    expected = alone(zoo.tiny_model(family, dtype=torch.float64))
    model = zoo.tiny_model(family, dtype=torch.float64)
    with no_warning():
        model.set_attn_implementation(ALIAS)
        for form, arguments in FORMS.items():
            call = {"input_ids": torch.cat(documents(), dim=1), **arguments()}
            assert difference(expected, logits_and_gradients(model, [call], lambda out: out[0])) < EXACT, form


def test_every_way_to_ask(tmp_path: Path) -> None:
    with no_warning():
        built = zoo.tiny_model("llama", dtype=torch.float64, attn_implementation=ALIAS)
        built.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=ALIAS, dtype=torch.float64)
    assert "tritonpack" not in (tmp_path / "config.json").read_text()
    call = {"input_ids": torch.cat(documents(), 1), "position_ids": positions()}
    expected = torch.cat([built(d).logits for d in documents()], 1)
    for model in (built, loaded):
        assert model.config._attn_implementation == "tritonpack"  # patched
        assert float((model(**call).logits - expected).detach().abs().max() / expected.detach().abs().max()) < EXACT


def test_patching_a_model_that_has_the_name() -> None:
    model = zoo.tiny_model("qwen3_next", attn_implementation=ALIAS)
    before = state(model)
    with tritonpack.patch(model) as handle:
        assert handle.report.replaced == ALIAS
        assert torch.isfinite(model(torch.cat(documents(), 1), position_ids=positions()).logits).all()
    assert state(model) == before


def test_generate_with_a_static_cache() -> None:
    """A name with "flash" in it makes generate() keep masks of ones."""
    model, ids = tiny_model("llama"), documents((9,))[0]
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
    expected = model.generate(ids, disable_compile=True, **options)
    model.set_attn_implementation(ALIAS)
    assert torch.equal(model.generate(ids, disable_compile=True, **options), expected)


def test_families_that_choose_among_kernels_themselves() -> None:
    """transformers replaces every name with "flash" in it by a kernel that it lists for the family; ours without goes
    through."""
    model = zoo.tiny_model("gpt_oss")
    with pytest.raises((ImportError, ValueError)):
        model.set_attn_implementation(ALIAS)
    model.set_attn_implementation("tritonpack")
    assert model.config._attn_implementation == "tritonpack"


def test_other_names_are_left_to_the_loader() -> None:
    loader = hub_kernels.load_and_register_attn_kernel
    answer_for_alias()
    assert hub_kernels.load_and_register_attn_kernel is loader  # once is enough

    def failure(load: Any) -> str:
        with pytest.raises((ImportError, ValueError)) as caught:
            load("nobody/nothing")
        return str(caught.value)

    assert failure(loader) == failure(loader.__wrapped__)
    assert loader("sdpa") is None
    assert loader(ALIAS) is hub


def test_the_kernels_library_loads_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("kernels")
    monkeypatch.setenv("LOCAL_KERNELS", f"{ALIAS}={FOLDER}")
    kernel = kernels.get_kernel(ALIAS, version=1)
    assert kernel is not hub
    for name in hub.__all__:
        assert getattr(kernel, name) is getattr(flash_attn, name)
    with pytest.raises(AttributeError, match="no attribute 'flash'; it has flash_attn_func"):
        kernel.flash  # noqa: B018


WITHOUT_IMPORT = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(config).double()
for parameter in model.parameters():
    parameter.data *= 5
ids = torch.randint(64, (2, 12))
places = torch.tensor([[*range(5), *range(7)], [*range(8), *range(4)]])
ends = [[(0, 5), (5, 12)], [(0, 8), (8, 12)]]
expected = [[model(ids[row : row + 1, a:b]).logits[0] for a, b in ends[row]] for row in range(2)]
expected = torch.stack([torch.cat(row) for row in expected])
assert "tritonpack" not in sys.modules
model.set_attn_implementation("tritonpack/flash-attn")
gap = (model(ids, position_ids=places, attention_mask=torch.ones_like(ids)).logits - expected).abs().max()
print(bool(gap < 1e-6 * expected.abs().max()))
"""


@pytest.mark.skipif(not is_kernels_available(), reason="needs the `kernels` that this transformers takes")
def test_a_program_that_does_not_import_tritonpack() -> None:
    """Several packed rows and a mask of ones, which transformers' own use of flash_attn_varlen_func gets wrong."""
    where = {"LOCAL_KERNELS": f"{ALIAS}={FOLDER}", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PATH": ""}
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_IMPORT], capture_output=True, text=True, env=where, timeout=180
    )
    assert result.stdout.strip() == "True", result.stderr


def test_the_folder_says_where_it_is() -> None:
    where = {"PYTHONPATH": str(ROOT), "PATH": ""}
    result = subprocess.run(
        [sys.executable, "-m", "tritonpack.hub"], capture_output=True, text=True, env=where, timeout=60
    )
    assert Path(result.stdout.strip()).resolve() == FOLDER.resolve(), result.stderr
    assert (FOLDER / "metadata.json").exists()
