"""Documents, a tiny model and the comparison of two ways to train it, for the tests of other libraries."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from tests.patches.models import VOCAB

LENGTHS = (9, 2, 23, 4, 14, 31, 5, 17, 3, 12, 8, 26)
# Relative, in float64; transformers computes norms and rotary angles in float32 even so. A leak is 1e-3 and more.
EXACT = 8 * torch.finfo(torch.float32).eps


def features(lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, list[int]]]:
    """Tokenized documents."""
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(3, VOCAB, (n,), generator=generator).tolist()} for n in lengths]


def alike() -> list[dict[str, list[int]]]:
    """Tokenized documents of which some begin alike: two prompts with six answers each, in turns."""
    prompts = [features()[number]["input_ids"] for number in (2, 4)]
    return [{"input_ids": prompts[i % 2] + one["input_ids"]} for i, one in enumerate(features())]


def tokenizer() -> PreTrainedTokenizerFast:
    """Words between spaces are tokens: w3, w4 and so on."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCAB)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def pad(documents: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """One document per row, padded on the right: what stock transformers trains on."""
    rows = [torch.tensor(document["input_ids"]) for document in documents]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def arguments(folder: Path, **options: Any) -> dict[str, Any]:
    """What TrainingArguments and its heirs are made of: plain gradient descent, which doesn't magnify rounding as
    Adam's division by the gradient's size does."""
    return {
        "output_dir": str(folder),
        "max_steps": 3,
        "per_device_train_batch_size": 3,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "bf16": False,
        "use_cpu": True,
        "seed": 0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **options,
    }


Outcome = tuple[list[float], dict[str, Tensor]]


def trained(trainer: Any) -> Outcome:
    """Run a Trainer: the loss of each step, and how far each trainable weight moved."""
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    after = dict(trainer.model.named_parameters())
    return losses, {name: after[name].detach() - start for name, start in before.items()}


def evaluated(trainer: Any) -> dict[str, float]:
    """What evaluation gives, without its times."""
    times = ("runtime", "per_second", "epoch", "preparation_time")
    return {name: value for name, value in trainer.evaluate().items() if not any(word in name for word in times)}


def distance(a: Outcome, b: Outcome, least: float = 1e-3) -> float:
    """The largest relative difference of two trainings: in the losses, or in where the weights went.

    A loss below `least` counts as that large: GRPO's loss is 0 in each first step on its samples.
    """
    losses = max(abs(x - y) / max(abs(x), least) for x, y in zip(a[0], b[0], strict=True))
    assert a[1].keys() == b[1].keys()
    moved = max(float(x.abs().max()) for x in a[1].values())
    assert moved > 0
    return max(losses, max(float((a[1][name] - b[1][name]).abs().max()) for name in a[1]) / moved)


def outcome(model: nn.Module, *calls: dict[str, Any]) -> list[Tensor]:
    """The loss of all predicted tokens and the gradients of all weights."""
    model.zero_grad()
    count = sum(int((call["labels"][:, 1:] != -100).sum()) for call in calls)
    loss = sum(model(**call, num_items_in_batch=count).loss for call in calls)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def apart(got: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest number that is expected."""
    return float((got - expected).detach().abs().max() / expected.detach().abs().max())


def difference(got: list[Tensor], expected: list[Tensor]) -> float:
    """The larger difference, of the first tensors or of the gradients behind them, relative to the largest gradient."""
    largest = max(float(x.abs().max()) for x in expected[1:])
    gradients = max(float((x - y).abs().max()) for x, y in zip(got[1:], expected[1:], strict=True)) / largest
    return max(apart(got[0], expected[0]), gradients)


@contextmanager
def no_warning() -> Iterator[None]:
    """Fail at warnings, and at log records of TRL and transformers that are as grave."""
    with ExitStack() as stack:
        for name in ("trl", "transformers"):
            logger = logging.getLogger(name)
            warned = stack.enter_context(mock.patch.object(logger, "handlers", [mock.Mock(level=logging.WARNING)]))
            stack.callback(warned[0].handle.assert_not_called)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("error")
        for category in (DeprecationWarning, FutureWarning):  # how these libraries deprecate each other's parts
            warnings.filterwarnings("ignore", category=category)
        yield
