"""Direct preference optimization on packed rows: several pairs in a row without padding, each pair whole in one row.

python examples/train_dpo_packed.py

The pairs have the columns that TRL's DPOTrainer makes: `prompt_ids`, `chosen_ids` and `rejected_ids`.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import LlamaConfig, LlamaForCausalLM

import tritonpack

VOCABULARY = 64
NOT_FOR_THE_MODEL = ("labels", "completion_mask")


def counting_pairs(count: int) -> list[dict[str, list[int]]]:
    """Prompts of 3 to 20 tokens that count upwards; the chosen answer counts on, the rejected one counts back."""
    pairs = []
    for start, length, longer, shorter in torch.randint(3, 21, (count, 4)).tolist():
        end = start + length
        prompt, chosen, rejected = range(start, end), range(end, end + longer), range(end - 2, end - 2 - shorter, -1)
        columns = {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
        pairs.append({name: [token % VOCABULARY for token in tokens] for name, tokens in columns.items()})
    return pairs


def documents(pair: dict[str, list[int]]) -> list[dict[str, list[int]]]:
    """The two documents of a pair: the prompt with the chosen answer, and with the rejected one."""
    prompt = pair["prompt_ids"]
    answers = (pair["chosen_ids"], pair["rejected_ids"])
    masks = [[0] * len(prompt) + [1] * len(answer) for answer in answers]
    return [
        {"input_ids": prompt + answer, "completion_mask": mask} for answer, mask in zip(answers, masks, strict=True)
    ]


def logprobs(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """(documents,) the log-probability of each document's answer, from a packed row.

    PackingCollator labels the tokens of answers. The logits at a place predict the label at the next one, and the first
    label of a document is -100, so no document predicts a token of another.
    """
    logits = model(**{name: value for name, value in batch.items() if name not in NOT_FOR_THE_MODEL}).logits
    labels, document = batch["labels"][0, 1:], batch["seq_idx"][0, 1:]
    learned = labels != -100
    of_tokens = logits[0, :-1][learned].float().log_softmax(-1).gather(1, labels[learned, None])[:, 0]
    totals = of_tokens.new_zeros(len(batch["cu_seq_lens_q"]) - 1)
    return totals.index_add(0, document[learned], of_tokens)


def dpo_losses(policy: nn.Module, reference: nn.Module, batch: dict[str, Any], beta: float = 0.1) -> Tensor:
    """(pairs,) the loss of each pair of a row. Documents alternate: chosen, rejected."""
    with torch.no_grad():
        before = logprobs(reference, batch)
    gained = logprobs(policy, batch) - before
    return -logsigmoid(beta * (gained[0::2] - gained[1::2]))


def main(steps: int = 20, tokens: int = 512) -> list[float]:
    """Train, and return the mean loss of the pairs of each step."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = LlamaForCausalLM(config).to(device)
    reference = copy.deepcopy(policy).eval()
    tritonpack.patch(policy)
    tritonpack.patch(reference)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    loader = tritonpack.dataloader(counting_pairs(200), tokens=tokens, documents=documents)
    print(loader)
    losses: list[float] = []
    while len(losses) < steps:
        for batch in loader:  # each pass is the next epoch
            batch = {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}
            # Rows hold different numbers of pairs. With several ranks, or rows per step, divide the sum of the losses
            # by the pairs of all of them.
            pairs = dpo_losses(policy, reference, batch)
            pairs.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(pairs.mean().item())
            print(f"step {len(losses)}: {len(pairs)} pairs, loss {losses[-1]:.3f}")
            if len(losses) == steps:
                break
    return losses


if __name__ == "__main__":
    main()
