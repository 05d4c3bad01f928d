"""setup: a Trainer trains on packed rows as a plain loop does on padded batches of the same documents."""

import functools
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers import EvalPrediction, Trainer, TrainerCallback, TrainingArguments

import tritonpack
from tests.ecosystem.test_padded import encoder
from tests.ecosystem.training import EXACT, Outcome, arguments, distance, evaluated, features, pad, trained
from tests.patches.calls import state as state_of_model
from tests.patches.models import tiny_model

pytest.importorskip("accelerate")

TOKENS = 64
# Documents that are told apart by their first token.
DOCUMENTS = [{"input_ids": [number + 3, *one["input_ids"][1:]]} for number, one in enumerate(features() * 4)]


def make_trainer(folder: Path, model: Any = None, **options: Any) -> Trainer:
    dataset = options.pop("train_dataset", DOCUMENTS)
    ours = {name: options.pop(name) for name in ("compute_metrics", "model_init", "data_collator") if name in options}
    kind = options.pop("class", Trainer)
    defaults = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 0.0}
    return kind(
        None if "model_init" in ours else model or tiny_model("llama"),
        TrainingArguments(**arguments(folder, **{**defaults, **options})),
        train_dataset=dataset,
        eval_dataset=features(),
        **{"data_collator": pad, **ours},
    )


# Pairs of documents that begin alike; the first token is the number of the pair.
PAIRS = [
    {"prompt": [number + 3, *one["input_ids"]], "answers": [other["input_ids"], other["input_ids"][::-1][:7]]}
    for number, (one, other) in enumerate(zip(features(), features()[::-1], strict=True))
]


def documents_of(pair: dict[str, Any]) -> list[dict[str, list[int]]]:
    return [{"input_ids": pair["prompt"] + answer} for answer in pair["answers"]]


def datasets() -> Any:
    return pytest.importorskip("datasets").Dataset


class Watch:
    """The documents of each training batch that a model got."""

    def __init__(self, model: nn.Module) -> None:
        self.batches: list[list[int]] = []
        model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, model: nn.Module, args: Any, batch: dict[str, Any]) -> None:
        if model.training:
            starts = batch["cu_seq_lens_q"][:-1].long()
            self.batches.append((batch["input_ids"][0, starts] - 3).tolist())


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def plain_loop(steps: list[list[int]]) -> Outcome:
    """Plain gradient descent on padded batches of these documents."""
    model = tiny_model("llama")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = []
    for documents in steps:
        model.zero_grad()
        loss = model(**pad([DOCUMENTS[number] for number in documents])).loss
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    return losses, {name: p.detach() - before[name] for name, p in model.named_parameters()}


@pytest.mark.slow
def test_trains_as_a_plain_loop_on_padded_batches(tmp_path: Path) -> None:
    """Steps of two rows; the last step of each epoch has one row."""
    trainer = make_trainer(tmp_path)
    handle = tritonpack.setup(trainer, 72)
    watch = Watch(trainer.model)
    outcome = trained(trainer)
    per_epoch = len(trainer.get_train_dataloader())
    assert per_epoch % 2 == 1
    assert len(watch.batches) == 2 * per_epoch
    epochs = [watch.batches[:per_epoch], watch.batches[per_epoch:]]
    assert epochs[0] != epochs[1]
    for batches in epochs:
        assert sorted(chain.from_iterable(batches)) == list(range(48)), "every document once"
    steps = [list(chain(*batches[i : i + 2])) for batches in epochs for i in range(0, per_epoch, 2)]
    assert distance(plain_loop(steps), outcome) < EXACT
    assert (trainer.state.global_step, trainer.state.max_steps, trainer.state.epoch) == (len(steps), len(steps), 2.0)
    assert "616 tokens (lengths from input_ids)" in str(handle)
    assert f"{per_epoch} steps of 1 rank with 72 tokens each" in str(handle)


def test_epochs_have_equal_steps(tmp_path: Path) -> None:
    """Trainer multiplies the steps of the first epoch, and rows of other epochs may fill worse."""
    trainer = make_trainer(tmp_path, num_train_epochs=6)
    tritonpack.setup(trainer, 62)
    plain = tritonpack.dataloader(DOCUMENTS, 62, seed=0)
    loader = trainer.get_train_dataloader()
    lengths = []
    for epoch in range(6):
        plain.set_epoch(epoch)
        loader.set_epoch(epoch)
        lengths.append((len(plain), len(loader)))
        found = [batch["input_ids"][0, batch["cu_seq_lens_q"][:-1].long()] - 3 for batch in loader]
        assert len(found) == len(loader)
        assert sorted(torch.cat(found).tolist()) == list(range(48))
    assert len({one for one, _ in lengths}) > 1
    assert {equal for _, equal in lengths} == {max(one for one, _ in lengths)}


