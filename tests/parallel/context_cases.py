"""SequenceParallel on several ranks: losses, outputs and all gradients equal those of one process."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.parallel.attention_cases import EXCHANGES, LAYOUTS, mesh_of
from tests.parallel.models import (
    BATCHES,
    LENGTHS,
    Result,
    alone,
    alone_on,
    close,
    gradients_of,
    loss_of,
    make_model,
    mean_over,
    numbers,
    on_ranks,
    packed,
    same,
    state_of,
)
from tests.parallel.recurrent_cases import in_float64, require_equal, several_documents
from tests.parallel.recurrent_cases import make as make_recurrent
from tests.patches.models import COMMON
from tritonpack import BlockDiagonalMask, SequenceParallel, patch
from tritonpack.parallel.layouts import make_layout
from tritonpack.parallel.shard import layer_specs
from tritonpack.patches.mask_spec import CAUSAL, MaskSpec
from tritonpack.patches.parse_inputs import CACHES

PAIR = ("group_cast", "ulysses")


def agrees(family="llama", batch="packed", **options):
    if not isinstance(options.get("exchange", ""), str):
        options["group"] = mesh_of(2, 2)
    same(on_ranks(make_model(family), loss_of, BATCHES[batch](), **options), alone_on(family, batch))


def agrees_on_recurrences(name):
    """On a mesh documents travel between nodes and within them."""
    batch = {**several_documents(), "use_cache": False}
    with in_float64():
        wanted = alone(make_recurrent(name), loss_of, batch)
        require_equal(on_ranks(make_recurrent(name), loss_of, batch, group=mesh_of(2, 2), exchange=PAIR), wanted)


def loss_of_transformers():
    """In float32, and with labels that the loss shifts itself."""

    def made():
        model = make_model()
        del model._loss_function
        return model

    got, wanted = on_ranks(made(), loss_of, packed()), alone(made(), loss_of, packed())
    torch.testing.assert_close(got.loss, wanted.loss, rtol=1e-6, atol=0)
    for name, gradient in wanted.gradients.items():
        torch.testing.assert_close(got.gradients[name], gradient, rtol=1e-4, atol=1e-6)


def accumulated_gradients():
    """Two batches with different numbers of targets and one `num_items_in_batch`, as trainers pass it."""
    batches = [packed(), packed((5, 30, 2), seed=4)]
    count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    for batch in batches:
        batch["num_items_in_batch"] = torch.tensor(count)
    same(on_ranks(make_model(), loss_of, *batches), alone(make_model(), loss_of, *batches))


def other_ignore_index(batch):
    """`ignore_index` also marks the last tokens of rows, and the padding of very short batches."""
    given = BATCHES[batch]()
    given["labels"] = given["labels"].masked_fill(given["labels"] == -100, 0)
    given["ignore_index"] = 0
    same(on_ranks(make_model(), loss_of, given), alone_on("llama", batch))


def checkpointed(reentrant, **options):
    model = make_model()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    same(on_ranks(model, loss_of, packed(), **options), alone_on("llama", "packed"))


def targets_on_one_rank():
    """One token has a target, so all ranks but one have none."""
    batch = packed()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    batch["labels"][0, 20] = 7
    same(on_ranks(make_model(), loss_of, batch), alone(make_model(), loss_of, batch))


def preference(model, **batch):
    """A loss like DPO's: every rank computes it alike from gathered logits of all documents."""
    labels = batch.pop("labels")
    logits = model(**batch).logits
    assert logits.shape[:2] == labels.shape
    chances = logits.log_softmax(-1)[:, :-1].gather(-1, labels[:, 1:, None].clamp(min=0))[..., 0]
    chances = chances * (labels[:, 1:] != -100)
    half = chances.shape[1] // 2
    return -torch.nn.functional.logsigmoid(chances[:, :half].sum() - chances[:, half:].sum()) + chances.mean() ** 2


