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
from rich.console import Console

import tritonpack
from tests.cli.command import run
from tritonpack.cli import check as command
from tritonpack.cli.small_copies.shrink import shrink

TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
ROWS = list(command.FORMS.values())


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def cells(output):
    """Form -> the verdicts in the table: stock, tritonpack."""
    found = re.findall(r"│ (.+?) +│ (\w+).*? +│ (\w+).*? +│\n", output)
    return {form: (stock, patched) for form, stock, patched in found}


def config_of(kind, **values):
    return transformers.CONFIG_MAPPING[kind](**values)


@pytest.fixture
def tiny(tmp_path):
    """A folder with weights, written by save_pretrained."""
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config_of("llama", **TINY)).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.mark.heavy
def test_small_copy_of_a_folder(tiny, capsys):
    assert run("check", tiny) == 0
    output = capsys.readouterr().out
    assert f"{tiny}: a small random copy of LlamaForCausalLM, a causal language model; " in output
    assert cells(output) == {form: ("exact" if "use_cache=False" in form else "leak", "exact") for form in ROWS}
    assert "llama: 2 layers; backend blocked (auto, on cpu), in place of sdpa" in output
    assert output.endswith("tritonpack: exact\n")


@pytest.mark.heavy
def test_progress_is_shown_on_a_terminal(tiny, capsys, monkeypatch):
    capsys.readouterr()
    run("check", tiny)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(command, "Console", lambda **options: Console(force_terminal=True, **options))
    run("check", tiny)
    assert "tritonpack: position_ids, attention_mask, two rows" in capsys.readouterr().err


def test_weights(tiny, tmp_path, capsys):
    path = tmp_path / "findings.json"
    assert run("check", tiny, "--weights", "--device", "cpu", "--json", path) == 0
    output = capsys.readouterr().out
    assert f"{tiny}: LlamaForCausalLM, a causal language model; " in output
    assert "the longest document has 11 tokens, so longer windows, chunks and selections had no effect" in output
    found = json.loads(path.read_text())
    assert (found["weights"], found["model_type"], found["class"]) == (True, "llama", "LlamaForCausalLM")
    assert found["stock"]["forms"]["position_ids"]["verdict"] == "leak"
    assert found["stock"]["forms"]["position_ids"]["moved"] > 0.01
    assert found["tritonpack"]["verdict"] == "exact"
    assert max(form["worst"] for form in found["tritonpack"]["forms"].values()) < 1e-5
    assert max(form["moved"] for form in found["tritonpack"]["forms"].values()) == 0.0


@pytest.mark.heavy
def test_windows_and_caps(tmp_path, capsys):
    config_of("gemma2").save_pretrained(tmp_path)
    assert run("check", tmp_path / "config.json") == 0
    output = capsys.readouterr().out
    assert "gemma2: 2 layers, 1 with a sliding window of [4], softcap 50; backend blocked (auto, on cpu)" in output
    assert set(cells(output)) == set(ROWS)


@pytest.mark.heavy
def test_recurrences(tmp_path, capsys):
    config_of("qwen3_next").save_pretrained(tmp_path)
    assert run("check", tmp_path, "--json", tmp_path / "findings.json") == 0
    output = capsys.readouterr().out
    assert "run document by document: model.layers.0.linear_attn\n" in output
    found = json.loads((tmp_path / "findings.json").read_text())
    assert found["stock"]["forms"]["without_cache"]["verdict"] == "leak"
    assert found["compared"] == "outputs and gradients"
    assert found["tritonpack"]["report"].startswith("qwen3_next: 2 layers; backend blocked (auto, on cpu)")


@pytest.mark.heavy
def test_model_that_fails_with_a_cache_is_called_without(tmp_path, capsys):
    config_of("blt", architectures=["BltForCausalLM"]).save_pretrained(tmp_path)
    assert run("check", tmp_path) == 1
    output = capsys.readouterr().out
    assert set(cells(output).values()) == {("leak", "refused")}
    assert "it is called with use_cache=False, because with a cache it fails: AttributeError: 'BltConfig'" in output


@pytest.mark.heavy
def test_refused_model_exits_with_1(tmp_path, capsys):
    config_of("prophetnet").save_pretrained(tmp_path)
    assert run("check", tmp_path) == 1
    output = capsys.readouterr().out
    assert cells(output)["position_ids"] == ("leak", "refused")
    assert re.search(r"tritonpack: refused: ProphetNetForCausalLM .* can't be packed exactly: its decoder", output)


@pytest.mark.heavy
def test_encoder_with_decoder(tmp_path, capsys):
    config_of("t5").save_pretrained(tmp_path)
    assert run("check", tmp_path, "--json", tmp_path / "findings.json") == 0
    output = capsys.readouterr().out
    assert "a small random copy of T5Model, a model without a language head" in output
    assert set(cells(output).values()) == {("leak", "exact")}


SCORES = {"num_labels": 3, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}


@pytest.mark.parametrize(
    ("kind", "named", "values"),
    [
        ("llama", "LlamaForTokenClassification", SCORES),
        ("llama", "LlamaModel", {}),
        ("bert", "BertForTokenClassification", {}),
        ("electra", "ElectraForPreTraining", {}),
        ("t5", "T5ForConditionalGeneration", {}),
    ],
)
@pytest.mark.sampled(every=2)
def test_class_in_architectures_is_checked(kind, named, values, tmp_path, capsys):
    config_of(kind, architectures=[named], **values).save_pretrained(tmp_path)
    assert run("check", tmp_path, "--json", tmp_path / "findings.json") == 0
    output = capsys.readouterr().out
    assert f"a small random copy of {named}, the class that its configuration names; " in output
    assert {patched for _, patched in cells(output).values()} == {"exact"}
    found = json.loads((tmp_path / "findings.json").read_text())
    assert (found["class"], found["instead_of"]) == (named, None)


