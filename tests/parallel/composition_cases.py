"""Models in DDP, FSDP2 and HSDP: ranks that share batches, have padded batches as one row, or prove an unknown model,
train the same model as one process, or are refused."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.parallel import models
from tests.parallel.models import close, make_batch, make_model, whole
from tests.patches import padded_batches as padded
from tests.patches.foreign import Convolution, Mixing, Unshown, config
from tritonpack import SequenceParallel, UnsupportedModelError, patch


def make_mesh(*names):
    """A mesh in which pairs of ranks share batches; without "dp", all ranks share them."""
    size = dist.get_world_size()
    sizes = {"dp": size // 2, "sp": 2 if "dp" in names else size, "one": 1}
    return init_device_mesh("cpu", tuple(sizes[name] for name in names), mesh_dim_names=names)


def flattened(mesh):
    return mesh._flatten("_".join(mesh.mesh_dim_names))


def data_parallel(model, mesh):
    return DistributedDataParallel(model, process_group=flattened(mesh).get_group())


def fully_sharded(model, mesh, **options):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def over_all(model, mesh, **options):
    return fully_sharded(model, flattened(mesh), **options)


def over_world(model, **options):
    return over_all(model, make_mesh("sp"), **options)


def layers_whole(model):
    """FSDP2 that shards the root again after a forward, but not its layers."""
    mesh = make_mesh("sp")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh, reshard_after_forward=True)


@dataclass(frozen=True)
class Training:
    """How ranks that share batches train: `wrap` is (model, mesh) -> the called module, `names` are the mesh's
    dimensions, `accumulate` batches make a step, and the context gets the model inside the wrapper if `inner`."""

    wrap: object
    names: tuple = ("dp", "sp")
    accumulate: int = 1
    checkpointing: bool = False
    inner: bool = False
    options: dict = field(default_factory=dict)
    model: str = "llama"  # or a type of the zoo, some of whose layers compute in float32

    def make(self):
        return make_model(self.model) if self.model in models.SPECIFIC else models.make_zoo_model(self.model)


STEPS, LEARNING_RATE, CLIP = 3, 0.5, 0.5  # gradients' norms are about 1


def optimizer_of(model):
    """SGD, because Adam would hide the scale of gradients."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


def train(training, model, compute):
    """Three steps: `compute` runs the batches of a part of a step. The gradients of the first, and the norms of all."""
    optimizer, norms, gradients = optimizer_of(model), [], {}
    for step in range(STEPS):
        for part in range(training.accumulate):
            compute(100 * step + 10 * part, part == training.accumulate - 1)
        gradients = gradients or models.gradients_of(model)
        norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return gradients, norms


def trains_as_one(training):
    mesh, tolerance = (
        make_mesh(*training.names),
        models.TOLERANCE if training.model in models.SPECIFIC else models.SINGLE,
    )
    replicas, replica = (mesh["dp"].size(), mesh.get_local_rank("dp")) if "dp" in training.names else (1, 0)
    reference, model, losses = training.make(), training.make(), {}
    patch(reference)

    def alone(number, _):
        for one in range(replicas):
            loss = reference(**make_batch(number + one)).loss / training.accumulate
            (loss / replicas).backward()
            losses[number, one] = loss.detach()

    def shared(number, last):
        if isinstance(wrapped, FSDPModule):
            wrapped.set_requires_gradient_sync(last)
        with wrapped.no_sync() if not last and hasattr(wrapped, "no_sync") else nullcontext():
            batch = make_batch(number + replica)
            output = wrapped(**batch)
            loss = output.loss / training.accumulate
            loss.backward()
        assert output.logits.shape[1] < batch["input_ids"].shape[1], "the batch wasn't sharded"
        close(loss.detach(), losses[number, replica], f"loss of batch {number}", tolerance)

    gradients, norms = train(training, reference, alone)
    if training.checkpointing:
        model.train().gradient_checkpointing_enable()
    wrapped = training.wrap(model, mesh)
    with SequenceParallel(model if training.inner else wrapped, mesh["sp"], **training.options):
        found, found_norms = train(training, wrapped, shared)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        close(found[name], gradient, f"gradient of {name}", 10 * tolerance)
    close(torch.stack(found_norms), torch.stack(norms), "norms", tolerance)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        close(whole(p.detach()), q.detach(), name, tolerance)


