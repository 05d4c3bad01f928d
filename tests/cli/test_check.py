import json
import re
import sys
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("transformers")

import transformers

from tests.cli.command import refused, run
from tritonpack.cli import check as command

SCORES = {"num_labels": 3, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
TINY = SMALL | {"vocab_size": 64, "num_key_value_heads": 1}


@pytest.fixture(autouse=True)
def _wide_terminal_without_gpu(monkeypatch):
    monkeypatch.setenv("COLUMNS", "2000")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def config_of(kind, **values):
    return transformers.CONFIG_MAPPING[kind](**values)


@pytest.mark.parametrize(
    ("kind", "named", "values", "code", "words"),
    [
        ("llama", "", {}, 0, r"class +LlamaForCausalLM in float32 *\npatch +llama: backend auto, in pl"),
        ("llama", "", {}, 0, r"\ntritonpack +exact: shown by tritonpack's tests with transformers \S+\. *\n$"),
        ("gemma2", "", {}, 0, "gemma2: backend auto, in place of"),
        ("qwen3_next", "", {}, 0, r"run document by document: model\.layers\.0\.linear_attn, "),
        ("t5", "T5ForConditionalGeneration", {}, 0, "T5ForConditionalGeneration in float32 *\n"),
        ("llama", "LlamaForSequenceClassification", SCORES, 1, "tritonpack +refused: .* gives one result for each row"),
        ("prophetnet", "", {}, 1, r"tritonpack +refused: ProphetNetForCausalLM .* can't be packed exactly: its dec"),
        ("splinter", "SplinterForPreTraining", SMALL, 3, "tritonpack +unknown: .* isn't a model .*--weights proves it"),
    ],
)  # fmt: skip
def test_configuration(kind, named, values, code, words, tmp_path, capsys):
    config_of(kind, architectures=[named] if named else None, **values).save_pretrained(tmp_path)
    assert run("check", tmp_path / "config.json", "--json", tmp_path / "findings.json") == code
    assert re.search(words, capsys.readouterr().out)
    found = json.loads((tmp_path / "findings.json").read_text())
    assert (found["weights"], found["model_type"], found["stock"]) == (False, kind, None)
    assert found["tritonpack"]["verdict"] == {0: "exact", 1: "refused", 3: "unknown"}[code]
    assert found["class"] == (named or found["class"])


def test_weights(tmp_path, capsys, monkeypatch):
    tiny, path = tmp_path / "tiny", tmp_path / "findings.json"
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config_of("llama", **TINY)).save_pretrained(tiny)
    arguments = ("check", tiny, "--weights", "--device", "cpu")
    assert run(*arguments, "--json", path) == 0
    output = capsys.readouterr().out
    for words in (
        rf"model +{re.escape(str(tiny))} *\nclass +LlamaForCausalLM in float32 *\npatch +llama: backend block",
        r"\nstock transformers +leak: documents of a batch packed by position_ids see each other",
        r"\ntritonpack +exact: isolated: documents of 9, 1, 23, 14 tokens; packed against alone",
    ):
        assert re.search(words, output), output
    found = json.loads(path.read_text())
    assert (found["weights"], found["model_type"], found["class"]) == (True, "llama", "LlamaForCausalLM")
    assert (found["stock"]["verdict"], found["tritonpack"]["verdict"]) == ("leak", "exact")

    monkeypatch.setattr(command, "patch", lambda model: nullcontext(Mock(report="nothing was changed")))
    assert run(*arguments) == 3
    leak = "tritonpack +leak: documents of a batch packed by position_ids see each other"
    assert re.search(f"nothing was changed *\nstock transformers +leak: .*\n{leak}", capsys.readouterr().out)


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OurConfig(LlamaConfig):
    model_type = "ours"

class OurModel(LlamaForCausalLM):
    config_class = OurConfig
"""


def test_own_code_needs_trust_remote_code(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "ours"
    folder.mkdir()
    auto_map = {"AutoConfig": "modeling_ours.OurConfig", "AutoModelForCausalLM": "modeling_ours.OurModel"}
    (folder / "config.json").write_text(json.dumps({**TINY, "model_type": "ours", "auto_map": auto_map}))
    (folder / "modeling_ours.py").write_text(CODE)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [str(tmp_path / "modules"), *sys.path])
    message = "Read its code first; --trust-remote-code runs it"
    assert message in refused(capsys, "check", folder)
    assert run("check", folder, "--trust-remote-code") == 3
    assert "OurModel in float32" in capsys.readouterr().out


LLAMA = '{{"model_type": "llama", {}}}'.format


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, r"there is no file or folder \S+config\.json"),
        ("", "folder", "the configuration of .* can't be loaded: .*Should have a `model_type` key in its config.json"),
        ("x.json", '{"model_type": "foo"}', "has model type `foo` but Transformers does not recognize"),
        ("x.json", LLAMA('"hidden_size": "many"'), "Field 'hidden_size' expected int, got str"),
        ("x.json", LLAMA('"architectures": ["Nope"]'), "the model .*json can't be built: .*transformers has no.* Nope"),
        ("x.json", LLAMA('"architectures": 5'), "the model .*json can't be built: TypeError"),
        ("x.json", LLAMA('"hidden_act": "no"'), "the model .*json can't be built: KeyError: 'no'"),
    ],
)  # fmt: skip
def test_wrong_configuration(name, content, message, tmp_path, capsys):
    path = tmp_path / name
    if content and content != "folder":
        (path if name else path / "config.json").write_text(content)
    assert re.search(message, refused(capsys, "check", path).strip())
