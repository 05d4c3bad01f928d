"""Models with attn_implementation="tritonpack" are patched; `tritonpack.register()` makes the name known."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tritonpack
from tests.fresh import ROOT, FreshInterpreters
from tests.patches import zoo
from tests.patches.calls import alone, is_patched, require_exact, state
from tests.patches.models import tiny_model

UNTOUCHED = """
import importlib, pkgutil, sys
import transformers.integrations.hub_kernels, transformers.models.llama.modeling_llama
import transformers.trainer, transformers.generation.utils
from transformers import AttentionInterface, AttentionMaskInterface

def state():
    found = {"meta_path": list(map(id, sys.meta_path))}
    for name in BEFORE:
        for key, value in list(vars(sys.modules[name]).items()):
            found[f"{name}.{key}"] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                found |= {f"{name}.{key}.{one}": id(x) for one, x in vars(value).items() if not one.startswith("_abc")}
    found["names"] = sorted(AttentionInterface._global_mapping) + sorted(AttentionMaskInterface._global_mapping)
    return found

BEFORE = [name for name in sys.modules if name.split(".")[0] == "transformers"]
before = state()
import tritonpack
for module in pkgutil.walk_packages(tritonpack.__path__, "tritonpack."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
after = state()
print(len(BEFORE) > 20, [key for key in before if after.get(key) != before[key]])
tritonpack.register()
print([key for key, one in state().items() if before.get(key) != one] != [])
"""


@pytest.mark.slow
def test_importing_every_module_changes_nothing_of_transformers(fresh: FreshInterpreters) -> None:
    """The comparison does find the changes by `register`."""
    result = fresh.run(UNTOUCHED)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[:-1] == ["True []", "True"]


def test_importing_tritonpack_imports_neither_torch_nor_transformers() -> None:
    code = "import sys; before = len(sys.meta_path); import tritonpack; "
    code += "print({'torch', 'transformers'} & set(sys.modules), len(sys.meta_path) - before)"
    where = {"PYTHONPATH": str(ROOT), "PATH": ""}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=where, timeout=600)
    assert (result.stdout, result.returncode) == ("set() 0\n", 0), result.stderr


BUILD = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
import tritonpack
config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
{before}
model = AutoModelForCausalLM.from_config(config, attn_implementation="tritonpack")
assert model(torch.arange(5)[None]).logits.shape == (1, 5, 8)
tritonpack.unpatch(model)
"""
BEFORE = {
    "": 'attn_implementation="tritonpack"` is not supported', "tritonpack.register(); tritonpack.register()": "",
    "tritonpack.patch(AutoModelForCausalLM.from_config(config))": "",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("before", BEFORE)
def test_the_name_is_known_once_registered_or_patched(before: str, fresh: FreshInterpreters) -> None:
    result = fresh.run(BUILD.format(before=before))
    assert BEFORE[before] in result.stderr
    assert (result.returncode == 0) == (before != "")


LOAD_AND_CALL = """
import pickle, sys, torch
with open({path!r}, "rb") as file:
    model = pickle.load(file)
try:
    model(torch.arange(4)[None])
except Exception as error:
    print(type(error).__name__, error)
import tritonpack
tritonpack.register()
print(tuple(model(torch.arange(4)[None]).logits.shape))
"""


@pytest.mark.slow
def test_a_patched_model_loaded_in_another_process_asks_for_register(fresh: FreshInterpreters, tmp_path: Path) -> None:
    model, path = tiny_model("llama"), tmp_path / "patched.pickle"
    with tritonpack.patch(model):
        path.write_bytes(pickle.dumps(model))
    result = fresh.run(LOAD_AND_CALL.format(path=str(path)))
    assert result.returncode == 0, result.stderr
    refused, called = result.stdout.splitlines()
    assert refused == (
        "UnsupportedModelError the attention function 'tritonpack' isn't registered in this process; call "
        "tritonpack.register() once before the model runs."
    )
    assert called == "(1, 4, 64)"


def test_a_model_that_has_the_name_is_patched(tmp_path: Any) -> None:
    """As by `patch`, at the end of its construction; a whole model has one patch, and unpatching finds it."""
    stock = tiny_model("mistral")
    expected = alone(stock)
    stock.save_pretrained(tmp_path)
    options = {"attn_implementation": "tritonpack", "dtype": torch.float64}
    for model in (
        AutoModelForCausalLM.from_pretrained(tmp_path, **options), tiny_model("mistral", attention="tritonpack"),
    ):  # fmt: skip
        assert model.config._attn_implementation == "tritonpack"
        before = state(model)
        require_exact(model, expected)
        with tritonpack.patch(model) as handle:
            assert handle.report.replaced == "tritonpack"
            require_exact(model, expected)
        assert state(model) == before
        model.post_init()  # a subclass may call it again
        assert state(model) == before
        model.save_pretrained(tmp_path / "again")
        assert not [path for path in (tmp_path / "again").glob("*.json") if "tritonpack" in path.read_text()]
        tritonpack.unpatch(model)
        assert not is_patched(model)


@pytest.mark.parametrize("kind", ["llama", "falcon", "gptj", "git", "roformer", "openai-gpt", "qwen3_next"])
def test_set_attn_implementation_patches_and_unpatches(kind: str) -> None:
    """Some models look the name up in a table of their own classes, and some ignore it."""
    model = zoo.tiny_model(kind, dtype=torch.float64)
    before, expected = state(model), alone(model, gradients=False)
    for name in ("tritonpack", "sdpa" if kind in ("llama", "qwen3_next") else "eager"):
        model.set_attn_implementation(name)
        assert is_patched(model) == (name == "tritonpack")
        if name == "tritonpack":
            require_exact(model, expected)
    if kind in ("llama", "qwen3_next"):
        assert state(model) == before
    require_exact(zoo.tiny_model(kind, dtype=torch.float64, attention="tritonpack"), expected)


def test_attention_named_by_part_gives_the_whole_model_one_patch() -> None:
    named: Any = {"text_config": "tritonpack", "vision_config": "eager"}
    model = zoo.tiny_model("gemma3", dtype=torch.float64, attention=named)
    assert model.config.vision_config._attn_implementation == "eager"
    require_exact(model, alone(zoo.tiny_model("gemma3", dtype=torch.float64), gradients=False))
    tritonpack.unpatch(model)
    assert not is_patched(model)
