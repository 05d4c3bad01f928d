"""Train on many GPUs: FSDP shards the model over all ranks, groups of --sp ranks share each batch, and an interrupted
run continues exactly. The program runs on GPUs with NCCL, or on a CPU with gloo.

torchrun --nproc-per-node 2 examples/train_sequence_parallel.py --sp 2 --checkpoint checkpoints
torchrun --nproc-per-node 2 examples/train_sequence_parallel.py --sp 2 --checkpoint checkpoints --resume --steps 60
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from tritonpack import MultipackDistributedBatchSampler, PackingCollator, SequenceParallel

VOCABULARY = 64
TOKENS = 512  # tokens of a batch, which --sp ranks share


def counting_documents(count: int) -> list[dict[str, torch.Tensor]]:
    """Documents of 5 to 60 tokens that count upwards from a random number, the same on every rank."""
    torch.manual_seed(0)
    lengths = torch.randint(5, 61, (count,)).tolist()
    starts = torch.randint(VOCABULARY, (count,)).tolist()
    spans = zip(starts, lengths, strict=True)
    return [{"input_ids": torch.arange(start, start + length) % VOCABULARY} for start, length in spans]


def sharded_llama(device: torch.device) -> LlamaForCausalLM:
    """A small Llama, the same on every rank, sharded over all of them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).to(device)
    policy = MixedPrecisionPolicy() if device.type == "cpu" else MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (*model.model.layers, model):
        fully_shard(module, mp_policy=policy)  # without a mesh: over all ranks, data and sequence ranks
    return model


class Checkpoint:
    """The state of a run: model, optimizer, the sampler's place in the data, and the step."""

    def __init__(self, folder: Path, model, optimizer, sampler) -> None:
        self.folder, self.model, self.optimizer, self.sampler = folder, model, optimizer, sampler

    def state(self, step: int) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "sampler": self.sampler.state_dict(), "step": step}

    def save(self, step: int) -> None:
        dcp.save(self.state(step), checkpoint_id=self.folder / f"step-{step:06}")

    def load_latest(self) -> int:
        """Load the latest checkpoint, and return its step."""
        state = self.state(0)
        dcp.load(state, checkpoint_id=max(self.folder.glob("step-*")))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.sampler.load_state_dict(state["sampler"])
        return state["step"]


def main(
    sp: int = 1, steps: int = 30, checkpoint: str | None = None, save_every: int = 10, resume: bool = False
) -> list[float]:
    """Train, and return the loss of each step."""
    accelerator = torch.accelerator.current_accelerator()
    device = torch.device("cpu" if accelerator is None else accelerator.type, int(os.environ["LOCAL_RANK"]))
    if accelerator is not None:
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group()  # NCCL for tensors on GPUs, gloo for those on the host
    mesh = init_device_mesh(device.type, (dist.get_world_size() // sp, sp), mesh_dim_names=("dp", "sp"))
    replicas, replica = mesh["dp"].size(), mesh["dp"].get_local_rank()

    documents = counting_documents(400)
    # Ranks that share a batch are one replica to the sampler, so they all get the same documents.
    sampler = MultipackDistributedBatchSampler(TOKENS, [len(x["input_ids"]) for x in documents], replicas, replica, 0)
    loader = DataLoader(documents, batch_sampler=sampler, collate_fn=PackingCollator())
    model = sharded_llama(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    saved = Checkpoint(Path(checkpoint or ""), model, optimizer, sampler)
    step = saved.load_latest() if resume else 0

    losses = []
    with SequenceParallel(model, mesh["sp"]):
        while step < steps:
            for batch in loader:
                batch = {key: value.to(device) if torch.is_tensor(value) else value for key, value in batch.items()}
                # FSDP averages over replicas with different numbers of targets; the mean weighs them alike.
                targets = (batch["labels"] != -100).sum()
                dist.all_reduce(targets, group=mesh["dp"].get_group())
                loss = model(**batch, num_items_in_batch=targets / replicas).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                step += 1

                total = loss.detach() / replicas
                dist.all_reduce(total, group=mesh["dp"].get_group())
                losses.append(total.item())
                if dist.get_rank() == 0:
                    print(f"step {step}: {int(targets)} targets, loss {losses[-1]:.6f}")
                if checkpoint and (step % save_every == 0 or step == steps):
                    saved.save(step)
                if step == steps:
                    break
            else:
                sampler.set_epoch(sampler.epoch + 1)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sp", type=int, default=1, help="how many ranks share a batch")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--checkpoint", metavar="DIR", help="where to save; nothing is saved without it")
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="continue from the latest checkpoint in DIR")
    main(**vars(parser.parse_args()))