def over_replicas(model, mesh):
    return DistributedDataParallel(model, process_group=mesh["dp"].get_group())


def one_layer_over_replicas(model, mesh):
    fully_shard(model.model.layers[1], mesh=mesh["dp"])
    return fully_shard(model, mesh=flattened(mesh))


def refused_on_entry(wrap, names=("dp", "sp")):
    mesh = make_mesh(*names)
    message = r"reduces gradients over the ranks \[.*\], but a batch is shared by"
    with pytest.raises(ValueError, match=message):
        SequenceParallel(wrap(make_model(), mesh), mesh["sp"]).__enter__()


def parameters_come_apart(wrap):
    """Only the inner model is passed to the context, so the second step raises, on every rank."""
    mesh, model = make_mesh("dp", "sp"), make_model()
    wrapped, batch = wrap(model, mesh), make_batch(mesh.get_local_rank("dp"))
    with SequenceParallel(model, mesh["sp"]):
        wrapped(**batch).loss.backward()
        optimizer_of(model).step()
        with pytest.raises(ValueError, match="parameters differ between the ranks"):
            wrapped(**batch)


def own_documents(seed, rows):
    """Ranks have documents of their own; one rank has none that are packed."""
    ids = torch.randint(3, 60, (rows, 12), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids} if rows > 1 else {"input_ids": ids, "position_ids": (torch.arange(12) % 5)[None]}


def the_first_call_trains(wrap):
    """Two steps have the gradients of a model that was proven before them."""
    found = {}
    for proven in (False, True):
        torch.manual_seed(0)
        model = Unshown(config()).train()
        model.loss_function = lambda logits, labels, weights: weights  # fails where a proof tries it
        handle, found[proven] = patch(model), []
        wrapped = wrap(model)
        if proven:
            weights = list(wrapped.parameters())
            handle.prove()
            assert all(p is q for p, q in zip(weights, wrapped.parameters(), strict=True))
        for step in range(2):
            wrapped.zero_grad()
            wrapped(**own_documents(2 * step + dist.get_rank(), 1 + dist.get_rank())).logits.square().mean().backward()
            found[proven] += [whole(p.grad).clone() for p in wrapped.parameters() if p.grad is not None]
        with torch.no_grad():
            wrapped(**own_documents(0, 1))
        assert all(isinstance(x, DTensor) == isinstance(wrapped, FSDPModule) for x in wrapped.state_dict().values())
    assert len(found[False]) == len(found[True]) > 0
    assert all(map(torch.equal, found[False], found[True]))


def a_leak_is_refused_on_every_rank(wrap):
    rank = dist.get_rank()
    for kind in (Mixing, Unshown):
        model = kind(config())
        if kind is Unshown:
            model.model.layers[1].mlp = Convolution(model.model.layers[1].mlp)
        patch(model)
        wrapped = wrap(model)
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match="don't stay apart"):
                wrapped(**own_documents(rank, 1 + rank))


def sequence_parallel_proves_on_entry():
    model = Unshown(config())
    with SequenceParallel(model):
        model(**own_documents(0, 1))
    with pytest.raises(UnsupportedModelError, match="don't stay apart"), SequenceParallel(Mixing(config())):
        pass


def stock(number, objective):
    """The values of this rank's batch, and the mean over the ranks of the gradients of their batches."""
    size, rank = dist.get_world_size(), dist.get_rank()
    model = padded.training_model()
    for one in range(size):
        batch = padded.padded_batch(number + one)
        output = model(**batch)
        if one == rank:
            values = padded.read(output, batch)
        (padded.OBJECTIVES[objective](output, batch) / size).backward()
    return padded.Step(values, padded.gradients_of(model))


