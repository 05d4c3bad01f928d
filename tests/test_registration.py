"""Our names reach transformers in every order of imports, and `import tritonpack` brings nothing with it."""

import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from tests.fresh import ROOT, FreshInterpreters
from tritonpack import registration

BUILD = """
import inspect, sys, warnings
warnings.simplefilter("error", UserWarning)
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
model = AutoModelForCausalLM.from_config(config, attn_implementation="tritonpack")
assert model(torch.arange(5)[None]).logits.shape == (1, 5, 8)
assert not [finder for finder in sys.meta_path if type(finder).__module__ == "tritonpack.registration"]
modeling = sys.modules["transformers.modeling_utils"]
assert "exec_module" not in vars(modeling.__loader__)
assert "class PreTrainedModel" in inspect.getsource(modeling)
"""

ORDERS = {
    "ours, theirs": "import tritonpack",
    "theirs unused, ours": "import transformers, tritonpack",
    "theirs, ours": "from transformers import LlamaForCausalLM; import tritonpack",
    "ours, masks, models": "import tritonpack, transformers.masking_utils",
    "half of theirs, ours, theirs": "import transformers.masking_utils, tritonpack",
    "ours twice": "import tritonpack, importlib; importlib.reload(tritonpack)",
}


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_of_imports(order: str, fresh: FreshInterpreters) -> None:
    pytest.importorskip("transformers")
    result = fresh.run(ORDERS[order] + BUILD)
    assert result.returncode == 0, result.stderr


def test_importing_tritonpack_imports_neither() -> None:
    def run(code: str) -> subprocess.CompletedProcess[str]:
        where = {"PYTHONPATH": str(ROOT), "PATH": ""}
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=where, timeout=60)

    result = run("import sys, tritonpack; print({'torch', 'transformers'} & set(sys.modules), len(sys.meta_path))")
    before = run("import sys; print(set(), len(sys.meta_path) + 1)")
    assert (result.stdout, result.returncode) == (before.stdout, 0), result.stderr


def test_a_version_without_the_interface_stays_importable(tmp_path: Path, fresh: FreshInterpreters) -> None:
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "modeling_utils.py").write_text("models = 3")
    code = """
import warnings, tritonpack
with warnings.catch_warnings(record=True) as caught:
    from transformers.modeling_utils import models
assert models == 3
print(caught[0].message)
"""
    result = fresh.run(code, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("tritonpack's attention isn't known to this version of transformers: cannot import")


def test_a_module_that_cannot_be_executed_is_watched_again(tmp_path: Path, fresh: FreshInterpreters) -> None:
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "modeling_utils.py").write_text("import absent")
    code = """
import sys, tritonpack
for _ in range(2):
    try:
        import transformers.modeling_utils
    except ModuleNotFoundError as error:
        assert error.name == "absent"
    assert [finder for finder in sys.meta_path if type(finder).__module__ == "tritonpack.registration"]
"""
    result = fresh.run(code, tmp_path)
    assert result.returncode == 0, result.stderr


class TestWatch:
    def test_two_that_ask_each_other(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(registration, "NEEDED", ("json.decoder",))
        monkeypatch.setattr(sys, "meta_path", [registration._Watch(), registration._Watch(), *sys.meta_path])
        spec = sys.meta_path[0].find_spec("json.decoder", __import__("json").__path__)
        assert spec is not None
        assert spec.loader is not None

    def test_other_modules_are_none_of_its_business(self) -> None:
        assert registration._Watch().find_spec("json") is None

    def test_a_loader_with_fixed_attributes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Fixed:
            __slots__ = ()

            def create_module(self, spec: ModuleSpec) -> None: ...

            def exec_module(self, module: Any) -> None: ...

        class Finder:
            def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec:
                return ModuleSpec(name, Fixed())  # type: ignore[arg-type]

        monkeypatch.setattr(registration, "NEEDED", ("a_frozen_module",))
        monkeypatch.setattr(sys, "meta_path", [registration._Watch(), Finder()])
        spec = sys.meta_path[0].find_spec("a_frozen_module")
        assert spec is not None
        assert isinstance(spec.loader, Fixed)
