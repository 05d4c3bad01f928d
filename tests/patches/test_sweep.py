"""Every class agrees with what the sweep has found of it; the sweep's judge, its results and their pages are right."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import tritonpack
from tests.patches import table, zoo
from tests.patches.sweep import forms, results
from tests.patches.sweep.classes import Case, cases, no_text
from tests.patches.sweep.judging import Trial, judge_case
from tests.patches.sweep.results import OPTIONS, Row
from tests.patches.sweep.subject import Subject
from tritonpack.patches import compact
from tritonpack.patches.measuring import quiet

ROOT = Path(__file__).parents[2]
CASES = {case.key: case for case in cases()}
STORED = {(row.key, row.how): row for row in results.load(version=transformers.__version__)}
BUILT = sorted(key for key in CASES if (row := STORED.get((key, "patch"))) and row.verdict not in results.NEVER)
CAUSAL = [key for key in BUILT if CASES[key].takes_options]
RERUN = "run `python -m tests.patches.sweep` and `python -m tests.patches.table`, and mend or refuse what is wrong"

# Every class

# Classes that differ most from each other: (class, how).
FEW = """
    MixtralForCausalLM/mixtral-name BltForCausalLM/blt-unpad GptOssForCausalLM/gpt_oss-share_prefixes
    Llama4ForCausalLM/llama4_text-unpad Qwen3NextForCausalLM/qwen3_next-share_prefixes
    BartForConditionalGeneration/bart-name MistralForCausalLM/mistral-share_prefixes
    MixtralForCausalLM/mixtral-unpad Mamba2ForCausalLM/mamba2-unpad GPT2LMHeadModel/gpt2-share_prefixes
    LayoutLMv2ForTokenClassification/layoutlmv2-patch LayoutLMv3Model/layoutlmv3-patch LukeModel/luke-patch
    FlaubertModel/flaubert-patch Gemma3nForCausalLM/gemma3n_text-patch XLNetLMHeadModel/xlnet-patch
    XLMWithLMHeadModel/xlm-patch ZayaForCausalLM/zaya-patch BertForSequenceClassification/bert-patch
    T5ForConditionalGeneration/t5-patch SeamlessM4Tv2ForTextToText/seamless_m4t_v2-patch
    MBartForQuestionAnswering/mbart-patch BertModel/bert-patch AlbertForPreTraining/albert-patch
    GPTNeoForTokenClassification/gpt_neo-patch BertForMultipleChoice/bert-patch
    Qwen3MoeForQuestionAnswering/qwen3_moe-patch ColModernVBertForRetrieval/colmodernvbert-patch
    LlamaForCausalLM/llama-patch Qwen2ForCausalLM/qwen2-patch MixtralForCausalLM/mixtral-patch
    PhimoeForCausalLM/phimoe-patch Gemma2ForCausalLM/gemma2-patch JambaForCausalLM/jamba-patch
    """
TRIED = [(key, how) for key in BUILT for how in ("patch", "name", *(OPTIONS if key in CAUSAL else ()))]


@pytest.mark.parametrize(("key", "how"), TRIED, ids=[f"{key}-{how}" for key, how in TRIED])
@pytest.mark.fast(*FEW.split(), *(f"{key}-patch" for key in BUILT[3::140]))
def test_a_class_agrees_with_the_table(key: str, how: str) -> None:
    stored = STORED[key, how]
    with quiet():
        (row,) = judge_case(CASES[key], (how,))
    got, want = (row.forms, stored.forms) if stored.forms else (row.verdict, stored.verdict)
    assert got == want, f"{key} isn't what the table says ({row.reason}): {RERUN}"


@pytest.mark.parametrize("how", ["patch", *OPTIONS])
@pytest.mark.parametrize("name", zoo.VARIANTS)
@pytest.mark.fast(
    "electra-encoder-unpad", "gemma4-experts-share_prefixes", "mistral-full-share_prefixes", "doge-experts-patch",
    "gemma-bidirectional-patch", "xlnet-causal-patch",
)  # fmt: skip
def test_variants_are_exact_or_refused(name: str, how: str) -> None:
    config = zoo.tiny_config(name)
    kind = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    one_row = name == "xlnet-causal"  # its causal mask has room for one row
    chosen = [form for form in forms.NAMES if not one_row or not ("two_rows" in form or "padded" in form)]
    with quiet():
        (row,) = judge_case(Case(kind.__name__, name, ("CAUSAL_LM",)), (how,), chosen)
    if how == "patch":
        assert row.verdict == ("refused" if name in zoo.REFUSED else "exact"), row.reason
        assert zoo.REFUSED.get(name, "") in row.reason
    else:
        assert row.verdict in ("exact", "refused"), row.reason


def test_every_class_of_every_mapping_has_been_tried() -> None:
    """A new version of transformers, or a new class in it, fails this test. Those without text are left out."""
    missing = [key for key in CASES if (key, "patch") not in STORED]
    assert not missing, f"{len(missing)} classes of transformers {transformers.__version__} weren't tried: {RERUN}"
    for x in [x for x in cases() if x.model_type.startswith("v")]:  # to import all takes long
        if (row := STORED.get((x.key, "patch"))) and row.verdict == "no text":
            assert no_text(getattr(transformers, x.name))


def test_no_class_is_wrong_with_any_transformers() -> None:
    assert [f"{row.version} {row.key} {row.how}" for row in results.load() if row.verdict in ("wrong", "error")] == []
    padded = [row for row in STORED.values() if row.how in OPTIONS]
    assert {row.verdict for row in padded} <= {"exact", "as it is", "refused", "not built"}
    assert [row.key for row in padded if row.verdict != "exact" and (not row.reason or row.bare)] == []
    assert [row.key for row in padded if ": ran on " in row.reason] == []


def test_the_pages_and_the_table_agree_with_the_results(tmp_path: Path) -> None:
    found = table.Found(STORED.values())
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert page == table.page(found, transformers.__version__), RERUN
    path = tmp_path / results.SHOWN.name
    shutil.copy(results.SHOWN, path)
    results.save_shown(results.load(), path)
    assert path.read_text() == results.SHOWN.read_text()
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert table.sentence(found, transformers.__version__) in readme
    patched = [key for key in CAUSAL if STORED[key, "patch"].verdict == "exact"]
    exact = [sum(STORED[key, option].verdict == "exact" for key in patched) for option in OPTIONS]
    said = f"Of {len(patched)} causal classes that are packed exactly, {exact[0]} leave out all padding and {exact[1]}"
    assert f"{said} share common beginnings." in readme


# The judge: how a model is changed, the forms, and their verdicts

LLAMA = "LlamaForCausalLM/llama"


def changed(change: Callable[[Any], Any], where: str = "lm_head") -> Any:
    """Return a patch that also changes the output of a part of the model."""

    @contextlib.contextmanager
    def patch(model: nn.Module, **options: bool) -> Iterator[Any]:
        with tritonpack.patch(model, **options) as handle:
            handle.prove()  # of what the model was before
            hook = model.get_submodule(where).register_forward_hook(lambda module, args, output: change(output))
            yield handle
            hook.remove()

    return patch


without = contextlib.nullcontext  # a patch that does nothing


def raising(error: Exception, rows: int = 1) -> Callable[[Tensor], Tensor]:
    def check(output: Tensor) -> Tensor:
        if output.shape[0] >= rows:
            raise error
        return output

    return check


def add_to_loss(output: Any) -> None:
    output.aux_loss = output.aux_loss and output.aux_loss + 1e-3


def half_a_gradient(output: Tensor) -> Tensor:
    return output.detach() / 2 + output / 2


LOSSES = {form for form in forms.COMPACTED if form in forms.LOSSES}  # a softmax doesn't see a constant
ODD, ROWS = tritonpack.UnsupportedModelError("it is odd."), tritonpack.UnsupportedModelError("pass one row.")
# the class, a way, a patch, the verdicts of forms
JUDGED: list[tuple[str, str, Any, dict[str, str]]] = [
    (LLAMA, "patch", tritonpack.patch, {"position_ids": "exact", "two_rows": "exact"}),
    (LLAMA, "patch", without, {"position_ids": "wrong", "two_rows": "wrong"}),
    (LLAMA, "patch", changed(lambda x: x + 1e-3), {"position_ids": "wrong", "float32": "wrong"}),
    (LLAMA, "patch", changed(half_a_gradient, "model.norm"), {"position_ids": "wrong", "two_rows": "exact"}),
    (LLAMA, "patch", changed(lambda x: x if x.dtype != torch.bfloat16 else x.round()),
     {"float32": "exact", "bfloat16": "wrong"}),
    (LLAMA, "patch", changed(raising(ODD)), {"position_ids": "refused"}),
    (LLAMA, "patch", changed(raising(ROWS, rows=2)), {"position_ids": "exact", "two_rows": "refused"}),
    (LLAMA, "patch", changed(raising(RuntimeError("broken"))), {"position_ids": "error"}),
    ("LlamaForSequenceClassification/llama", "patch", without, {"position_ids": "wrong", "padded_right": "exact"}),
    ("BertModel/bert", "patch", without, {"position_ids": "wrong", "padded_left": "stock"}),
    ("MixtralForCausalLM/mixtral", "patch", changed(add_to_loss, ""),
     {"position_ids": "exact", "loss_position_ids": "wrong"}),
    (LLAMA, "unpad", changed(lambda x: x + 1e-3),
     {form: "exact" if form in LOSSES else "wrong" for form in forms.COMPACTED}),
    (LLAMA, "unpad", changed(half_a_gradient),
     {form: "exact" if form == "hidden_states_padded" else "wrong" for form in forms.COMPACTED}),
]  # fmt: skip


@pytest.mark.parametrize(("key", "how", "patch", "verdicts"), JUDGED)
def test_verdicts(key: str, how: str, patch: Any, verdicts: dict[str, str]) -> None:
    with quiet():
        row = Trial(CASES[key], how if how in OPTIONS else "", verdicts).run(how, patch)
    assert row.forms == verdicts
    of_class = min(verdicts.values(), key=results.VERDICTS.index)
    assert row.verdict == ("partly" if {*verdicts.values()} == {"exact", "refused"} else of_class)
    assert row.bare == ("it is odd" in row.reason)  # it has no remedy


def test_padded_batches_that_save_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact, "WORTHWHILE", 0.0)  # no tree is worthwhile, and padding alone is removed
    row = Trial(CASES[LLAMA], "share_prefixes", ("padded_right",)).run("share_prefixes")
    assert (row.verdict, row.forms) == ("as it is", {"padded_right": "as it is"})
    assert "ran on 57 of 88 tokens, and 33 would do" in row.reason


def test_saved_rows_are_loaded_unchanged(tmp_path: Path) -> None:
    exact, wrong = dict.fromkeys(forms.ALL, "exact"), dict.fromkeys(forms.ALL, "wrong")
    without_losses = {form: verdict for form, verdict in exact.items() if form not in forms.LOSSES}
    for verdicts in ({}, exact, without_losses, {**wrong, "two_rows": "exact", "loss_collator": "refused"}):
        row = Row("A/b", "patch", "exact", "why", verdicts, 1e-7, "note", "dense", True, True, 1.2)
        results.save([row], tmp_path)
        assert results.load(tmp_path) == [row]
    for how, verdict in (("patch", "wrong"), ("name", "exact"), ("patch", "exact")):
        results.append(Row("A/b", how, verdict), tmp_path)
    last = {row.how: row.verdict for row in results.load(tmp_path)}
    assert last == {"name": "exact", "patch": "exact"}, "the last row of a class counts"


def test_shown_classes(tmp_path: Path) -> None:
    """A class is shown if all its types are exact, at least in part, without a proof. Other versions stay."""
    verdicts = {"A/a": "exact", "B/a": "partly", "C/a": "refused", "D/a": "wrong", "E/a": "exact", "E/b": "error"}
    rows = [Row(key, "patch", verdict, version="5.23.1") for key, verdict in verdicts.items()]
    rows += [Row("C/a", "name", "exact", version="5.23.1"), Row("F/a", "patch", "partly", proven=True)]
    path = tmp_path / "exact_classes.csv"
    path.write_text("class,versions,in_trees\nA,5.4 5.23,5.4\nC,5.4,\nD,5.23,5.23\n")
    results.save_shown(rows, path)
    expected = ["class,versions,in_trees", "A,5.4 5.23,5.4", "B,5.23,", "C,5.4,", ""]
    assert path.read_text() == "\n".join(expected)


# The models

# Parameters whose part is over-looked most easily.
SUBTLE = ("sink", "A_log", "dt_bias", "time_", "conv", "decay", "recurrent", "relative_attention_bias")


@pytest.mark.parametrize("name", [*zoo.EXACT, *zoo.VARIANTS])
@pytest.mark.fast("bart", "gemma2", "gpt_oss", "llama4_text", "mistral", "qwen3_next", "gemma-bidirectional")
def test_what_a_row_of_the_zoo_sets_is_felt_by_short_documents(name: str) -> None:
    """Tokens change later ones, and every subtle parameter has gradients."""
    model, (ids,) = zoo.tiny_model(name), zoo.documents((20,))

    def run(model: Any) -> Tensor:
        return Subject(model, stock=True).call(forms.alone([ids]))["logits"][0]

    logits = run(model)
    assert torch.isfinite(logits).all()
    assert sum(p.numel() for p in model.parameters()) < 500_000
    if parameters := [p for n, p in model.named_parameters() if any(part in n for part in SUBTLE)]:
        gradients = torch.autograd.grad(logits.square().sum(), parameters, allow_unused=True)
        assert all(g is None or g.any() for g in gradients)
    with torch.no_grad():
        ids[0, 0] = zoo.FIRST_TOKEN + (ids[0, 0] - zoo.FIRST_TOKEN + 17) % 58
        assert (run(model) - logits)[3].abs().max() > 3e-3 * logits.abs().max()