def test_arguments_of_loading_hold(tmp_path: Path) -> None:
    options = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True, "dataloader_prefetch_factor": 3}
    trainer = make_trainer(tmp_path, data_seed=7, **options)
    tritonpack.setup(trainer, TOKENS)
    loader = trainer.get_train_dataloader()
    assert (loader.num_workers, loader.persistent_workers, loader.prefetch_factor) == (2, True, 3)
    assert loader.worker_init_fn.func is transformers.trainer_utils.seed_worker
    assert list(loader.rows) == list(tritonpack.dataloader(DOCUMENTS, TOKENS, seed=7, epochs=2).rows)
    trainer = make_trainer(tmp_path, train_sampling_strategy="sequential")
    tritonpack.setup(trainer, TOKENS)
    assert list(trainer.get_train_dataloader().rows) == list(
        tritonpack.dataloader(DOCUMENTS, TOKENS, shuffle=False).rows
    )


def test_evaluation_and_prediction_stay_as_they_are(tmp_path: Path) -> None:
    def metrics(found: EvalPrediction) -> dict[str, float]:
        return {"documents": len(found.predictions), "first": float(np.abs(found.predictions[:, 0]).sum())}

    plain = make_trainer(tmp_path, compute_metrics=metrics, per_device_eval_batch_size=5)
    ours = make_trainer(tmp_path, compute_metrics=metrics, per_device_eval_batch_size=5)
    handle = tritonpack.setup(ours, TOKENS)
    expected, got = plain.predict(features()), ours.predict(features())
    real = expected.label_ids != -100
    np.testing.assert_allclose(got.predictions[real], expected.predictions[real], rtol=0, atol=EXACT)
    np.testing.assert_array_equal(got.label_ids, expected.label_ids)
    assert evaluated(ours) == pytest.approx(evaluated(plain), rel=EXACT)
    assert handle.patch.saved is not None
    assert handle.patch.saved.tokens_computed < handle.patch.saved.tokens_given, "padding isn't computed"


