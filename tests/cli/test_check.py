import contextlib
import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("transformers")

import transformers

from tests.cli.command import run
from tritonpack.cli import check as command
from tritonpack.patches import proof

TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def config_of(kind, **values):
    return transformers.CONFIG_MAPPING[kind](**values)


@pytest.fixture
def tiny(tmp_path):
    """A folder with weights, written by save_pretrained."""
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config_of("llama", **TINY)).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


SCORES = {"num_labels": 3, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("kind", "named", "values", "code", "words"),
    [
        ("llama", "", {}, 0, r": LlamaForCausalLM; float32\nllama: 32 layers; backend auto, in place of sdpa\n"),
        ("llama", "", {}, 0, r"\ntritonpack: exact: shown by tritonpack's tests with transformers \S+\.\n$"),
        ("gemma2", "", {}, 0, r"26 layers, 13 with a sliding window of \[4096\], softcap 50; backend auto"),
        ("qwen3_next", "", {}, 0, r"run document by document: model\.layers\.0\.linear_attn, "),
        ("t5", "", {}, 0, r": T5Model; float32"),
        ("t5", "T5ForConditionalGeneration", {}, 0, ": T5ForConditionalGeneration; float32"),
        ("bert", "BertForTokenClassification", {}, 0, ": BertForTokenClassification; float32"),
        ("llama", "LlamaModel", {}, 0, ": LlamaModel; float32"),
        ("llama", "LlamaForSequenceClassification", SCORES, 1, "tritonpack: refused: .* gives one result for each row"),
        (
            "prophetnet",
            "",
            {},
            1,
            r"tritonpack: refused: ProphetNetForCausalLM .* can't be packed exactly: its decoder",
        ),
        ("splinter", "SplinterForPreTraining", SMALL, 3, "tritonpack: unknown: .* isn't a model .*--weights proves it"),
        ("llama", "Nope", {}, 0, r"LlamaForCausalLM, in place of Nope: transformers \S+ has no such model class; "),
        ("llama", "BertForMaskedLM", {}, 0, "in place of BertForMaskedLM: that class takes no LlamaConfig; "),
        ("llama", "LlamaConfig", {}, 0, "in place of LlamaConfig: .* has no such model class; "),
    ],
)
def test_configuration(kind, named, values, code, words, tmp_path, capsys):
    config_of(kind, architectures=[named] if named else None, **values).save_pretrained(tmp_path)
    assert run("check", tmp_path, "--json", tmp_path / "findings.json") == code
    assert re.search(words, capsys.readouterr().out)
    found = json.loads((tmp_path / "findings.json").read_text())
    assert (found["weights"], found["model_type"], found["stock"]) == (False, kind, None)
    assert found["tritonpack"]["verdict"] == {0: "exact", 1: "refused", 3: "unknown"}[code]
    assert (found["instead_of"] or found["class"]) == (named or found["class"])


def test_configuration_of_a_model_that_fits_in_no_memory(tmp_path, capsys):
    config_of("deepseek_v3").save_pretrained(tmp_path)
    assert run("check", tmp_path / "config.json") == 0
    assert "deepseek_v3: 61 layers" in capsys.readouterr().out


def test_weights(tiny, tmp_path, capsys):
    path = tmp_path / "findings.json"
    assert run("check", tiny, "--weights", "--device", "cpu", "--json", path) == 0
    output = capsys.readouterr().out
    assert f"{tiny}: LlamaForCausalLM; float32\nllama: 2 layers; backend blocked (auto, on cpu)" in output
    assert "stock transformers: leak: documents of a batch packed by position_ids see each other" in output
    assert "tritonpack: exact: isolated: documents of 9, 1, 23, 14 tokens; packed against alone" in output
    found = json.loads(path.read_text())
    assert (found["weights"], found["model_type"], found["class"]) == (True, "llama", "LlamaForCausalLM")
    assert (found["stock"]["verdict"], found["tritonpack"]["verdict"]) == ("leak", "exact")


def test_weights_of_an_unknown_class(tmp_path, capsys, monkeypatch):
    torch.manual_seed(0)
    transformers.ElectraForPreTraining(config_of("electra", **SMALL)).save_pretrained(tmp_path)
    monkeypatch.setattr(proof, "is_shown", lambda kind, **_: False)
    assert run("check", tmp_path) == 3
    assert run("check", tmp_path, "--weights", "--device", "cpu") == 0
    assert "tritonpack: exact" in capsys.readouterr().out


def test_weights_of_a_class_with_one_result(tmp_path, capsys):
    torch.manual_seed(0)
    config = config_of("llama", **TINY, **SCORES)
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    assert run("check", tmp_path, "--weights", "--device", "cpu") == 1
    assert "tritonpack: refused: LlamaForSequenceClassification gives one" in capsys.readouterr().out


