"""The sweep's judge, its results, and a sample of the classes that it has shown."""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import tritonpack
from tests.patches import table
from tests.patches.sweep import build, forms, results, running
from tests.patches.sweep.classes import Case, cases, mappings, no_text
from tests.patches.sweep.judging import Trial, has_remedy
from tests.patches.sweep.results import ANY, Row
from tests.patches.sweep.running import judge_case
from tests.patches.sweep.subject import Subject
from tritonpack.patches.measuring import quiet

STORED = {(row.key, row.how): row for row in results.load(version=transformers.__version__)}

Patch = Callable[[nn.Module], contextlib.AbstractContextManager[Any]]


def case(name: str, model_type: str) -> Case:
    return next(x for x in cases() if (x.name, x.model_type) == (name, model_type))


def trial(name: str, model_type: str, *chosen: str) -> Trial:
    return Trial(case(name, model_type), chosen)


def changed(change: Callable[[Any], Any], where: str) -> Patch:
    """Return a patch that also changes the output of a part of the model."""

    @contextlib.contextmanager
    def patch(model: nn.Module) -> Iterator[None]:
        with tritonpack.patch(model) as handle:
            handle.prove()  # of what the model was before
            hook = model.get_submodule(where).register_forward_hook(lambda module, args, output: change(output))
            yield
            hook.remove()

    return patch


