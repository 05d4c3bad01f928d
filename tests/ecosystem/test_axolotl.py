"""axolotl itself, where it is installed: its config, its plugin manager, its model loader and its collator."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tritonpack
from tests.ecosystem.training import EXACT, apart, features, tokenizer
from tests.patches.models import tiny_model
from tritonpack.patches.applied_patch import applied_to

PLUGIN = "tritonpack.integrations.axolotl.TritonpackPlugin"


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [None, "lora"])
def test_a_loaded_model_packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: str | None) -> None:
    monkeypatch.setenv("AXOLOTL_DO_NOT_TRACK", "1")
    loaders = pytest.importorskip("axolotl.loaders", exc_type=ImportError)
    from axolotl.integrations.base import PluginManager
    from axolotl.utils.collators import V2BatchSamplerDataCollatorForSeq2Seq
    from axolotl.utils.config import prepare_plugins, validate_config
    from axolotl.utils.dict import DictDefault

    words = tokenizer()
    words.save_pretrained(tmp_path)
    tiny_model("mistral").float().save_pretrained(tmp_path)
    options: dict[str, Any] = {
        "base_model": str(tmp_path), "plugins": [PLUGIN], "sample_packing": True, "sequence_len": 64,
        "micro_batch_size": 2, "gradient_accumulation_steps": 1, "learning_rate": 0.1, "num_epochs": 1,
        "datasets": [{"path": str(tmp_path), "type": "completion"}], "output_dir": str(tmp_path / "out"),
        "adapter": adapter, "lora_r": 4, "lora_alpha": 8, "lora_target_modules": ["q_proj"],
    }  # fmt: skip
    config = DictDefault({name: value for name, value in options.items() if adapter or not name.startswith("lora")})
    prepare_plugins(config)
    config = validate_config(config)
    manager = PluginManager.get_instance()
    manager.cfg = config
    manager.load_datasets(config, preprocess=False)
    model, _ = loaders.ModelLoader(config, words).load()  # which calls the plugin
    assert config.attn_implementation == "sdpa"
    with tritonpack.patch(model) as again:
        assert again.report.attention == "tritonpack"

    ids = [document["input_ids"] for document in features()[:7]]
    whole = [
        {"input_ids": x, "labels": x, "attention_mask": [1] * len(x), "position_ids": [*range(len(x))]} for x in ids
    ]
    batch = V2BatchSamplerDataCollatorForSeq2Seq(words)([whole[:4], whole[4:]])
    assert int(batch["attention_mask"].max()) == 4  # it numbers documents
    model.eval()
    lengths = [sum(map(len, row)) for row in (ids[:4], ids[4:])]
    with torch.no_grad():
        alone = torch.cat([model(torch.tensor([one])).logits[0] for one in ids])
        for left_out in (set(), {"attention_mask"}):
            logits = model(**{name: x for name, x in batch.items() if name not in {"labels", *left_out}}).logits
            got = torch.cat([row[:n] for row, n in zip(logits, lengths, strict=True)])
            assert apart(got, alone) < EXACT
    manager.post_train_unload(config)
    assert applied_to(model) == []
