"""Padded batches in the sweep: the verdicts with `unpad` and `share_prefixes`, and what is stored of causal classes."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch import Tensor, nn

import tritonpack
from tests.patches import table
from tests.patches.sweep import forms, results
from tests.patches.sweep.classes import Case, cases
from tests.patches.sweep.padded import PaddedTrial, takes_options
from tests.patches.sweep.results import OPTIONS, Row
from tests.patches.sweep.running import judge_case
from tritonpack.patches import compact
from tritonpack.patches.measuring import quiet

STORED = {(row.key, row.how): row for row in results.load(version=transformers.__version__)}
CAUSAL = {case.key: case for case in cases() if takes_options(case)}
RERUN = "run `python -m tests.patches.sweep --how unpad share_prefixes --again` and `python -m tests.patches.table`"

# The others run in `make nightly`.
QUICK = ("blt", "gpt_oss", "llama4_text", "mixtral", "qwen3_next")

both = pytest.mark.parametrize("option", OPTIONS)


def trial(key: str, option: str, *chosen: str) -> PaddedTrial:
    return PaddedTrial(CAUSAL[key], option, chosen or forms.COMPACTED)


def llama(option: str, *chosen: str, **more: Any) -> Row:
    return trial("LlamaForCausalLM/llama", option, *chosen).run(option, **more)


@pytest.fixture(scope="module", autouse=True)
def tried() -> None:
    """The trial of Llama in trees is kept, so it must not run while a test changes the code."""
    assert llama("share_prefixes", "padded_left").verdict == "exact"


class TestVerdicts:
    @pytest.mark.fast("share_prefixes")
    @both
    def test_exact(self, option: str) -> None:
        row = llama(option)
        assert (row.verdict, row.reason, set(row.forms)) == ("exact", "", {*forms.COMPACTED})
        assert 0 < row.worst < 1e-6

    def test_documents_of_groups(self) -> None:
        documents = [document[0].tolist() for document in trial("LlamaForCausalLM/llama", "share_prefixes").documents]
        first, second, third, prompt, further, other, alone, equal = documents
        assert first[:4] == third[:4] == prompt == further[:4]
        assert first[:6] == further[:6] != third[:6]
        assert second[:3] == other[:3]
        assert (other, second[3:] != other[3:], alone[0] in (first[0], second[0])) == (equal, True, False)

    @pytest.mark.fast("True-unpad")
    @both
    @pytest.mark.parametrize("of_gradients", [False, True])
    def test_wrong_values_and_gradients(self, option: str, of_gradients: bool) -> None:
        def change(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return output.detach() / 2 + output / 2 if of_gradients else output + 1e-3

        def patch(model: Any, **options: bool) -> Any:
            model.lm_head.register_forward_hook(change)
            return tritonpack.patch(model, **options)

        row = llama(option, patch=patch)
        losses = {form for form in forms.COMPACTED if form in forms.LOSSES}  # a softmax doesn't see a constant
        right = {"hidden_states_padded"} if of_gradients else losses
        assert row.forms == {form: "exact" if form in right else "inexact" for form in forms.COMPACTED}

    @both
    def test_a_batch_that_runs_as_it_is(self, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compact.Compaction, "_may_replace", lambda *args: False)
        row = llama(option, "padded_left")
        assert (row.verdict, row.forms) == ("as it is", {"padded_left": "as it is"})
        assert "tokens, and" in row.reason

    def test_tokens_that_are_not_shared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Padding alone is removed, because no tree is worthwhile."""
        monkeypatch.setattr(compact, "WORTHWHILE", 0.0)
        row = llama("share_prefixes", "padded_right", "padded_left")
        assert set(row.forms.values()) == {"as it is"}
        assert "ran on 57 of 88 tokens, and 33 would do" in row.reason

    @both
    def test_padding_that_changes_a_model_is_no_excuse(self, option: str) -> None:
        """BART without a patch: its positions count the padding before a document."""

        class Nothing(contextlib.nullcontext[None]):
            saved = compact.Saved()

        row = trial("BartForCausalLM/bart", option, "padded_left").run(option, lambda *_, **__: Nothing())
        assert row.forms == {"padded_left": "inexact"}

    @pytest.mark.parametrize(
        ("key", "verdict", "reason"),
        [
            ("OPTForCausalLM/opt", "refused", "OPTDecoder passes by the OPTModel around it"),
            ("MusicgenForCausalLM/musicgen", "as it is", "several rows of ids"),
            ("BloomForCausalLM/bloom", "refused", "takes a dense mask"),
        ],
    )
    def test_reasons(self, key: str, verdict: str, reason: str) -> None:
        row = trial(key, "unpad", "padded_right").run("unpad")
        assert row.verdict == verdict
        assert reason in row.reason

    def test_one_row_for_each_way(self) -> None:
        with quiet():
            rows = judge_case(CAUSAL["LlamaForCausalLM/llama"], ("stock", *OPTIONS), ["position_ids", "padded_left"])
        assert [(row.how, row.forms) for row in rows] == [
            ("stock", {"position_ids": "leak"}), ("unpad", {"padded_left": "exact"}),
            ("share_prefixes", {"padded_left": "exact"}),
        ]  # fmt: skip
        assert judge_case(Case("LlamaForSequenceClassification", "llama", ("SEQUENCE_CLASSIFICATION",)), OPTIONS) == []

    @pytest.mark.parametrize(
        "verdicts",
        [
            dict.fromkeys(forms.COMPACTED, "exact"),
            {form: "exact" for form in forms.COMPACTED if form not in forms.LOSSES},
            {**dict.fromkeys(forms.COMPACTED, "exact"), "loss_padded_left": "as it is"},
        ],
    )
    def test_saved_rows_are_loaded_unchanged(self, verdicts: dict[str, str], tmp_path: Path) -> None:
        rows = [Row("A/b", how, "exact", forms=verdicts) for how in OPTIONS]
        results.save(rows, tmp_path)
        assert sorted(results.load(tmp_path), key=lambda row: row.how, reverse=True) == rows