def without(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def broken(output: Any) -> Any:
    raise RuntimeError("broken")


class TestJudge:
    """Each verdict comes from its cause."""

    def test_exact(self) -> None:
        row = trial("LlamaForCausalLM", "llama", *forms.ALL).run("patch")
        assert (row.verdict, row.reason, set(row.forms)) == ("exact", "", {*forms.ALL})
        assert 0 < row.worst < 1e-6

    def test_leak(self) -> None:
        row = trial("LlamaForCausalLM", "llama", "position_ids", "two_rows").run("patch", without)
        assert row.forms == {"position_ids": "leak", "two_rows": "leak"}
        assert row.number > 0.1

    def test_inexact(self) -> None:
        shifted = changed(lambda output: output + 1e-3, "lm_head")
        row = trial("LlamaForCausalLM", "llama", "position_ids", "float32").run("patch", shifted)
        assert row.forms == {"position_ids": "inexact", "float32": "inexact"}

    def test_wrong_gradients(self) -> None:
        def halved(output: Tensor) -> Tensor:
            return output.detach() / 2 + output / 2

        row = trial("LlamaForCausalLM", "llama", *forms.WITH_GRADIENTS, "two_rows").run(
            "patch", changed(halved, "model.norm")
        )
        assert row.forms == {**dict.fromkeys(forms.WITH_GRADIENTS, "inexact"), "two_rows": "exact"}

    def test_more_error_than_the_model_alone_has(self) -> None:
        def rounded(output: Tensor) -> Tensor:
            return output if output.dtype != torch.bfloat16 else output.round()

        row = trial("LlamaForCausalLM", "llama", "position_ids", "float32", "bfloat16").run(
            "patch", changed(rounded, "lm_head")
        )
        assert row.forms == {"position_ids": "exact", "float32": "exact", "bfloat16": "inexact"}

    def test_one_score_for_several_documents_is_a_wrong_shape(self) -> None:
        row = trial("LlamaForSequenceClassification", "llama", "position_ids", "padded_right").run("patch", without)
        assert row.forms == {"position_ids": "shape", "padded_right": "exact"}
        assert row.reason == "position_ids: logits has shape (1, 3) for 4 documents in 1 x 22 tokens"

    def test_other_outputs_than_the_first(self) -> None:
        """Without a patch, hidden states leak and there is one pooled output for the row."""
        subject = trial("BertModel", "bert", "position_ids")
        kinds = {name: output.kind for name, output in subject.expected.items()}
        assert kinds == {"last_hidden_state": "token", "pooler_output": "document"}
        assert subject.run("patch", without).verdict == "leak"

    def test_losses(self) -> None:
        def more(output: Any) -> Any:
            if output.aux_loss is not None:
                output.aux_loss = output.aux_loss + 1e-3
            return output

        chosen = ("position_ids", "loss_position_ids", "loss_collator")
        mixtral = trial("MixtralForCausalLM", "mixtral", *chosen)
        assert mixtral.losses is not None
        assert set(mixtral.losses.expected.losses) == {"loss", "aux_loss"}
        assert set(mixtral.run("patch").forms.values()) == {"exact"}
        row = mixtral.run("patch", changed(more, ""))
        assert row.forms == {"position_ids": "exact", "loss_position_ids": "inexact", "loss_collator": "inexact"}

    def test_losses_of_sequences_are_the_mean_of_those_alone(self) -> None:
        told = trial("LlamaForSequenceClassification", "llama", "loss_position_ids")
        assert told.losses is not None
        given = []
        for document in told.documents:
            label = document[0, :1] % build.LABELS
            given.append(told.model(input_ids=document, labels=label).loss)
        mean = torch.stack(given).mean()
        assert torch.allclose(mean, told.losses.expected.losses["loss"])

    def test_refused_when_patched_and_in_the_call(self) -> None:
        row = trial("ProphetNetForCausalLM", "prophetnet", "position_ids").run("patch")
        assert (row.verdict, row.forms) == ("refused", {})
        assert row.reason.startswith("when patched: UnsupportedModelError: ")

        def refuse(output: Any) -> Any:
            raise tritonpack.UnsupportedModelError("not this one; unpatch the model.")

        row = trial("LlamaForCausalLM", "llama", "position_ids").run("patch", changed(refuse, "lm_head"))
        assert (row.verdict, row.forms) == ("refused", {"position_ids": "refused"})

    def test_partly(self) -> None:
        def refuse(output: Tensor) -> Tensor:
            if output.shape[0] > 1:
                raise tritonpack.UnsupportedModelError("pass one row.")
            return output

        row = trial("LlamaForCausalLM", "llama", "position_ids", "two_rows").run("patch", changed(refuse, "lm_head"))
        assert (row.verdict, row.forms) == ("partly", {"position_ids": "exact", "two_rows": "refused"})

    def test_error(self) -> None:
        row = trial("LlamaForCausalLM", "llama", "position_ids").run("patch", changed(broken, "lm_head"))
        assert (row.verdict, row.reason) == ("error", "position_ids: RuntimeError: broken")

    def test_forms_that_fail_without_tritonpack_are_stock(self) -> None:
        row = trial("T5EncoderModel", "t5", "with_cache")._run("patch", tritonpack.patch)
        assert row.forms["with_cache"] in ("stock", "refused")

    def test_documents_of_a_decoder_have_other_lengths(self) -> None:
        model = build.build(case("T5ForConditionalGeneration", "t5"))
        subject = Subject(model, stock=True)
        documents = subject.draw((7, 1, 3))
        with torch.no_grad():
            alone = subject.alone(documents)
        assert [output.of_source for output in alone.values()] == [False, True]
        assert [sum(map(len, output.parts)) for output in alone.values()] == [13, 11]

    def test_not_built_and_no_text(self) -> None:
        (row,) = judge_case(case("Gemma4AssistantForCausalLM", "gemma4_assistant"))
        assert (row.how, row.verdict) == (ANY, "not built")
        (row,) = judge_case(case("ViTModel", "vit"))
        assert (row.how, row.verdict, row.reason) == (ANY, "no text", "its forward has no input_ids")

    def test_remedies(self) -> None:
        assert has_remedy("two things differ. Pass one of them.")
        assert has_remedy("not this; unpatch the model.")
        assert not has_remedy("LlamaModel can't be packed exactly: it is odd.")

        def refuse(output: Any) -> Any:
            raise tritonpack.UnsupportedModelError("it is odd.")

        assert trial("LlamaForCausalLM", "llama", "position_ids").run("patch", changed(refuse, "lm_head")).bare


class TestRunning:
    @pytest.mark.slow
    def test_a_crash_and_a_hang_cost_one_class(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """The clock goes on when the hanging class begins."""
        hangs = tmp_path / "hangs"

        def judge(given: Case, **options: Any) -> list[Row]:
            if given.name == "crash":
                os._exit(3)
            if given.name == "hang":
                hangs.touch()
                time.sleep(600)
            return [Row(given.key, "patch", "exact")]

        monkeypatch.setattr(running, "judge_case", judge)
        clock = SimpleNamespace(monotonic=lambda: 10.0 * hangs.exists(), perf_counter=time.perf_counter)
        monkeypatch.setattr(running, "time", clock)
        todo = [Case(name, "a", ()) for name in ("first", "crash", "hang", "last")] + [Case("other", "b", ())]
        rows = {row.key: row for row in running.run(todo, jobs=1, limit=2.0)}
        assert {key: row.verdict for key, row in rows.items()} == {
            "first/a": "exact", "crash/a": "error", "hang/a": "error", "last/a": "exact", "other/b": "exact",
        }  # fmt: skip
        assert rows["crash/a"].reason == "its process ended with 3"
        assert rows["hang/a"].reason == "it took more than 2 seconds"


class TestResults:
    @pytest.mark.parametrize(
        "verdicts",
        [
            {},
            dict.fromkeys(forms.ALL, "exact"),
            {form: "exact" for form in forms.ALL if form not in forms.LOSSES},
            {**dict.fromkeys(forms.ALL, "leak"), "two_rows": "exact", "loss_collator": "refused"},
            {"position_ids": "leak", "two_rows": "refused"},
        ],
    )
    def test_saved_rows_are_loaded_unchanged(self, verdicts: dict[str, str], tmp_path: Path) -> None:
        row = Row("A/b", "patch", "exact", "why", verdicts, 1e-7, 0.5, "note", "dense", 1.2)
        results.save([row], tmp_path / "rows")
        assert results.load(tmp_path / "rows") == [row]

    def test_the_last_row_of_a_class_counts(self, tmp_path: Path) -> None:
        path = tmp_path / "rows"
        for how, verdict in ((ANY, "not built"), ("patch", "leak"), ("name", "exact"), ("patch", "exact")):
            results.append(Row("A/b", how, verdict), path)
        assert {row.how: row.verdict for row in results.load(path)} == {"name": "exact", "patch": "exact"}

    def test_a_version_can_be_left_without_rows(self, tmp_path: Path) -> None:
        results.save(
            [Row("A/b", "patch", "exact", version="5.4.0"), Row("A/b", "patch", "leak", version="5.23.1")], tmp_path
        )
        results.save([], tmp_path, version="5.4.0")
        assert [row.version for row in results.load(tmp_path)] == ["5.23.1"]

    def test_shown_classes(self, tmp_path: Path) -> None:
        """A class is shown if all its types are exact, at least in part. Other versions stay."""
        verdicts = {
            "A/a": "exact", "B/a": "partly", "C/a": "refused", "D/a": "leak", "E/a": "exact", "E/b": "error",
        }  # fmt: skip
        rows = [Row(key, "patch", verdict, version="5.23.1") for key, verdict in verdicts.items()]
        rows.append(Row("C/a", "name", "exact", version="5.23.1"))
        path = tmp_path / "exact_classes.csv"
        path.write_text("class,versions,in_trees\nA,5.4 5.23,5.4\nC,5.4,\nD,5.23,5.23\n")
        results.save_shown(rows, path)
        expected = ["class,versions,in_trees", "A,5.4 5.23,5.4", "B,5.23,", "C,5.4,", ""]
        assert path.read_text() == "\n".join(expected)


def test_the_readme_agrees_with_the_table() -> None:
    said = table.sentence(table.Found(STORED.values()), transformers.__version__)
    assert said in " ".join((Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").split())


def test_no_class_is_wrong_with_any_transformers() -> None:
    rows = [row for row in results.load() if row.how != "stock"]
    assert [f"{row.version} {row.key} {row.how}" for row in rows if row.wrong or row.verdict == "error"] == []


def test_the_table_of_shown_classes_agrees_with_the_results(tmp_path: Path) -> None:
    path = tmp_path / results.SHOWN.name
    shutil.copy(results.SHOWN, path)
    results.save_shown(results.load(), path)
    assert path.read_text() == results.SHOWN.read_text()


RERUN = "run `python -m tests.patches.sweep` and `python -m tests.patches.table`, and mend or refuse what is wrong"


def test_every_class_of_every_mapping_has_been_tried() -> None:
    """A new version of transformers, or a new class in it, fails this test."""
    missing = [x.key for x in cases() if not any((x.key, how) in STORED for how in ("patch", ANY))]
    assert not missing, f"{len(missing)} classes of transformers {transformers.__version__} weren't tried: {RERUN}"


def test_classes_left_out_take_no_text() -> None:
    """A few model types are tried, because importing all takes long."""
    for x in [x for x in cases() if x.model_type.startswith(("b", "v"))]:
        if (row := STORED.get((x.key, ANY))) and row.verdict == "no text":
            assert no_text(getattr(transformers, x.name))


def test_mappings_are_those_of_transformers() -> None:
    assert mappings()["CAUSAL_LM"]["llama"] == ("LlamaForCausalLM",)
    assert mappings()["BASE"]["funnel"] == ("FunnelModel", "FunnelBaseModel")
    assert case("LlamaModel", "llama").mappings == ("BASE",)


def each(step: int) -> list[Case]:
    """Return every `step`th class that was built, by name."""
    return sorted((x for x in cases() if (x.key, "patch") in STORED), key=lambda x: x.key)[::step]


def compare(x: Case, how: str, chosen: tuple[str, ...]) -> None:
    stored = STORED[x.key, how]
    (row,) = judge_case(x, (how,), chosen)
    known = {form: stored.forms.get(form) for form in row.forms} if stored.forms else {}
    got, want = (row.forms, known) if known else (row.verdict, stored.verdict)
    assert got == want, f"{x.key} isn't what the table says ({row.reason}): {RERUN}"


@pytest.mark.parametrize("x", each(60), ids=lambda x: x.key)
def test_a_few_classes_agree_with_the_table(x: Case) -> None:
    with quiet():
        compare(x, "patch", ("segments_alone", *forms.PADDED))  # heads with one result a row take padded rows alone


@pytest.mark.slow
@pytest.mark.parametrize("how", ["patch", "name"])
@pytest.mark.parametrize("x", each(8), ids=lambda x: x.key)
def test_more_classes_agree_with_the_table(x: Case, how: str) -> None:
    with quiet():
        compare(x, how, forms.ALL)


def test_a_class_that_only_its_proof_refuses_is_not_shown() -> None:
    trusted, proven = (Row("A/a", "patch", "partly", version="5.6.0", proven=proven) for proven in (False, True))
    assert results.shown([trusted]) == {"A": {"5.6"}}
    assert results.shown([proven]) == {}