def checkpointing(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return over_world(model)


PADDED_IN = {
    "DDP": DistributedDataParallel,
    "DDP, unused parameters": partial(DistributedDataParallel, find_unused_parameters=True),
    "DDP, static graph": partial(DistributedDataParallel, static_graph=True),
    "DDP, compiled": lambda model: DistributedDataParallel(torch.compile(model, backend="eager", dynamic=True)),
    "FSDP": over_world,
    "FSDP, resharded": partial(over_world, reshard_after_forward=True),
    "FSDP, checkpointing": checkpointing,
}


def trains_as_stock(name, objective, first):
    """Steps of training and of evaluation on batches of other shapes; logits are read before the backward pass."""
    for options in (padded.UNPAD, padded.SHARE):
        model = padded.training_model()
        batches = [padded.padded_batch(number + dist.get_rank()) for number in range(STEPS)]
        handle = patch(model, **options) if first == "patch" else None
        wrapped = PADDED_IN[name](model)
        handle = handle or patch(wrapped, **options)
        for number, batch in enumerate(batches):
            want = stock(number, objective)
            padded.require_equal(want, padded.step(model, batch, objective, called=wrapped))
            with torch.no_grad():
                padded.require_equal_values(want.values, padded.read(wrapped.eval()(**batch), batch))
            wrapped.train()
            if isinstance(wrapped, FSDPModule):
                wrapped.reshard()  # else `zero_grad` would miss the gradients of the root: it holds whole weights now
        padded.require_saved(handle.saved, *batches, *batches, options=options)


PADDED = {
    f"{name}, {objective}, {first} first": partial(trains_as_stock, name, objective, first)
    for name, objective, first in product(PADDED_IN, padded.OBJECTIVES, ("patch", "wrapper"))
}
TRAININGS = {
    "DDP over the world": Training(data_parallel, ("sp",)),
    "DDP, two batches per step": Training(data_parallel, accumulate=2),
    "DDP around the model of the context": Training(data_parallel, inner=True, options={"exchange": "ring"}),
    "DDP, recurrent": Training(data_parallel, ("sp",), model="qwen3_next"),
    "FSDP, recurrent": Training(over_all, ("sp",), model="qwen3_next"),
    "FSDP, checkpointing": Training(over_all, checkpointing=True),
    "FSDP, two batches per step": Training(over_all, accumulate=2, options={"exchange": "ulysses"}),
    "HSDP, replicas of dp": Training(fully_sharded, checkpointing=True),
    "HSDP, replicas of sp": Training(fully_sharded, ("sp", "dp")),
}
CASES = {name: partial(trains_as_one, training) for name, training in TRAININGS.items()} | {
    "DDP over replicas": partial(refused_on_entry, over_replicas),
    "FSDP over replicas in one layer": partial(refused_on_entry, one_layer_over_replicas),
    "HSDP over replicas": partial(
        refused_on_entry, lambda model, mesh: fully_sharded(model, mesh["dp", "one"]), ("dp", "one", "sp")
    ),
    "gradients not reduced": partial(parameters_come_apart, lambda model, mesh: model),
}
for name, wrap in {
    "DDP": DistributedDataParallel,
    "FSDP2": over_world,
    "FSDP2 that keeps weights whole": partial(over_world, reshard_after_forward=False),
    "FSDP2 that keeps layers whole": layers_whole,
}.items():
    CASES[f"{name}, first call"] = partial(the_first_call_trains, wrap)
    CASES[f"{name}, leak"] = partial(a_leak_is_refused_on_every_rank, wrap)
CASES["proven on entry"] = sequence_parallel_proves_on_entry
ALSO_ON_FOUR = [name for name in CASES if "recurrent" not in name]  # its documents are longer than a share of four
CASES |= PADDED