def own_loss(batch, grad_reduce="mean", **options):
    wanted = alone(make_model(), preference, BATCHES[batch]())
    same(
        on_ranks(make_model(), preference, BATCHES[batch](), gather_outputs=True, grad_reduce=grad_reduce, **options),
        wanted,
    )


def loss_in_parts(grad_reduce):
    """Each rank computes the terms of every n-th token from gathered logits, which read rows of other ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def part(model, **batch):
        labels = batch.pop("labels")
        logits = model(**batch).logits
        mine = torch.arange(rank, labels.shape[1] - 1, size)
        terms = (logits[:, mine] * logits[:, mine + 1]).square().mean(-1)
        return size * terms.sum() / labels.numel()

    def whole(model, **batch):
        labels = batch.pop("labels")
        logits = model(**batch).logits
        return (logits[:, :-1] * logits[:, 1:]).square().mean(-1).sum() / labels.numel()

    got = on_ranks(make_model(), part, packed(), gather_outputs=True, grad_reduce=grad_reduce)
    dist.all_reduce(got.loss)
    got.loss /= size
    same(got, alone(make_model(), whole, packed()))


def loss_by_total(grad_reduce="mean", group=None, exchange="auto"):
    """Each rank computes the terms of its own tokens, and `total` sums them."""
    model = make_model()
    batch = packed()
    labels = batch.pop("labels")
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    group = mesh_of(2, 2) if group == "mesh" else group
    with SequenceParallel(model, group, exchange=exchange, layout="stripe", grad_reduce=grad_reduce) as context:
        logits = model(**batch).logits
        assert logits.shape[1] < 1.5 * labels.shape[1] / dist.get_world_size()
        mine = context.shard(targets, fill=-100)
        terms = torch.nn.functional.cross_entropy(logits[0], mine[0], reduction="sum")
        loss = context.total(terms) / (targets != -100).sum()
        loss.backward()
        close(context.gather(mine), targets, "gathered")
    result = Result(loss.detach()[None], mean_over(None, gradients_of(model), grad_reduce))
    same(result, alone_on("llama", "packed"))


def loss_by_total_of_few_tokens():
    """Padding, which gives every rank of a short batch a row, has no target."""
    model, reference = make_model(), make_model()
    ids = torch.tensor([[5, 57, 6]])
    patch(reference)
    logits = reference(input_ids=ids).logits
    wanted = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")
    with SequenceParallel(model) as context:
        logits = model(input_ids=ids).logits
        mine = context.shard(torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100), fill=-100)
        total = context.total(torch.nn.functional.cross_entropy(logits[0], mine[0], reduction="sum"))
    close(total, wanted, "loss")


def outputs(batch, **options):
    """Logits and hidden states equal those of one process with `gather_outputs`, else this rank's rows of them."""
    model, reference = make_model(), make_model()
    patch(reference)
    given = BATCHES[batch]()
    wanted = reference(**given, output_hidden_states=True)
    with SequenceParallel(model, gather_outputs=True, **options):
        got = model(**given, output_hidden_states=True)
        as_tuple = model(**given, return_dict=False)
        as_configured = model(**given, return_dict=None)
    assert got.keys() == wanted.keys() - {*CACHES}
    close(got.logits, wanted.logits, "logits")
    close(as_tuple[0], wanted.loss, "loss in a tuple")
    close(as_tuple[1], wanted.logits, "logits in a tuple")
    close(as_configured.logits, wanted.logits, "logits, return_dict=None")
    for ours, theirs in zip(got.hidden_states, wanted.hidden_states, strict=True):
        close(ours, theirs, "hidden states")
    with SequenceParallel(model, **options) as context:
        mine = model(**given).logits
        close(mine, context.shard(wanted.logits), "own logits")
        close(context.gather(mine), wanted.logits, "gathered logits")


