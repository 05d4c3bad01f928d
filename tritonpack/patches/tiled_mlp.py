"""The MLPs of decoder layers on tiles of rows, so that no tensor holds the intermediate states of a whole batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from tritonpack.errors import UnsupportedModelError
from tritonpack.patches.foreign_modules import ROUNDING, ROUNDING_OF_OTHERS
from tritonpack.patches.head_alone import own_tensors
from tritonpack.patches.head_gradients import require_no_backward_hooks
from tritonpack.patches.packing_context import PackingContext
from tritonpack.patches.parts import InstanceForward
from tritonpack.patches.report import holds
from tritonpack.patches.tile_recompute import RandomState, RowTiles, map_tiles
from tritonpack.patches.tiles import same
from tritonpack.patches.tokens import text_config

REMEDY = "Patch the model without tiled_mlp."
TRIED_ROWS = 4


class Found(NamedTuple):
    """The feed-forward parts of a model's layers.

    Attributes:
        mlps: the dense MLPs by name.
        experts: names of the modules with the weights of experts.
    """

    mlps: dict[str, nn.Module]
    experts: tuple[str, ...]


class TiledMlp(InstanceForward):
    """The forward of an MLP on tiles of rows. Rows that fit into one tile run as before.

    Attributes:
        path: the name of the MLP in the model.
        rows: of a tile.
        checked: whether a call has seen that it treats each row by itself.
    """

    def __init__(self, module: nn.Module, context: PackingContext, path: str, rows: int) -> None:
        super().__init__(module, context)
        self.path, self.rows, self.checked = path, rows, False

    @torch.compiler.disable
    def call(self, *args: Any, **kwargs: Any) -> Any:
        x = self.bound(args, kwargs).get(self.names[0])
        if len(args) + len(kwargs) != 1 or not isinstance(x, Tensor) or x.ndim < 2:
            raise UnsupportedModelError(
                f"{self.path} ({self.name}) was called with {len(args)} positional and {len(kwargs)} named arguments, "
                f"and tiled_mlp takes one tensor of states, (..., tokens, width). {REMEDY}"
            )
        self._require_whole()
        if not self.checked and x.numel():
            self._check(x)
        flat = x.flatten(0, -2)
        if flat.shape[0] <= self.rows:
            return self.inner(x)
        if torch.is_grad_enabled():
            require_no_backward_hooks(self.module, None, "tiled_mlp")
        leading = (1,) * (x.ndim - 2)
        tiles = RowTiles(
            lambda tile: self.inner(tile.view(*leading, *tile.shape)).flatten(0, -2),
            lambda: list(own_tensors(self.module)),
            self.rows,
            f"{self.path} ({self.name})",
        )
        return map_tiles(tiles, flat).unflatten(0, x.shape[:-1])

    def _require_whole(self) -> None:
        """Refuse parts of the MLP that are sharded by themselves: ranks may have different numbers of tiles."""
        inner = [name for name, one in self.module.named_modules() if name and hasattr(one, "_fsdp_wrapped_module")]
        for name, parameter in self.module.named_parameters():
            if hasattr(parameter, "device_mesh") or hasattr(parameter, "ds_id"):
                inner.append(name)
        if inner:
            raise UnsupportedModelError(
                f"{inner[0]} of {self.path} ({self.name}) is sharded by itself during the model's forward pass, and "
                "tiled_mlp needs it whole. With FSDP shard whole layers or whole MLPs, but not their parts. "
                f"DeepSpeed's ZeRO-3 and tensor parallelism can't be combined with it. {REMEDY}"
            )

    def _check(self, x: Tensor) -> None:
        """Refuse a module that doesn't treat each row by itself. This waits for the device, so it runs once."""
        generator = torch.Generator(device="cpu").manual_seed(0)
        draws = torch.randn(TRIED_ROWS, x.shape[-1], generator=generator, dtype=torch.float32, device="cpu")
        rows = draws.to(x.device, x.dtype).view(*(1,) * (x.ndim - 2), TRIED_ROWS, x.shape[-1])
        with saved_tensors_hooks(same, same), RandomState(x).again(), _NoDropout():
            whole = self.inner(rows)
            why = ""
            if not isinstance(whole, Tensor) or whole.shape[:-1] != rows.shape[:-1]:
                why = "it doesn't return one tensor of states"
            else:
                each = torch.cat([self.inner(rows[..., i : i + 1, :]) for i in range(TRIED_ROWS)], -2)
                dtype = torch.float32 if whole.dtype == torch.float64 else whole.dtype  # in which Beam's MLP computes
                limit = ROUNDING.get(dtype, ROUNDING_OF_OTHERS) * whole.detach().abs().float().max()
                if not (whole - each).detach().abs().float().max() <= limit:
                    why = "a row's results depend on other rows or on its place"
        if why:
            raise UnsupportedModelError(
                f"{self.path} ({self.name}) can't be computed in tiles: tried on {TRIED_ROWS} made-up tokens, {why}. "
                f"{REMEDY}"
            )
        self.checked = True


