"""The saved tokens in Trainer's logs: counted beside the trainer, on a clock that the tests move."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import tritonpack
from tests.ecosystem.training import arguments, features, pad
from tests.patches.models import tiny_model

pytest.importorskip("accelerate")

SINCE_LOG = ["tokens_saved_share", "tokens_given_per_second", "tokens_computed_per_second"]
OVERALL = [f"train_{name}" for name in SINCE_LOG]


class Documents(Dataset):
    """Documents whose loading takes so many seconds each."""

    def __init__(self, seconds: float) -> None:
        self.documents, self.seconds = features(), seconds

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        Clock.now += self.seconds
        return self.documents[index]


class Clock:
    """Seconds, and what the model saw in training steps."""

    now = 0.0
    given = computed = seconds = 0

    @classmethod
    def see(cls, model: nn.Module, args: Any, batch: dict[str, Any]) -> None:
        cls.now += 2 if model.training else 100
        if model.training:
            cls.given += batch["input_ids"].numel()
            cls.computed += int(batch["attention_mask"].sum())
            cls.seconds += 2


class Reporter(TrainerCallback):
    """Keeps each log as a reporter gets it."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        self.logs.append(dict(logs))


class SlowToSave(Trainer):
    def save_model(self, *args: Any, **options: Any) -> None:
        Clock.now += 1000
        super().save_model(*args, **options)


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tritonpack.integrations.trainer.perf_counter", lambda: Clock.now)
    Clock.now, Clock.given, Clock.computed, Clock.seconds = 0.0, 0, 0, 0


def make_trainer(folder: Path, **options: Any) -> Trainer:
    return SlowToSave(
        tiny_model("llama"),
        TrainingArguments(**arguments(folder, gradient_accumulation_steps=2, **{"max_steps": 5, **options})),
        train_dataset=Documents(1),
        eval_dataset=Documents(50),
        data_collator=pad,
        callbacks=[Reporter()],
    )


def reporter_of(trainer: Trainer) -> Reporter:
    return next(one for one in trainer.callback_handler.callbacks if isinstance(one, Reporter))


@pytest.mark.slow
def test_logs_have_the_tokens_and_seconds_of_training_alone(tmp_path: Path) -> None:
    options = {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(tmp_path, eval_on_start=True, **options)
    trainer.model.register_forward_pre_hook(Clock.see, with_kwargs=True)
    with tritonpack.patch(trainer.model, unpad=True) as handle:
        trainer.evaluate()
        trainer.add_callback(tritonpack.SavedTokensCallback(trainer))
        trainer.train()
    assert handle.saved is not None
    assert handle.saved.tokens_given > Clock.given  # evaluation
    history = trainer.state.log_history
    assert [entry["step"] for entry in history if "tokens_saved_share" in entry] == [2, 4]
    for entry in history:
        expected = SINCE_LOG if "loss" in entry else OVERALL if "train_loss" in entry else []
        assert [name for name in entry if "tokens" in name] == expected
    last = history[-1]
    assert last["train_tokens_saved_share"] == pytest.approx(1 - Clock.computed / Clock.given)
    ratio = last["train_tokens_computed_per_second"] / last["train_tokens_given_per_second"]
    assert ratio == pytest.approx(Clock.computed / Clock.given)
    seconds = Clock.given / last["train_tokens_given_per_second"]
    loaded = seconds - Clock.seconds
    assert 30 <= loaded <= 36  # 5 steps of 2 batches of 3 documents, and at most two batches loaded ahead


def test_each_log_has_the_steps_since_the_one_before(tmp_path: Path) -> None:
    """Steps in which the patched model doesn't run get nothing. Training again starts the counts again."""
    trainer = make_trainer(tmp_path, logging_steps=1, max_steps=3)
    trainer.model.register_forward_pre_hook(Clock.see, with_kwargs=True)
    handle, seen = tritonpack.patch(trainer.model, unpad=True), [(0, 0, 0.0)]

    class Steps(Reporter):
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            seen.append((Clock.given, Clock.computed, Clock.now))
            if state.global_step == 2:
                handle.unpatch()

    trainer.add_callback(tritonpack.SavedTokensCallback(trainer))
    before, behind = reporter_of(trainer), Steps()
    trainer.add_callback(behind)
    metrics = trainer.train().metrics
    *logs, none = (entry for entry in trainer.state.log_history if "loss" in entry)
    for entry, start, end in zip(logs, seen, seen[1:], strict=False):
        given, computed, seconds = (now - then for now, then in zip(end, start, strict=True))
        want = [1 - computed / given, given / seconds, computed / seconds]
        assert [entry[name] for name in SINCE_LOG] == pytest.approx(want)
    assert not {*SINCE_LOG} & {*none}
    of_tokens, *others = (
        [{name: entry[name] for name in entry if "tokens" in name} for entry in logs]
        for logs in (trainer.state.log_history, before.logs, behind.logs)
    )
    assert others == [of_tokens, of_tokens]
    given, computed, _ = seen[2]
    assert metrics["train_tokens_saved_share"] == pytest.approx(1 - computed / given)
    tritonpack.patch(trainer.model, unpad=True)
    given, computed = Clock.given, Clock.computed
    share = trainer.train().metrics["train_tokens_saved_share"]
    assert share == pytest.approx(1 - (Clock.computed - computed) / (Clock.given - given))


def test_refusals(tmp_path: Path) -> None:
    """Also of a model that isn't patched when training begins, such as one that `model_init` makes anew."""
    trainer, other = make_trainer(tmp_path), make_trainer(tmp_path)
    make = tritonpack.SavedTokensCallback
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is not patched.*trainer\.model, unpad=True"):
        make(trainer)
    with tritonpack.patch(trainer.model), pytest.raises(ValueError, match="patched without unpad and share"):
        make(trainer)
    with tritonpack.patch(trainer.model, unpad=True) as handle:
        with pytest.raises(ValueError, match=r"expected a transformers.Trainer; got a Patch.*add_callback"):
            make(handle)  # type: ignore[arg-type]
        other.add_callback(make(trainer))
        with pytest.raises(ValueError, match="made for another trainer"):
            other.train()
        trainer.add_callback(make(trainer))
    with pytest.raises(ValueError, match="is not patched"):
        trainer.train()
