"""Records the operators of torch that a block calls."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Recorded(TorchDispatchMode):
    """A block whose calls are recorded: (operator, arguments, result) of each, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], Any]] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        self.calls.append((operator, args, result))
        return result