def documents_stay_apart(exchange, layout):
    """Changing the tokens of one document changes no bit of another document's logits."""
    batch = packed()
    del batch["labels"]
    model = make_model().eval()
    with SequenceParallel(model, exchange=exchange, layout=layout, gather_outputs=True), torch.no_grad():
        before = model(**batch).logits
        ends = torch.tensor(LENGTHS).cumsum(0).tolist()
        for begin, end in zip([0, *ends], ends, strict=False):
            changed = batch["input_ids"].clone()
            changed[0, begin:end] = 3 + (changed[0, begin:end] + 1) % 50
            after = model(**{**batch, "input_ids": changed}).logits
            moved = (after != before).any(-1)[0]
            assert moved[begin:end].any()
            moved[begin:end] = False
            assert not moved.any()


def base_model(under_a_head):
    """A model called without its head: hidden states are sharded and gathered."""
    batch = packed()
    del batch["labels"]

    def compute(model, **given):
        return model.model(**given).last_hidden_state.square().mean()

    model = make_model()
    wanted = alone(make_model(), compute, batch)
    with SequenceParallel(model if under_a_head else model.model, gather_outputs=True, layout="zigzag") as context:
        loss = compute(model, **batch)
        assert context.shard(batch["input_ids"]).shape[1] < sum(LENGTHS)
        loss.backward()
    same(Result(loss.detach()[None], mean_over(None, gradients_of(model))), wanted)


def peft_model():
    """PEFT passes all arguments that it knows, most of them None. Only its own weights get gradients."""
    from peft import LoraConfig, get_peft_model

    def made():
        torch.manual_seed(0)
        weights = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return get_peft_model(make_model(), weights)

    same(on_ranks(made(), loss_of, packed()), alone(made(), loss_of, packed()))


def tensors_in_tuples():
    """Tensors with one row per token are sharded in tuples, too."""
    model, seen = make_model(), []
    model.model.layers[0].register_forward_pre_hook(lambda *call: seen.append(call[2]["pair"]), with_kwargs=True)
    batch = packed()
    pair = (batch["input_ids"], batch["position_ids"][..., None])
    with SequenceParallel(model) as context:
        model(**batch, pair=pair)
        for got, whole in zip(seen[0], pair, strict=True):
            close(got, context.shard(whole), "shard")


def layout_beside_a_vision_tower():
    """A bidirectional vision tower doesn't change the layout: work is divided by the text's causal mask."""
    text = COMMON | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 4]}}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32}
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tokens = {name: 60 + number for number, name in enumerate(names)}
    config = AutoConfig.for_model("qwen2_5_vl", text_config=text, vision_config=vision, **tokens)
    model = AutoModelForImageTextToText.from_config(config)
    batch = {"input_ids": numbers(1, 60), "position_ids": torch.arange(60).expand(3, 1, -1)}
    with SequenceParallel(model, layout="documents") as context:
        model(**batch)
        wanted = make_layout("documents", BlockDiagonalMask.from_seqlens([60]), context.ranks.size)
        for got, rows in zip(context.sharding.layout.rows, wanted.rows, strict=True):
            assert got.tolist() == rows.tolist()


def layout_counts_all_layers():
    """Gemma 2 has windows of 5 in every second layer."""
    batch = {"input_ids": numbers(1, 200), "position_ids": torch.arange(200)[None]}
    with SequenceParallel(make_model("gemma2"), exchange="group_cast", layout="documents") as context:
        context.models[0](**batch)
        layers = [BlockDiagonalMask.from_seqlens([200], window=window) for window in ((4, 0), (-1, 0))]
        wanted = make_layout("documents", layers, context.ranks.size)
        for got, rows in zip(context.sharding.layout.rows, wanted.rows, strict=True):
            assert got.tolist() == rows.tolist()


def specs_of_layers():
    """The masks that layouts count: windows and chunks, of each layer."""
    specs = {family: layer_specs(make_model(family)) for family in ("llama", "mistral", "gemma2")}
    assert specs["llama"] == (CAUSAL, CAUSAL)
    assert specs["mistral"] == (MaskSpec.of((4, 0)),) * 2
    assert specs["gemma2"] == (MaskSpec.of((4, 0)), CAUSAL)
    module = torch.nn.Module()
    module.config = AutoConfig.for_model("llama4_text", num_hidden_layers=4, attention_chunk_size=8)
    chunks = MaskSpec.of((-1, 0), 8)
    assert layer_specs(module) == (chunks, chunks, chunks, CAUSAL)


