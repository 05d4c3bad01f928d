"""The kernel repository: its files, what runs of it without tritonpack, and training by its name in transformers."""

import ast
import hashlib
import json
import sys
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tritonpack.flash_attn
from tests.fresh import FreshInterpreters
from tools import hub_build
from tritonpack.testing import check_isolation

NAME = "tritonpack/tritonpack"
LENGTHS = [5, 9, 1, 3]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hub")
    assert hub_build.main([str(out)]) == 0
    return out


def files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


class TestFiles:
    def test_variants_differ_in_their_metadata_alone(self, repository: Path) -> None:
        assert {path.name for path in repository.iterdir()} == {
            ".gitignore", "CARD.md", "LICENSE", "build", "build.toml", "tests", "torch-ext",
        }  # fmt: skip
        variants = {path.name: files(path) for path in (repository / "build").iterdir()}
        assert variants.keys() == {"torch-cpu", "torch-cuda", "torch-rocm"}
        source, ids = files(repository / "torch-ext" / "tritonpack"), set()
        for name, variant in variants.items():
            metadata = json.loads(variant.pop("metadata.json"))
            assert variant == source
            ids.add(metadata.pop("id"))
            digests = {path: b64encode(hashlib.sha256(content).digest()).decode() for path, content in variant.items()}
            assert metadata == {
                "name": "tritonpack",
                "version": 1,
                "license": "MIT",
                "python-depends": [],
                "backend": {"type": name.removeprefix("torch-")},
                "digest": {"algorithm": "sha256", "files": digests},
            }
        assert len(ids) == 3
        assert all(name.isidentifier() for name in ids)

    def test_sources_import_each_other_relatively(self, repository: Path) -> None:
        source = files(repository / "build" / "torch-cpu")
        lines = sum(content.count(b"\n") for path, content in source.items() if path.endswith(".py"))
        assert 5_000 < lines < 10_000
        names = set()
        for path, content in source.items():
            for node in ast.walk(ast.parse(content)) if path.endswith(".py") else ():
                if isinstance(node, ast.Import):
                    names |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    names.add((node.module or "").split(".")[0])
        assert names - sys.stdlib_module_names == {"torch", "triton", "typing_extensions"}  # the last for type checkers

    def test_build_toml_says_the_same_as_the_metadata(self, repository: Path) -> None:
        general = pytest.importorskip("tomllib").loads((repository / "build.toml").read_text())["general"]
        assert (general["name"], general["version"], general["license"]) == ("tritonpack", 1, "MIT")
        assert general["backends"] == ["cpu", "cuda", "rocm"]
        assert general["hub"] == {"repo-id": NAME}


