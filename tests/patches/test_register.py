"""`tritonpack.register()` makes the name known to transformers. Importing tritonpack changes no other module."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import tritonpack
from tests.fresh import ROOT, FreshInterpreters
from tests.patches.models import tiny_model

UNTOUCHED = """
import importlib, pkgutil, sys
import transformers, transformers.modeling_utils, transformers.masking_utils
import transformers.integrations.hub_kernels, transformers.models.llama.modeling_llama
import transformers.trainer, transformers.generation.utils
from transformers import AttentionInterface, AttentionMaskInterface

def state():
    found = {"meta_path": list(map(id, sys.meta_path))}
    for name in BEFORE:
        module = sys.modules[name]
        for key, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name:
                found |= {f"{name}.{key}.{one}": id(x) for one, x in vars(value).items() if not one.startswith("_abc")}
            found[f"{name}.{key}"] = id(value)
        found[f"{name}'s loader"] = sorted(vars(module.__loader__)) if hasattr(module.__loader__, "__dict__") else None
    found["names"] = sorted(AttentionInterface._global_mapping) + sorted(AttentionMaskInterface._global_mapping)
    return found

BEFORE = [name for name in sys.modules if name.split(".")[0] == "transformers"]
before = state()
import tritonpack
for module in pkgutil.walk_packages(tritonpack.__path__, "tritonpack."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
after = state()
changed = [key for key in before if after.get(key) != before[key]]
print(len(BEFORE) > 20, sum(name.startswith("tritonpack.") for name in sys.modules) > 100, changed)
tritonpack.register()
print([key for key, one in state().items() if before.get(key) != one] != [])
"""


@pytest.mark.slow
def test_importing_every_module_changes_nothing_of_transformers(fresh: FreshInterpreters) -> None:
    """The comparison does find the changes by `register`."""
    pytest.importorskip("transformers")
    result = fresh.run(UNTOUCHED)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[:-1] == ["True True []", "True"]


def test_importing_tritonpack_imports_neither_torch_nor_transformers() -> None:
    def run(code: str) -> subprocess.CompletedProcess[str]:
        where = {"PYTHONPATH": str(ROOT), "PATH": ""}
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=where, timeout=600)

    result = run("import sys, tritonpack; print({'torch', 'transformers'} & set(sys.modules), len(sys.meta_path))")
    before = run("import sys; print(set(), len(sys.meta_path))")
    assert (result.stdout, result.returncode) == (before.stdout, 0), result.stderr


BUILD = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
model = AutoModelForCausalLM.from_config(config, attn_implementation="tritonpack")
assert model(torch.arange(5)[None]).logits.shape == (1, 5, 8)
assert model.config._attn_implementation == "tritonpack"
from tritonpack.patches.applied_patch import applied_to
assert applied_to(model)
"""

ORDERS = {
    "register first": "import tritonpack; tritonpack.register()\n",
    "transformers first": "from transformers import LlamaForCausalLM; import tritonpack; tritonpack.register()\n",
    "twice": "import tritonpack; tritonpack.register(); tritonpack.register()\n",
    "patch registers": """
import tritonpack
from transformers import GPT2Config, GPT2LMHeadModel
tritonpack.patch(GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_head=1, n_layer=1)))
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_registered_names_are_taken(order: str, fresh: FreshInterpreters) -> None:
    pytest.importorskip("transformers")
    result = fresh.run(ORDERS[order] + BUILD)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_without_register_transformers_refuses_the_name(fresh: FreshInterpreters) -> None:
    pytest.importorskip("transformers")
    result = fresh.run("import tritonpack\n" + BUILD)
    assert result.returncode != 0
    assert 'attn_implementation="tritonpack"` is not supported' in result.stderr


LOAD_AND_CALL = """
import pickle, sys, torch
with open({path!r}, "rb") as file:
    model = pickle.load(file)
assert "tritonpack.patches" in sys.modules
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