def test_leak_exits_with_3(tiny, capsys, monkeypatch):
    handle = contextlib.nullcontext(SimpleNamespace(report="nothing was changed", prove=lambda: None))
    monkeypatch.setattr(command, "patch", lambda model: handle)
    assert run("check", tiny, "--weights", "--device", "cpu") == 3
    assert "nothing was changed\nstock transformers: leak" in (output := capsys.readouterr().out)
    assert "\ntritonpack: leak: documents of a batch packed by position_ids see each other" in output


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
    assert run("check", folder) == 2
    assert "brings code of its own, which isn't run unless you say --trust-remote-code" in capsys.readouterr().err
    assert run("check", folder, "--trust-remote-code") == 3
    assert f"{folder}: OurModel; float32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, r"there is no file or folder \S+config\.json"),
        ("", "folder", r"\S+ has no config\.json; name a folder that save_pretrained wrote, or a config\.json"),
        ("x.json", "nonsense", r"x\.json isn't JSON: Expecting value: line 1 column 1 .*; name the config\.json of a"),
        ("x.json", "[1]", r"x\.json holds \[1\], not a JSON object; write a model's configuration"),
        ("x.json", "{}", r"the configuration of \S+x\.json names no model_type"),
        ("", '{"a": 1}', r"the configuration of \S+ names no model_type"),
        ("x.json", '{"model_type": "foo"}', r"is of the model type 'foo', which transformers \S+ doesn't know"),
        (
            "x.json",
            '{"model_type": "llama", "hidden_size": "many"}',
            r"error: transformers \S+ refuses the configuration of \S+x\.json: TypeError: Field 'hidden_size' expected "
            r"int, got str \(value: 'many'\); correct its config\.json$",
        ),
        ("x.json", '{"model_type": "llama", "hidden_size": 33}', r"refuses .*: The hidden size \(33\) is not"),
        ("x.json", '{"model_type": "llama", "num_attention_heads": 0}', r"refuses .*: ZeroDivisionError: .*; correct"),
        ("x.json", '{"model_type": "llama", "architectures": 5}', r"has architectures=5; write a list of class names"),
        ("x.json", '{"model_type": "llama", "hidden_act": "no"}', r"json: no model can be built: KeyError: 'no';"),
        (
            "x.json",
            '{"model_type": "hunyuan_v1_dense", "num_attention_heads": 32}',
            r"no model can be built: TypeError: unsupported operand .*; correct its configuration$",
        ),
    ],
)  # fmt: skip
def test_refused_configuration_prints_one_line_and_exits_with_2(name, content, message, tmp_path, capsys):
    path = tmp_path / name
    if content and content != "folder":
        (path if name else path / "config.json").write_text(content)
    assert run("check", path) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"error: [^\n]*\n", captured.err)
    assert re.search(message, captured.err.strip())


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        ("GatedRepoError", r"owner/model is gated: ask for access at https://huggingface\.co/owner/model, then log in"),
        ("RepositoryNotFoundError", r"owner/model is neither a file or folder here nor a model on the Hub"),
        ("LocalEntryNotFoundError", r"owner/model isn't in the cache, and the Hub can't be reached; its config\.json"),
    ],
)
def test_errors_of_the_hub(cause, message, capsys, monkeypatch):
    def from_pretrained(name, **options):
        raise OSError("several\nlines") from type(cause, (Exception,), {})()

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", from_pretrained)
    assert run("check", "owner/model") == 2
    captured = capsys.readouterr()
    assert re.fullmatch(r"error: [^\n]*\n", captured.err)
    assert re.search(message, captured.err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing argument 'MODEL'"),
        (["--device", "cuda"], "--device is for --weights"),
        (["--device", "cuda", "--weights"], "torch sees no GPU here; use --device cpu or auto"),
        (["--json", "/proc/nowhere/x"], "--json /proc/nowhere/x can't be written: .*; name another file"),
        (["--json", "/proc/x.json"], "--json /proc/x.json can't be written: .*; name another file"),
        (["--weights"], r"config\.json has no weights; name its folder, or leave out --weights"),
    ],
)
def test_wrong_options(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config_of("llama", **TINY).save_pretrained(tmp_path)
    assert run("check", *([tmp_path / "config.json"] if arguments else []), *arguments) == 2
    assert re.search(message, capsys.readouterr().err)


def test_folder_without_weights_is_refused(tmp_path, capsys):
    config_of("llama", **TINY).save_pretrained(tmp_path)
    assert run("check", tmp_path, "--weights") == 2
    assert re.search(r"can't be loaded: OSError: Error no file named model\.safetensors", capsys.readouterr().err)