class _NoDropout(TorchFunctionMode):
    """Dropout that keeps everything."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.dropout:
            return args[0]
        return function(*args, **(kwargs or {}))


def find_mlps(model: nn.Module, modules: Sequence[PreTrainedModel]) -> Found:
    """The dense MLPs in the layers of a model, and the experts, which aren't tiled.

    A dense MLP is a module in a layer that takes one argument, holds two linear modules or more, one of them from
    states to wider ones, and nothing that takes several arguments. So routers, experts and adapters of low rank aren't.

    Args:
        model: the model that is patched.
        modules: its modules that run on packed rows. Other models in it, such as towers of images, are left out.

    Raises:
        UnsupportedModelError: there is no dense MLP.
    """
    width = min((getattr(text_config(one.config), "hidden_size", 0) or 0 for one in modules), default=0)
    mlps: dict[str, nn.Module] = {}
    experts: list[str] = []
    seen: set[nn.Module] = set()

    def walk(module: nn.Module, path: str, inside: bool) -> None:
        for name, child in module.named_children():
            where = f"{path}.{name}" if path else name
            other = isinstance(child, PreTrainedModel) and not any(holds(child, one) for one in modules)
            if child in seen or other:
                continue
            seen.add(child)
            if inside and _is_dense_mlp(child, width):
                mlps[where] = child
                continue
            if inside and _holds_experts(child):
                experts.append(where)
                continue
            walk(child, where, inside or isinstance(module, nn.ModuleList))

    walk(model, "", False)
    if not mlps:
        why = "no module there takes one tensor and holds several linear modules, one of them wider than the states"
        if experts:
            why = f"its experts ({', '.join(experts[:3])}{', ...' if len(experts) > 3 else ''}) aren't tiled"
        raise UnsupportedModelError(
            f"{type(model).__name__} has no MLP in its layers that could be computed in tiles: {why}. {REMEDY}"
        )
    return Found(mlps, tuple(experts))


def _is_dense_mlp(module: nn.Module, width: int) -> bool:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) or _sizes(module) or len(_arguments(module)) != 1:
        return False
    if len(_required(module)) != 1 or any(len(_required(one)) > 1 or _holds_experts(one) for one in module.modules()):
        return False
    linears = list(_linears(module))
    return len(linears) > 1 and any(given == width < made for given, made in linears)


def _holds_experts(module: nn.Module) -> bool:
    """Whether a module holds one weight for all experts, which has three dimensions in most models."""
    weights = module.parameters(recurse=False)
    stacked = any(p.ndim == 3 for p in weights) and not isinstance(module, nn.modules.conv._ConvNd)
    return stacked or type(module).__name__.endswith("Experts")


def _linears(module: nn.Module) -> Iterator[tuple[int, int]]:
    """The sizes of the outermost linear modules in a module: an adapter counts as the linear module that it adapts."""
    for child in module.children():
        if sizes := _sizes(child):
            yield sizes
        else:
            yield from _linears(child)


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """The widths that a linear module takes and gives; None for others. Its weights may be sharded or quantized."""
    for names in (("in_features", "out_features"), ("nx", "nf")):  # of torch and PEFT, and of transformers' Conv1D
        sizes = tuple(getattr(module, name, None) for name in names)
        if all(isinstance(size, int) for size in sizes):
            return sizes  # type: ignore[return-value]
    return None


def _arguments(module: nn.Module) -> list[inspect.Parameter]:
    return list(inspect.signature(type(module).forward).parameters.values())[1:]


def _required(module: nn.Module) -> list[str]:
    """The arguments of a module's forward that have no default."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in _arguments(module) if p.default is p.empty and p.kind in kinds]
