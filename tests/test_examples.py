"""The examples run, and training lowers their losses."""

import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import tritonpack

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def test_every_example_is_tested():
    tested = {"quickstart", "train_packed", "train_with_trainer", "train_sequence_parallel", "train_dpo_packed"}
    tested |= {"foreign_backends"}  # in tests/examples
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested | {"__init__"}


@pytest.mark.fast("train_packed")
@pytest.mark.parametrize("name", ["train_packed", "train_with_trainer", "train_dpo_packed"])
def test_training_lowers_the_loss(name):
    pytest.importorskip("accelerate")
    losses = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](steps=10)
    assert len(losses) == 10
    assert losses[-1] < losses[0]


def test_quickstart_reaches_the_loss_of_stock(tmp_path):
    text = tmp_path / "text"
    text.write_text("\n\n".join("a line of words " * (1 + i * i % 7) for i in range(40)), "utf-8")
    main = runpy.run_path(str(EXAMPLES / "quickstart.py"))["main"]
    (stock, _), (packed, _) = main(str(text), steps=3).values()
    assert packed == pytest.approx(stock, rel=1e-5)
    text.write_text("\n\n \n", "utf-8")
    with pytest.raises(SystemExit, match="holds no text; pass a file with paragraphs"):
        main(str(text))
    with pytest.raises(SystemExit, match="missing can't be read"):
        main(str(tmp_path / "missing"))


def dpo_loss_alone(policy, reference, pairs, beta):
    """The loss of documents that are computed one by one, as TRL's DPOTrainer defines it."""

    def score(pair, name):
        prompt, ids = len(pair["prompt_ids"]), torch.tensor([pair["prompt_ids"] + pair[name]])
        logits = torch.stack([model(input_ids=ids).logits[0, :-1] for model in (policy, reference)])
        each = logits.log_softmax(-1).gather(2, ids[:, 1:].T.expand(2, -1, 1))[:, prompt - 1 :].sum((1, 2))
        return each[0] - each[1].detach()

    scores = torch.stack([score(pair, "chosen_ids") - score(pair, "rejected_ids") for pair in pairs])
    return -torch.nn.functional.logsigmoid(beta * scores).mean()


def test_packed_pairs_have_the_loss_and_gradients_of_pairs_alone():
    from transformers import LlamaConfig, LlamaForCausalLM

    example = runpy.run_path(str(EXAMPLES / "train_dpo_packed.py"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    policy, reference = (LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).double() for _ in range(2))
    pairs = example["counting_pairs"](24)
    numbered = {tuple(each["input_ids"]): (number, place) for number, pair in enumerate(pairs)
                for place, each in enumerate(example["documents"](pair))}  # fmt: skip
    loader = tritonpack.dataloader(pairs, 200, documents=example["documents"], seed=0)
    loss = torch.zeros((), dtype=torch.float64)
    with tritonpack.patch(policy), tritonpack.patch(reference):
        for batch in loader:
            starts = batch["cu_seq_lens_q"].tolist()
            found = [numbered[tuple(batch["input_ids"][0, a:b].tolist())] for a, b in pairwise(starts)]
            assert [place for _, place in found] == [0, 1] * (len(found) // 2)
            assert [number for number, _ in found[::2]] == [number for number, _ in found[1::2]], "whole pairs"
            loss = loss + example["dpo_losses"](policy, reference, batch, beta=0.3).sum() / len(pairs)
        loss.backward()
    packed = [parameter.grad.clone() for parameter in policy.parameters()]
    policy.zero_grad()
    expected = dpo_loss_alone(policy, reference, pairs, beta=0.3)
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-6, atol=1e-7)
    for one, other in zip(packed, policy.parameters(), strict=True):
        torch.testing.assert_close(one, other.grad, rtol=1e-4, atol=1e-6)


def torchrun(*options: str) -> dict[int, float]:
    """The printed losses by step of two ranks that share every batch."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(EXAMPLES / "train_sequence_parallel.py"), "--sp", "2", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=600)
    assert result.returncode == 0, result.stderr
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): .*loss (.*)", result.stdout)}


@pytest.mark.slow
def test_sequence_parallel_equals_one_process_and_resumes_exactly(tmp_path, monkeypatch):
    options = ("--steps", "8", "--save-every", "4", "--checkpoint", str(tmp_path))
    losses = torchrun(*options)
    shutil.rmtree(tmp_path / "step-000008")  # as after an interruption before this step
    resumed = torchrun(*options, "--resume")
    assert resumed == {step: losses[step] for step in (5, 6, 7, 8)}

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    told = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))
    main = runpy.run_path(str(EXAMPLES / "train_sequence_parallel.py"))["main"]
    alone = main(steps=8)
    assert list(losses.values()) == pytest.approx(alone, abs=1e-4)
    assert alone[-1] < alone[0] / 2
    shutil.rmtree(tmp_path / "step-000008")
    assert main(steps=8, checkpoint=tmp_path, resume=True) == pytest.approx(alone[4:], abs=1e-4)
