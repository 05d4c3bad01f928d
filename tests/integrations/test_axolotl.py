"""axolotl's plugin, called by a small copy of the parts of axolotl that call plugins.

The copy follows axolotl 0.19: the order of the calls, a config whose missing keys are None, options checked by pydantic
classes that are found by name, and the table from which axolotl derives what attention can do.
"""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import tritonpack
from tests.ecosystem.training import EXACT, features
from tests.patches import zoo
from tests.patches.calls import is_patched, relative
from tests.patches.models import tiny_model
from tritonpack.integrations.axolotl import TritonpackPlugin

pydantic = pytest.importorskip("pydantic")

PLUGIN = "tritonpack.integrations.axolotl.TritonpackPlugin"
KNOWN = {"eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "xformers", "sage"}
PACKING = {"flash_attention_2", "flash_attention_3", "flex_attention", "xformers", "sage"}


class Config(dict[str, Any]):
    """A config as in axolotl: a missing key is None, and keys are attributes."""

    def __missing__(self, key: str) -> None:
        return None

    def __getattr__(self, key: str) -> Any:
        return self[key]


class Axolotl:
    """The parts of axolotl that call a plugin, from a config's file to a trained model."""

    def __init__(self, **config: Any) -> None:
        self.config = Config(plugins=[PLUGIN], **config)
        home, name = PLUGIN.rsplit(".", 1)
        self.plugin = getattr(importlib.import_module(home), name)()
        self.plugin.register(self.config)
        self._check()
        assert self.plugin.load_datasets(self.config, preprocess=False) is None

    def _check(self) -> None:
        """Check the config and write a new one, which has only the options of the schema."""
        home, name = self.plugin.get_input_args().rsplit(".", 1)
        arguments = getattr(importlib.import_module(home), name)
        base = pydantic.create_model(
            "Base", plugins=(list[str], []), attn_implementation=(str | None, None), sample_packing=(bool, False)
        )
        schema = pydantic.create_model("Schema", __base__=(base, arguments))
        config = Config(schema(**self.config).model_dump())
        chosen = config.attn_implementation
        if chosen not in KNOWN and "/" not in (chosen or ""):
            raise ValueError(f"attn_implementation={chosen!r} is not a recognized backend.")
        config["attn_supports_packing"] = chosen in PACKING
        config["attn_decontaminates_packing"] = chosen in PACKING | {"sdpa", "eager"}
        self.config = config

    def load(self, folder: Path, lora: bool = False) -> nn.Module:
        """Load a model. The choice of attention is read before plugins may change it."""
        options = {"attn_implementation": self.config.attn_implementation}
        self.plugin.pre_model_load(self.config)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **options)
        self._call("post_model_build", model)
        self._call("pre_lora_load", model)
        if lora:
            peft = pytest.importorskip("peft")
            settings = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"], task_type="CAUSAL_LM")
            torch.manual_seed(0)
            model = peft.get_peft_model(model, settings).to(torch.float64)
        self._call("post_lora_load", model)
        self.plugin.post_model_load(self.config, model)
        return model

    def collate(self, rows: list[list[dict[str, list[int]]]]) -> dict[str, Tensor]:
        """Rows of several documents. Each document's number is its mask, and one more document pads a row. The mask is
        dropped if attention packs without one."""
        ids, places, masks = [], [], []
        for row in rows:
            lengths = [len(document["input_ids"]) for document in row]
            ids.append(torch.cat([torch.tensor(document["input_ids"]) for document in row]))
            places.append(torch.cat([torch.arange(n) for n in lengths]))
            masks.append(torch.cat([torch.full((n,), i + 1) for i, n in enumerate(lengths)]))
        width = max(map(len, ids))
        places = [torch.cat([place, torch.arange(width - len(place))]) for place in places]
        batch = {"input_ids": pad(ids), "position_ids": torch.stack(places), "attention_mask": pad(masks)}
        if self.config.attn_decontaminates_packing:
            del batch["attention_mask"]
        return batch

    def _call(self, hook: str, model: nn.Module) -> None:
        if hasattr(self.plugin, hook):  # the base class has all hooks
            getattr(self.plugin, hook)(self.config, model)