@pytest.mark.parametrize("place", ["folder", "file", "below a file"])
def test_out_that_holds_something_is_refused(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kept"
    file.write_text("mine")
    out = {"folder": tmp_path, "file": file, "below a file": file / "out"}[place]
    assert hub_build.main([str(out)]) == 2
    expected = (
        "error: " if "below" in place else f"error: {out} exists and isn't an empty folder; name a new one, or em"
    )
    assert capsys.readouterr().err.startswith(expected)
    assert files(tmp_path) == {"kept": b"mine"}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "ROOTS",
            ("compilation",),
            "compilation.py imports numba; a kernel may import torch, triton and einops alone.",
        ),
        ("ROOTS", ("attenton",), "tritonpack has no module attenton, which ROOTS names."),
        ("MAX_LINES", 1000, "lines, and a kernel may have 1000; shorten ROOTS."),
    ],
)
def test_attention_that_is_no_kernel(
    name: str, value: object, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(hub_build, name, value)
    assert hub_build.main([str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("line", ["import tritonpack", "from tritonpack import patch", "import tritonpack.masks.forms"])
def test_import_that_has_no_relative_form(line: str) -> None:
    with pytest.raises(ValueError, match=r"^a\.py imports tritonpack.*; write `from tritonpack import`"):
        list(hub_build._needs(line, "a.py"))


class TestAlone:
    def test_its_own_tests_pass_without_tritonpack(self, repository: Path, fresh: FreshInterpreters) -> None:
        program = f"""
import sys
sys.modules["tritonpack"] = None
import pytest
pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", {str(repository)!r}, {str(repository)!r}])
assert not [name for name in sys.modules if name.startswith("tritonpack.")]
"""
        done = fresh.run(program)
        assert done.returncode == 0, done.stderr
        assert "4 passed" in done.stdout, done.stdout

    @pytest.mark.parametrize(
        ("variant", "backend"), [("cpu", "auto"), pytest.param("cuda", "triton", marks=pytest.mark.interpreter)]
    )
    def test_results_are_tritonpacks_to_the_bit(self, repository: Path, variant: str, backend: str) -> None:
        leaves = [torch.randn(sum(LENGTHS), heads, 16, requires_grad=True) for heads in (4, 2, 2)]
        cu = torch.tensor([0, *LENGTHS]).cumsum(0)
        results = []
        for module in (hub_build.load(repository, variant), tritonpack.flash_attn):
            out = module.flash_attn_varlen_func(*leaves, cu, cu, causal=True, backend=backend)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        assert all(map(torch.equal, *results))

    def test_operators_have_a_namespace_of_their_own(self, repository: Path) -> None:
        """Two versions of a kernel may be in one process."""
        operators = getattr(torch.ops, hub_build.load(repository).__name__)
        assert operators.attention.default is not torch.ops.tritonpack.attention.default


def with_own_loader(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers load the repository without the `kernels` library."""
    from transformers.integrations import hub_kernels

    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda name, **_: {NAME: hub_build.load}[name](repository))


def with_kernels(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the `kernels` library load the repository, without a network."""
    from transformers.utils import import_utils

    if not import_utils.is_kernels_available():
        pytest.skip(f"transformers needs kernels {import_utils.KERNELS_MIN_VERSION} or later")
    monkeypatch.setenv("LOCAL_KERNELS", f"{NAME}={repository}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("loader", [with_own_loader, with_kernels])
class TestTransformers:
    @pytest.fixture
    def model(
        self, loader: Callable[[Path, pytest.MonkeyPatch], None], repository: Path, monkeypatch: pytest.MonkeyPatch
    ) -> torch.nn.Module:
        """A tiny Llama that computes with the repository; what transformers registers for it is taken back."""
        transformers = pytest.importorskip("transformers")
        flash = transformers.modeling_flash_attention_utils
        for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
            monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
        for name in ("_loaded_implementation", *(name for name in vars(flash) if name.endswith("_fn"))):
            monkeypatch.setattr(flash, name, getattr(flash, name))
        loader(repository, monkeypatch)
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, attn_implementation=NAME,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).double()
        assert model.config._attn_implementation == NAME
        return model

    @pytest.mark.parametrize("told", ["positions", "offsets"])
    def test_packed_batches_train_as_rows_alone(self, model: torch.nn.Module, told: str) -> None:
        documents = [torch.randint(64, (1, n)) for n in LENGTHS]
        batch = {"input_ids": torch.cat(documents, 1), "position_ids": torch.cat([*map(torch.arange, LENGTHS)])[None]}
        if told == "offsets":
            cu = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            batch |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), cu)
            batch |= dict.fromkeys(("max_length_q", "max_length_k"), max(LENGTHS))
        packed = self.step(model, [batch])
        model.set_attn_implementation("sdpa")
        alone = self.step(model, [{"input_ids": ids} for ids in documents])
        torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-9)

    def step(self, model: torch.nn.Module, batches: list[dict[str, Tensor]]) -> list[Tensor]:
        """The summed loss of the next tokens of all documents, and its gradients."""
        losses = []
        for batch in batches:
            logits, ids = model(**batch, use_cache=False).logits[0], batch["input_ids"][0]
            lengths = LENGTHS if len(batches) == 1 else [ids.shape[0]]
            for document, targets in zip(logits.split(lengths), ids.split(lengths), strict=True):
                losses.append(torch.nn.functional.cross_entropy(document[:-1], targets[1:], reduction="sum"))
        loss = torch.stack(losses).sum()
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    def test_documents_are_apart_to_the_bit(self, model: torch.nn.Module) -> None:
        report = check_isolation(model)
        assert (report.moved_by_others, report.gradient_to_others) == (0, 0)


class TestKernelsLibrary:
    def test_loads_the_repository_and_accepts_its_digest(
        self, repository: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kernels = pytest.importorskip("kernels", reason="the kernels library isn't installed")
        from kernels._rust import Build, Digest, DigestAlgorithm, Metadata

        monkeypatch.setenv("LOCAL_KERNELS", f"{NAME}={repository}")
        module = kernels.get_kernel(NAME, version=1)
        assert Path(module.__file__).parent == repository / "build" / "torch-cpu"
        assert module.__name__ == kernels.get_loaded_kernels()[-1].metadata.id
        assert {str(one).lower() for one in Build.open(repository).general.backends} == {"cpu", "cuda", "rocm"}
        for variant in (repository / "build").iterdir():
            expected = Metadata.read_from_file(variant / "metadata.json").digest
            expected.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