WITH_TEXT = [
    {"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1], "text": "a"},
    {"input_ids": [9, 10, 11], "completion_mask": [0, 1, 1], "text": "b"},
]


@pytest.mark.fast("True-True")
@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("as_dataset", [False, True])
def test_columns_that_the_collator_uses_stay(as_dataset: bool, labelled: bool, tmp_path: Path) -> None:
    dataset: Any = [one | ({"labels": one["input_ids"]} if labelled else {}) for one in WITH_TEXT]
    trainer = make_trainer(tmp_path, train_dataset=datasets().from_list(dataset) if as_dataset else dataset)
    handle = tritonpack.setup(trainer, TOKENS)
    (batch,) = trainer.get_train_dataloader()
    assert sorted(batch["labels"][0].tolist()) == [-100, -100, -100, 7, 8, 10, 11]
    columns = f"completion_mask, input_ids{', labels' if labelled else ''}"
    assert f"columns: {columns}; left out: text" in str(handle)
    whole = make_trainer(tmp_path, train_dataset=WITH_TEXT, remove_unused_columns=False)
    tritonpack.setup(whole, TOKENS, drop_columns=("text",))


def snapshot(trainer: Trainer) -> tuple[dict[str, Any], list[Any], Any]:
    return dict(vars(trainer)), list(trainer.callback_handler.callbacks), state_of_model(trainer.model)


class TestUndoing:
    def test_restores_every_object(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path)
        trainer._set_signature_columns_if_needed()  # Trainer keeps these once it has read them
        trainer.compute_loss = functools.partial(Trainer.compute_loss, trainer)  # as other libraries do
        attributes, callbacks, model = snapshot(trainer)
        handle = tritonpack.setup(trainer, TOKENS)
        assert type(trainer) is not Trainer
        handle.undo()
        after, callbacks_after, model_after = snapshot(trainer)
        assert type(trainer) is Trainer
        assert after.keys() == attributes.keys()
        assert all(after[name] is attributes[name] for name in attributes)
        assert [id(one) for one in callbacks_after] == [id(one) for one in callbacks]
        assert model_after == model
        handle.undo()

    @pytest.mark.slow
    def test_twice_and_after_training(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path, max_steps=1)
        stock = trainer.get_train_dataloader()
        with tritonpack.setup(trainer, TOKENS) as handle:
            with pytest.raises(ValueError, match=r"set up already; call undo\(\)"):
                tritonpack.setup(trainer, TOKENS)
            trainer.train()
            first = handle.patch
        assert type(trainer.get_train_dataloader()) is type(stock)
        with tritonpack.setup(trainer, 32, attention="sdpa", unpad=False) as handle:
            trainer.train()
            assert handle.patch is not first
            assert max(batch["input_ids"].shape[1] for batch in trainer.get_train_dataloader()) <= 32

    @pytest.mark.slow
    def test_a_model_that_model_init_makes(self, tmp_path: Path) -> None:
        made: list[nn.Module] = []

        def make() -> Any:
            made.append(tiny_model("llama"))
            return made[-1]

        trainer = make_trainer(tmp_path, model_init=make, max_steps=2)
        handle = tritonpack.setup(trainer, TOKENS)
        losses = []
        for _ in range(2):
            losses.append(trained(trainer)[0])
            assert handle.patch.model is trainer.model is made[-1]
        assert losses[0] == losses[1]
        assert len(made) == 3
        handle.undo()
        plain = state_of_model(tiny_model("llama"))
        assert all(state_of_model(model).keys() == plain.keys() for model in made)


@pytest.mark.slow
def test_logs_have_what_packing_saves(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    tritonpack.setup(trainer, TOKENS)
    watch = Watch(trainer.model)
    trainer.train()
    lengths = [[len(DOCUMENTS[number]["input_ids"]) for number in batch] for batch in watch.batches]
    *_, last = trainer.state.log_history
    tokens, padded = sum(map(sum, lengths)), sum(len(batch) * max(batch) for batch in lengths)
    assert last["train_tokens_saved_share"] == pytest.approx(1 - tokens / padded)
    assert last["train_packing_efficiency"] == pytest.approx(tokens / (TOKENS * len(lengths)))
    ratio = last["train_tokens_computed_per_second"] / last["train_tokens_given_per_second"]
    assert ratio == pytest.approx(tokens / padded)
    names = ["tokens_saved_share", "tokens_given_per_second", "tokens_computed_per_second", "packing_efficiency"]
    first = trainer.state.log_history[0]
    for log, prefix in ((first, ""), (last, "train_")):
        assert [n for n in log if n.removeprefix("train_") in names] == [f"{prefix}{name}" for name in names]
    assert first["packing_efficiency"] == pytest.approx(sum(map(sum, lengths[:2])) / (2 * TOKENS))
    assert trainer.get_total_train_batch_size(trainer.args) == round(48 / 5), "documents of a step"
    samples = last["train_samples_per_second"] * last["train_runtime"]
    assert samples == pytest.approx(2 * 48, rel=0.01)


@pytest.mark.slow
def test_pairs_stay_together(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, train_dataset=PAIRS)
    handle = tritonpack.setup(trainer, 2 * TOKENS, documents=documents_of)
    assert "PackedDataLoader of 12 units of 24 documents" in str(handle)
    watch = Watch(trainer.model)
    trainer.train()
    assert all(batch[::2] == batch[1::2] for batch in watch.batches), "both documents of a pair, one after the other"
    found = sorted(chain.from_iterable(batch[::2] for batch in watch.batches))
    assert found == sorted(2 * list(range(12))), "each pair once in each of two epochs"
    documents = [documents_of(pair) for pair in PAIRS]
    padded = tokens = 0
    for batch in watch.batches:
        lengths = [len(each["input_ids"]) for number in batch[::2] for each in documents[number]]
        padded += len(lengths) * max(lengths)
        tokens += sum(lengths)
    last = trainer.state.log_history[-1]
    assert last["train_tokens_saved_share"] == pytest.approx(1 - tokens / padded)


@pytest.mark.slow
def test_own_collator_of_trees_trains_alike(tmp_path: Path) -> None:
    """All pairs in one row: in trees there are fewer tokens, and the loss is the mean over the same targets."""
    groups = [[document["input_ids"] for document in documents_of(pair)] for pair in PAIRS]
    outcomes = []
    trees = {"collate_fn": tritonpack.TreeCollator(), "lengths": tritonpack.Units.of_trees(groups)}
    for options in ({}, trees):
        trainer = make_trainer(tmp_path, train_dataset=PAIRS, gradient_accumulation_steps=1)
        with tritonpack.setup(trainer, 2048, tail="keep", documents=documents_of, **options) as handle:
            assert "1 step of 1 rank" in str(handle)
            outcomes.append(trained(trainer))
    assert distance(*outcomes) < 4 * EXACT


class OfPairs(Trainer):
    """Takes the columns of TRL's DPOTrainer."""

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["prompt_ids", "chosen_ids", "rejected_ids"]


class Other(Trainer):
    def _get_train_sampler(self, *_: Any) -> Any:
        return None


def a_classifier() -> Any:
    return encoder(transformers.AutoModelForSequenceClassification)


# what the Trainer gets, what setup gets, words
REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "drop_last": ({"dataloader_drop_last": True}, {}, r"dataloader_drop_last=True \(pass False, or tail='drop'"),
    "auto batch size": ({"auto_find_batch_size": True}, {}, r"auto_find_batch_size=True \(pass False"),
    "grouped": ({"train_sampling_strategy": "group_by_length"}, {}, "train_sampling_strategy='group_by_length'"),
    "dispatched": ({"accelerator_config": {"dispatch_batches": True}}, {}, "dispatch_batches=True"),
    "seed": ({}, {"seed": 1}, "seed can't be passed; set data_seed in the TrainingArguments"),
    "workers": ({}, {"num_workers": 2}, "set dataloader_num_workers"),
    "rank": ({}, {"rank": 1}, "rank can't be passed, because the trainer decides it"),
    "unknown": ({}, {"token": 2}, "^setup has no option 'token'; it takes labels, .*pad_token_id"),
    "removed": ({}, {"tiled_loss": True}, r"tiled_loss of setup\(\) was removed: use Liger-Kernel"),
    "labels": ({}, {"labels": "words"}, "labels must be one of 'causal', 'tokens'; got 'words'"),
    "labels of another loss": ({}, {"labels": "tokens"}, r"LlamaForCausalLM takes labels='causal'.*Leave it out"),
    "no dataset": ({"train_dataset": None}, {}, "no train_dataset"),
    "no document": ({"train_dataset": []}, {}, "the dataset has no document to pack"),
    "a collator": ({"data_collator": tritonpack.PackingCollator(objective="tokens")}, {},
        "objective='tokens', and training would use 'causal'"),
    "too long": ({}, {"tokens": 16}, r"documents are longer than the row size of 16.*max_document_length"),
    "an unknown column": ({"train_dataset": WITH_TEXT, "remove_unused_columns": False}, {},
        r"'text', which PackingCollator can't pack.*drop_columns=\('text',\)"),
    "preferences": ({"train_dataset": [{"chosen_ids": [1, 2], "rejected_ids": [1, 3]}]}, {},
        r"columns chosen_ids, rejected_ids\..*share_prefixes=True"),
    "a classifier": ({"model": a_classifier}, {},
        r"gives one result for each row.*patch\(trainer\.model, unpad=True\)"),
    "a loss without a name": ({"model": lambda: encoder(transformers.AutoModelForQuestionAnswering)}, {},
        r"doesn't tell what its labels belong to\. Pass labels='causal'"),
    "attention": ({}, {"attention": "sdpa"}, r"leave both out\. Here: pass unpad=False"),
    "a stream": ({"train_dataset": lambda: datasets().from_list(DOCUMENTS).to_iterable_dataset(), "max_steps": 2}, {},
        r"iterable.*pack_stream"),
    "GPUs": ({"args._n_gpu": 2}, {}, r"among 2 GPUs \(DataParallel\).*torchrun"),
    "no items": ({"model_accepts_loss_kwargs": False}, {},
        r"doesn't pass num_items_in_batch to LlamaForCausalLM.*compute_loss"),
    "a sampler": ({"class": Other}, {}, r"Other has a _get_train_sampler of its own.*unpad=True"),
    "a trainer of pairs": ({"class": OfPairs, "train_dataset": PAIRS}, {"documents": documents_of},
        r"OfPairs computes .* of the columns chosen_ids, rejected_ids.*train_dpo_pack"),
    "pairs without documents": ({"train_dataset": PAIRS}, {},
        "packed rows need documents with input_ids; the Trainer's have the col"),
    "a collator of trees": (
        {"train_dataset": PAIRS},
        {"documents": documents_of, "collate_fn": tritonpack.TreeCollator(), "max_document_length": 4},
        "max_document_length",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str, tmp_path: Path) -> None:
    """A refused trainer is left as it was."""
    with pytest.raises(ValueError, match=r"expected a transformers.Trainer; got a Linear.*tritonpack.dataloader"):
        tritonpack.setup(nn.Linear(2, 2), TOKENS)  # type: ignore[arg-type]
    given, of_setup, message = REFUSALS[case]
    given = {name: value() if callable(value) and name in ("model", "train_dataset") else value
             for name, value in given.items()}  # fmt: skip
    later = {name: given.pop(name) for name in ("args._n_gpu", "model_accepts_loss_kwargs") if name in given}
    trainer = make_trainer(tmp_path, **given)
    for name, value in later.items():
        setattr(trainer.args if name.startswith("args.") else trainer, name.split(".")[-1], value)
    before = snapshot(trainer)[1:]
    with pytest.raises(ValueError, match=message):
        tritonpack.setup(trainer, **{"tokens": TOKENS, **of_setup})
    assert snapshot(trainer)[1:] == before


@pytest.mark.slow
@pytest.mark.parametrize("way", ["full", "lora"])
def test_sft_trainer(way: str, tmp_path: Path) -> None:
    """Two epochs of packed rows equal TRL's own padded batches of the same documents, in the same order."""
    assert pytest.importorskip("trl")
    from tests.ecosystem.test_packed import make_sft

    config = None
    if way == "lora":
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")

    def make(dataset: Any, **options: Any) -> Any:
        torch.manual_seed(0)
        trainer = make_sft(tiny_model("llama"), tmp_path, config, max_grad_norm=0.0, max_steps=-1, **options)
        trainer.train_dataset = dataset
        return trainer

    whole = datasets().from_list([{**one, "labels": one["input_ids"]} for one in DOCUMENTS])
    ours = make(whole, num_train_epochs=2)
    handle = tritonpack.setup(ours, 2048)
    outcome = trained(ours)
    assert ours.state.global_step == 2, "a row holds all documents"
    padded = make(whole, num_train_epochs=2, per_device_train_batch_size=48)
    assert distance(trained(padded), outcome) < EXACT
    assert evaluated(ours)["eval_loss"] == pytest.approx(evaluated(padded)["eval_loss"], rel=EXACT)
    handle.undo()
    with pytest.raises(ValueError, match=r"packing=True \(pass packing=False to SFTConfig"):
        tritonpack.setup(make_sft(tiny_model("llama"), tmp_path, packing=True, max_length=64), TOKENS)
    with pytest.raises(ValueError, match=r"padding_free=True \(pass False to SFTConfig"):
        tritonpack.setup(make_sft(tiny_model("llama"), tmp_path, padding_free=True), TOKENS)


@pytest.mark.parametrize("rows", [3, 1])
@pytest.mark.parametrize(("task", "label"), [("AutoModelForMaskedLM", 4), ("AutoModelForTokenClassification", 1)])
@pytest.mark.fast("AutoModelForTokenClassification-1-3")
def test_tasks_beside_causal_models(task: str, label: int, rows: int, tmp_path: Path) -> None:
    """A step of three rows has the loss and the gradients of one padded batch. transformers' losses of these models
    are means over the row."""
    documents = [{**one, "labels": [label] * len(one["input_ids"])} for one in DOCUMENTS]
    model, twin = (encoder(getattr(transformers, task)) for _ in range(2))
    trainer = make_trainer(tmp_path, model, train_dataset=documents, gradient_accumulation_steps=rows, max_steps=1)
    tritonpack.setup(trainer, 128)
    assert trainer.get_train_dataloader().collate_fn.objective == "tokens"
    watch = Watch(model)
    outcome = trained(trainer)
    assert len(watch.batches) == rows
    chosen = [documents[number] for batch in watch.batches for number in batch]
    batch = pad([{"input_ids": one["input_ids"]} for one in chosen])
    batch["labels"][batch["attention_mask"] == 1] = label
    loss = twin.train()(**batch).loss
    loss.backward()
    moved = {name: -0.1 * p.grad for name, p in twin.named_parameters() if p.grad is not None}
    outcome = outcome[0], {name: outcome[1][name] for name in moved}
    assert distance(([loss.item()], moved), outcome) < EXACT