class TestStored:
    """What is stored of every causal class."""

    def test_every_class_is_exact_or_has_a_reason(self) -> None:
        found = table.Found(STORED.values())
        rows = [found.of(case, option) for case in CAUSAL.values() for option in OPTIONS]
        assert {row.verdict for row in rows} <= {"exact", "as it is", "refused", "not built"}
        assert [row.key for row in rows if row.verdict != "exact" and (not row.reason or row.bare)] == []
        assert [row.key for row in rows if ": ran on " in row.reason] == []

    def test_the_readme_agrees_with_the_table(self) -> None:
        found = table.Found(STORED.values())
        patched = [case for case in CAUSAL.values() if found.of(case, "patch").verdict == "exact"]
        exact = [sum(found.of(case, option).verdict == "exact" for case in patched) for option in OPTIONS]
        said = (
            f"Of {len(patched)} causal classes that are packed exactly, {exact[0]} leave out all padding and {exact[1]}"
        )
        readme = Path(__file__).parents[2] / "README.md"
        assert f"{said} share common beginnings." in " ".join(readme.read_text(encoding="utf-8").split())

    @pytest.mark.fast("BltForCausalLM/blt-unpad")
    @both
    @pytest.mark.parametrize(
        "key", [k if k.partition("/")[2] in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in CAUSAL]
    )
    def test_a_class_agrees_with_the_table(self, key: str, option: str) -> None:
        stored = table.Found(STORED.values()).of(CAUSAL[key], option)
        with quiet():
            (row,) = judge_case(CAUSAL[key], (option,))
        assert (row.verdict, row.forms) == (stored.verdict, stored.forms), f"{key} is now {row.reason}: {RERUN}"

    def test_the_page_is_what_the_rows_say(self) -> None:
        page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
        assert page == table.page(table.Found(STORED.values()), transformers.__version__), RERUN
