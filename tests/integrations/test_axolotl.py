"""axolotl's plugin, called by a small copy of the parts of axolotl that call plugins.

The copy follows axolotl 0.19: the order of the calls, a config whose missing keys are None, options checked by pydantic
classes that are found by name, and the table from which axolotl derives what attention can do.
"""

from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import tritonpack
from tests.ecosystem.training import EXACT, apart, features
from tests.patches import zoo
from tests.patches.calls import is_patched
from tests.patches.models import tiny_model

pydantic = pytest.importorskip("pydantic")

PLUGIN = "tritonpack.integrations.axolotl.TritonpackPlugin"
PACKING = {"flash_attention_2", "flash_attention_3", "flex_attention", "xformers", "sage"}
ROWS = [[torch.tensor(document["input_ids"]) for document in row] for row in (features()[:4], features()[4:7])]


class Config(dict[str, Any]):
    """A config as in axolotl: a missing key is None, and keys are attributes."""

    def __missing__(self, key: str) -> None:
        return None

    def __getattr__(self, key: str) -> Any:
        return self[key]


class Axolotl:
    """The parts of axolotl that call a plugin, from a config's file to a loaded model."""

    def __init__(self, **config: Any) -> None:
        self.plugin, given = resolve_name(PLUGIN)(), Config(plugins=[PLUGIN], **config)
        self.plugin.register(given)
        base = pydantic.create_model("Base", attn_implementation=(str | None, None), sample_packing=(bool, False))
        schema = pydantic.create_model("Schema", __base__=(base, resolve_name(self.plugin.get_input_args())))
        self.config = Config(schema(**given).model_dump())  # a new one, which has only the options of the schema
        chosen = self.config.attn_implementation
        if chosen not in PACKING | {"sdpa", "eager"}:
            raise ValueError(f"attn_implementation={chosen!r} is not a recognized backend.")
        self.config["attn_supports_packing"] = chosen in PACKING
        self.config["attn_decontaminates_packing"] = True
        self.plugin.load_datasets(self.config, preprocess=False)

    def load(self, folder: Path, lora: bool = False) -> Any:
        """Load a model. The choice of attention is read before plugins may change it."""
        options = {"attn_implementation": self.config.attn_implementation}
        self.config["attn_supports_packing"] = self.config["attn_decontaminates_packing"] = False  # derived again
        self.plugin.pre_model_load(self.config)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **options)
        if lora:
            peft = pytest.importorskip("peft")
            settings = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"], task_type="CAUSAL_LM")
            torch.manual_seed(0)
            model = peft.get_peft_model(model, settings).to(torch.float64)
        self.plugin.post_model_load(self.config, model)
        return model


def packed(model: nn.Module, numbered: bool = False) -> Tensor:
    """Logits of all documents, from two rows as axolotl's collator makes them; one more document pads a row.

    It numbers the documents in a mask, and drops the mask if attention packs without one.
    """
    width = max(sum(map(len, row)) for row in ROWS)
    batch = {"input_ids": pad([torch.cat(row) for row in ROWS])}
    places = [torch.cat([torch.arange(len(ids)) for ids in row]) for row in ROWS]
    batch["position_ids"] = torch.stack([torch.cat([place, torch.arange(width - len(place))]) for place in places])
    if numbered:
        batch["attention_mask"] = pad([torch.cat([ids * 0 + i for i, ids in enumerate(row, 1)]) for row in ROWS])
    return torch.cat([row[: sum(map(len, ids))] for row, ids in zip(model(**batch).logits, ROWS, strict=True)])


def pad(rows: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def separate(model: nn.Module) -> Tensor:
    return torch.cat([model(ids[None]).logits[0] for row in ROWS for ids in row])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny_model("mistral").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("lora", [False, True], ids=["", "lora"])
def test_a_loaded_model_packs(saved: Path, lora: bool) -> None:
    program = Axolotl(sample_packing=True)
    # axolotl's own table does not have our name, so axolotl would use masks and short rows
    assert program.config.attn_supports_packing is program.config.attn_decontaminates_packing is True
    model = program.load(saved, lora=lora)
    assert program.config.attn_supports_packing is program.config.attn_decontaminates_packing is True
    got = [packed(model, numbered) for numbered in (False, True)]
    for _ in range(2):
        program.plugin.post_train_unload(program.config)
    assert not is_patched(model)
    assert all(apart(logits, separate(model)) < EXACT for logits in got)


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
    resolve_name(PLUGIN)().register(given)
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
def test_options(saved: Path, chosen: str | None, options: dict[str, str] | None, caplog: Any) -> None:
    program, expected = Axolotl(attn_implementation=chosen, tritonpack=options), options or {}
    with caplog.at_level("INFO", "tritonpack.integrations.axolotl"):
        model = program.load(saved)
    report: Any = caplog.records[-1].args[0]
    assert report.attention == expected.get("attention", "tritonpack")
    assert report.backend == expected.get("backend", "auto")
    got = packed(model)
    program.plugin.post_train_unload(program.config)
    assert model.config._attn_implementation == (chosen or expected.get("attention", "sdpa"))
    model.set_attn_implementation("sdpa")
    assert apart(got, separate(model)) < EXACT


@pytest.mark.parametrize("options", [{"backend": "cuda"}, {"attention": "flash"}, {"window": 4}, "tritonpack"], ids=str)
def test_mistakes_are_reported_by_the_schema(options: Any) -> None:
    with pytest.raises(pydantic.ValidationError, match="tritonpack"):
        Axolotl(tritonpack=options)


def test_a_family_that_cannot_be_packed_stops_the_program(tmp_path: Path) -> None:
    zoo.tiny_model("prophetnet").save_pretrained(tmp_path)
    with pytest.raises(tritonpack.UnsupportedModelError, match="masks and position buckets"):
        Axolotl(attn_implementation="eager").load(tmp_path)