def in_groups_of_two(shape, exchange):
    """Groups of two ranks, or of a part of a mesh, whose process group is made when it is first used, share a batch."""
    mesh = mesh_of(*(shape or (dist.get_world_size() // 2, 1, 2)))
    group = mesh["within"] if exchange == "ring" else mesh["across", "within"]
    batches = [packed(seed=seed) for seed in range(mesh["dp"].size())]
    model, wanted = make_model(), alone(make_model(), loss_of, *batches)
    trained, groups = DistributedDataParallel(model), set()
    for _ in range(2):
        trained.zero_grad()
        with SequenceParallel(trained, group, exchange=exchange) as context:
            loss = loss_of(trained, **batches[mesh.get_local_rank("dp")])
            loss.backward()
        groups.add(context.ranks.group)
    close(loss.detach(), wanted.loss[mesh.get_local_rank("dp")], "loss")
    assert len(groups) == 1
    for name, p in model.named_parameters():
        close(p.grad, wanted.gradients[name] / len(batches), name)


def layout_divides_sets_of_ranks():
    """Ranks that divide heads get runs of the rows that the layout gives them together."""
    model, mask = make_model(), BlockDiagonalMask.from_seqlens(LENGTHS)
    wanted = make_layout("documents", mask, 2).divide(2).rows
    for pair, order in ((PAIR, (0, 1, 2, 3)), (PAIR[::-1], (0, 2, 1, 3))):
        with SequenceParallel(model, mesh_of(2, 2), exchange=pair) as context:
            model(**packed())
            got = context.sharding.layout.rows
            assert [got[rank].tolist() for rank in order] == [rows.tolist() for rows in wanted]


def refuses_meshes_and_pairs():
    """On entry, on every rank."""
    mesh, model = mesh_of(2, 2), make_model()
    before = state_of(model)
    unnamed = "needs names, such as" if dist.get_rank() < 2 else "isn't in the group"
    pairs = (("ring", "ring"), ("ulysses", "ulysses"), ("p2p", "ulysses"), ("ring", "ulysses", "ring"), ())
    for message, group, exchange in (
        ("needs an exchange for each, such as.*got 'all_gather'.*mesh of one dimension", mesh, "all_gather"),
        ("is for a mesh of two dimensions, and the group has one", None, PAIR),
        *(("a pair: 'ulysses' for the dimension along which ranks divide heads.*got", mesh, pair) for pair in pairs),
        ("DeviceMesh of 3 dimensions, .*'dp', 'across', 'within'.*pass one or two", mesh_of(1, 2, 2), PAIR),
        (r"must ascend row by row; got \[\[0, 2\], \[1, 3\]\]", DeviceMesh("cpu", [[0, 2], [1, 3]]), PAIR),
        (unnamed, DeviceMesh("cpu", [[0], [1]]), PAIR),
    ):
        with pytest.raises(ValueError, match=message):
            SequenceParallel(model, group, exchange=exchange).__enter__()
        assert state_of(model) == before
    over_one = DistributedDataParallel(model, process_group=mesh["within"].get_group())
    with pytest.raises(ValueError, match=r"a batch is shared by the ranks \[0, 1, 2, 3\]"):
        SequenceParallel(over_one, mesh, exchange=PAIR).__enter__()


CASES = {
    **{
        f"{exchange} {layout}": partial(agrees, exchange=exchange, layout=layout)
        for exchange in EXCHANGES
        for layout in LAYOUTS
    },
    **{
        f"{exchange}: {batch}": partial(agrees, batch=batch, exchange=exchange)
        for exchange in EXCHANGES
        for batch in BATCHES
        if batch != "packed"
    },
    **{
        f"{exchange}: {family}": partial(agrees, family, exchange=exchange)
        for exchange in EXCHANGES
        for family in ("mistral", "gemma2", "gpt_oss")
    },
    "summed gradients": partial(agrees, grad_reduce="sum"),
    "loss of transformers": loss_of_transformers,
    "accumulated gradients": accumulated_gradients,
    "other ignore_index": partial(other_ignore_index, "two_rows"),
    "other ignore_index, padded layout": partial(other_ignore_index, "three_tokens"),
    "checkpointed": partial(checkpointed, False),
    "checkpointed, reentrant": partial(checkpointed, True),
    "checkpointed, ulysses": partial(checkpointed, False, exchange="ulysses"),
    "targets on one rank": targets_on_one_rank,
    "own loss, averaged": partial(own_loss, "packed"),
    "own loss, summed": partial(own_loss, "two_rows", "sum", exchange="ring", layout="stripe"),
    "loss in parts, averaged": partial(loss_in_parts, "mean"),
    "loss in parts, summed": partial(loss_in_parts, "sum"),
    "loss by total, averaged": partial(loss_by_total, "mean"),
    "loss by total, summed": partial(loss_by_total, "sum"),
    "loss by total, of few tokens": loss_by_total_of_few_tokens,
    "outputs": partial(outputs, "packed"),
    "outputs of two rows": partial(outputs, "padded", layout="zigzag", exchange="ring"),
    **{f"documents stay apart: {one}": partial(documents_stay_apart, one, "zigzag") for one in EXCHANGES},
    "base model": partial(base_model, False),
    "base model under a head": partial(base_model, True),
    "PEFT model": peft_model,
    "tensors in tuples": tensors_in_tuples,
    "layout beside a vision tower": layout_beside_a_vision_tower,
    "layout of windows and full layers": layout_counts_all_layers,
    "specs of layers": specs_of_layers,
    "in groups of two": partial(in_groups_of_two, None, "ring"),
}
for keys in ("all_gather", "group_cast", "ring"):  # on meshes of two dimensions
    pair = (keys, "ulysses")
    CASES |= {f"mesh, {keys}, {one}": partial(agrees, exchange=pair, layout=one) for one in LAYOUTS}
    CASES |= {f"mesh, {keys}, {one}": partial(agrees, batch=one, exchange=pair) for one in BATCHES if one != "packed"}
    CASES |= {f"mesh, {keys}, {one}": partial(agrees, one, exchange=pair) for one in ("mistral", "gemma2", "gpt_oss")}
CASES |= {
    **{f"mesh, {name}": partial(agrees_on_recurrences, name) for name in ("qwen3_next", "mamba2")},
    "mesh, ulysses first": partial(agrees, exchange=PAIR[::-1]),
    "mesh, summed gradients": partial(agrees, exchange=list(PAIR), grad_reduce="sum"),
    "mesh, loss by total": partial(loss_by_total, "mean", "mesh", PAIR),
    "mesh, pairs along the second dimension": partial(in_groups_of_two, (2, 1, 2), PAIR),
    "mesh, pairs along the first dimension": partial(in_groups_of_two, (2, 2, 1), PAIR),
    "mesh, layout": layout_divides_sets_of_ranks,
    "mesh, refusals": refuses_meshes_and_pairs,
}

# One of each kind; these depend on the number of ranks.
ALSO_ON_FOUR = [
    *(f"{exchange} {layout}" for exchange in EXCHANGES for layout in LAYOUTS),
    *(f"all_gather: {batch}" for batch in BATCHES if batch != "packed"),
    *("ring: two_rows", "ring: three_tokens", "ulysses: padded", "ulysses: three_tokens"),
    *("ring: mistral", "all_gather: gemma2", "ulysses: gpt_oss"),
    *("accumulated gradients", "checkpointed", "targets on one rank"),
    *("own loss, averaged", "own loss, summed", "loss in parts, averaged", "loss by total, averaged"),
    *("outputs of two rows", "documents stay apart: ring", "in groups of two"),
]