def pad(rows: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny_model("mistral").save_pretrained(tmp_path)
    return tmp_path


def packed(model: nn.Module, program: Axolotl) -> Tensor:
    """Logits of all documents, from two rows of them."""
    documents = features()[:7]
    rows = [documents[:4], documents[4:]]
    logits = model(**program.collate(rows)).logits
    lengths = [sum(len(document["input_ids"]) for document in row) for row in rows]
    return torch.cat([row[:n] for row, n in zip(logits, lengths, strict=True)])


def separate(model: nn.Module) -> Tensor:
    return torch.cat([model(torch.tensor([d["input_ids"]])).logits[0] for d in features()[:7]])


@pytest.mark.parametrize("lora", [False, True], ids=["", "lora"])
@pytest.mark.parametrize("keep_mask", [False, True], ids=["", "numbered mask"])
def test_a_loaded_model_packs(saved: Path, lora: bool, keep_mask: bool) -> None:
    program = Axolotl(sample_packing=True)
    model = program.load(saved, lora=lora)
    # axolotl's own table does not have our name, so axolotl would use masks and short rows
    assert program.config.attn_supports_packing is program.config.attn_decontaminates_packing is True
    if keep_mask:
        program.config["attn_decontaminates_packing"] = False
    got = packed(model, program)
    program.plugin.post_train_unload(program.config)
    assert not is_patched(model)
    assert relative(separate(model), got) < EXACT


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "sdpa"),
        ({"attn_implementation": "tritonpack"}, "sdpa"),
        ({"attn_implementation": "eager"}, "eager"),
        ({"tritonpack": {"attention": "eager"}}, "eager"),
        ({"flash_attention": True}, None),  # axolotl converts it to the newer option
    ],
)
def test_attention_that_a_config_chooses(config: dict[str, Any], expected: str | None) -> None:
    given = Config(config)
    TritonpackPlugin().register(given)
    assert given.attn_implementation == expected


@pytest.mark.parametrize(
    ("chosen", "options"),
    [
        ("eager", None),
        ("sdpa", {"backend": "reference"}),
        (None, {"backend": "blocked"}),
        (None, {"attention": "sdpa"}),
        ("sdpa", {"attention": "eager"}),
    ],
)
def test_options(saved: Path, chosen: str | None, options: dict[str, str] | None) -> None:
    program = Axolotl(attn_implementation=chosen, tritonpack=options)
    model: Any = program.load(saved)
    with tritonpack.patch(model, **{"attention": "tritonpack", "backend": "auto", **(options or {})}) as again:
        report = again.report
    assert report.attention == (options or {}).get("attention", "tritonpack")
    assert report.backend == (options or {}).get("backend", "auto")
    got = packed(model, program)
    program.plugin.post_train_unload(program.config)
    model.set_attn_implementation("sdpa")
    assert relative(separate(model), got) < EXACT


@pytest.mark.parametrize("options", [{"backend": "cuda"}, {"attention": "flash"}, {"window": 4}, "tritonpack"], ids=str)
def test_mistakes_are_reported_by_the_schema(options: Any) -> None:
    with pytest.raises(pydantic.ValidationError, match="tritonpack"):
        Axolotl(tritonpack=options)


def test_a_family_that_cannot_be_packed_stops_the_program(tmp_path: Path) -> None:
    zoo.tiny_model("prophetnet").save_pretrained(tmp_path)
    with pytest.raises(tritonpack.UnsupportedModelError, match="masks and position buckets"):
        Axolotl(attn_implementation="eager").load(tmp_path)


def test_unloading_twice_and_after_the_model_has_gone(saved: Path) -> None:
    program = Axolotl()
    model: Any = program.load(saved)
    reference = program.load(saved)
    del reference
    for _ in range(2):
        program.plugin.post_train_unload(program.config)
    assert model.config._attn_implementation == "sdpa"  # the model was loaded with sdpa


def test_axolotl_accepts_the_plugin() -> None:
    base = pytest.importorskip("axolotl.integrations.base")
    manager = base.PluginManager.get_instance()
    manager.register(PLUGIN)
    assert isinstance(manager.plugins[PLUGIN], base.BasePlugin)
    assert manager.get_input_args() == ["tritonpack.integrations.axolotl.TritonpackArgs"]