def test_class_that_patch_refuses_exits_with_1(tmp_path, capsys):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    config_of("splinter", architectures=["SplinterForPreTraining"], **sizes).save_pretrained(tmp_path)
    assert run("check", tmp_path) == 1
    assert "tritonpack: refused: SplinterForPreTraining" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ("Nope", r"Nope, which isn't a model class of transformers \S+"),
        ("BertForMaskedLM", "BertForMaskedLM, which takes a BertConfig and no LlamaConfig"),
        ("LlamaConfig", r"LlamaConfig, which isn't a model class of transformers \S+"),
    ],
)
def test_note_if_another_class_than_architectures_is_checked(named, reason, tmp_path, capsys):
    config_of("llama", architectures=[named], **TINY).save_pretrained(tmp_path)
    assert run("check", tmp_path, "--json", tmp_path / "findings.json") == 0
    output = capsys.readouterr().out
    assert f"LlamaForCausalLM in place of {named}" in output[: output.index("position_ids")], "the table's title"
    assert re.search(f"Note: its configuration names the class {reason}; LlamaForCausalLM was checked in", output)
    assert output.endswith(f"tritonpack: exact: for LlamaForCausalLM, in place of {named}\n")
    found = json.loads((tmp_path / "findings.json").read_text())
    assert (found["class"], found["instead_of"]) == ("LlamaForCausalLM", named)


def test_weights_of_the_class_in_architectures(tmp_path, capsys):
    torch.manual_seed(0)
    config = config_of("llama", **TINY, **SCORES)
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    assert run("check", tmp_path, "--weights", "--device", "cpu") == 1
    output = capsys.readouterr().out
    assert f"{tmp_path}: LlamaForSequenceClassification, the class that its configuration names; " in output
    assert (
        "tritonpack: refused: position_ids: UnsupportedModelError: LlamaForSequenceClassification gives one" in output
    )


@pytest.mark.parametrize("options", [[], ["--weights", "--device", "cpu"]], ids=["small copy", "weights"])
def test_model_without_layers_exits_with_3(options, tmp_path, capsys):
    config = config_of("llama", **{**TINY, "num_hidden_layers": 0}, architectures=["LlamaForCausalLM"])
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    capsys.readouterr()
    assert run("check", tmp_path, *options, "--json", tmp_path / "findings.json") == 3
    captured = capsys.readouterr()
    assert captured.out.endswith(
        "tritonpack: nothing to keep apart: in LlamaForCausalLM no token sees another; is the number of layers right?\n"
    )
    assert "exact" not in captured.out
    found = json.loads((tmp_path / "findings.json").read_text())
    assert (found["stock"]["verdict"], found["tritonpack"]["forms"]) == ("nothing to keep apart", {})


def test_leak_exits_with_3(tiny, capsys, monkeypatch):
    handle = contextlib.nullcontext(SimpleNamespace(report="nothing was changed", prove=lambda: None))
    monkeypatch.setattr(command, "patch", lambda model: handle)
    assert run("check", tiny) == 3
    output = capsys.readouterr().out
    assert cells(output)[ROWS[0]] == ("leak", "leak")
    assert re.search(
        r"nothing was changed\ntritonpack: leak: position_ids: logits: \S+ from another document, \S+ in all\n$", output
    )


def test_inexact_model_is_tried_in_float64_and_exits_with_3(tmp_path, capsys, monkeypatch):
    config_of("llama").save_pretrained(tmp_path)

    @contextlib.contextmanager
    def shifted(model):
        """Keep documents apart, and compute wrong values for each."""
        with tritonpack.patch(model) as handle:
            hook = model.lm_head.register_forward_hook(lambda module, arguments, output: output + 1e-3)
            yield handle
            hook.remove()

    monkeypatch.setattr(command, "patch", shifted)
    assert run("check", tmp_path) == 3
    output = capsys.readouterr().out
    assert "parameters, float64" in output
    assert cells(output)["position_ids"] == ("leak", "inexact")


def test_note_on_rotary_embeddings_of_the_longest_document(tmp_path, capsys):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 4096}
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    config_of("llama", rope_parameters={**rope, **factors}).save_pretrained(tmp_path)
    assert run("check", tmp_path) == 3
    output = " ".join(capsys.readouterr().out.split())
    assert "Note: rotary embeddings of the type 'longrope' follow the longest document of a call" in output
    assert "and differ beyond 4,096 tokens (8 in the small copy)" in output
    assert "Pack documents of up to 8 tokens" in output


def test_language_model_is_checked_if_the_whole_cannot_be_built(tmp_path, capsys, monkeypatch):
    config_of("gemma3").save_pretrained(tmp_path)

    def broken(config):
        if config.model_type == "gemma3":
            raise ImportError("a tower needs a package that isn't here")
        return shrink(config)

    monkeypatch.setattr("tritonpack.cli.small_copies.small_copy.shrink", broken)
    assert run("check", tmp_path) == 0
    output = capsys.readouterr().out
    assert "a small random copy of Gemma3ForCausalLM, a causal language model" in output
    assert "only the language model inside was built, because the whole can't be: ImportError: a tower needs" in output


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
    assert run("check", folder, "--trust-remote-code") == 0
    assert "a small random copy of OurModel, a causal language model" in capsys.readouterr().out


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
        ("x.json", '{"model_type": "llama", "hidden_act": "no"}', r"json: no small copy can be built: KeyError: 'no';"),
        (
            "x.json",
            '{"model_type": "hunyuan_v1_dense", "num_attention_heads": 32}',
            r"no small copy can be built: TypeError: unsupported operand .*, or load the model with --weights$",
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
        (["--device", "cuda"], "small copies run on the CPU"),
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
