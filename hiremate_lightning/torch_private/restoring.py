"""Run code on tensors as they are, and put back what it has written to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from . import tensor_state

_WRITTEN_UNDECLARED = ("running_mean", "running_var")  # by kernels of batch norms, whose schemas don't tell


class Writes(TorchDispatchMode):
    """Calls a function with each dense tensor that an operator may be about to write to.

    Args:
        tell: The function.
    """

    def __init__(self, tell: Callable[[torch.Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.supports_higher_order_operators = True
        self._tell = tell

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, after the function was called."""
        kwargs = kwargs or {}
        for tensor in _written(operator, args, kwargs):
            if tensor.layout is torch.strided:
                self._tell(tensor)
        return operator(*args, **kwargs)


class Restoring:
    """Copies the memory of tensors before an operator writes to it, as `Writes` tells.

    Args:
        tensors: The tensors to watch. What else lies on their memory is watched with them.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._watched = {tensor_state.storage_id(t): t for t in tensors if t.layout is torch.strided}
        self._copies: dict[int, torch.Tensor] = {}

    def copy(self, tensor: torch.Tensor) -> None:
        """Copy the memory of a tensor, where it is watched, before the first write to it."""
        storage = tensor_state.storage_id(tensor)
        if storage in self._watched and storage not in self._copies:
            self._copies[storage] = tensor_state.memory_of(self._watched[storage]).clone()

    def changed(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a tensor holds other bytes than before."""
        storage = tensor_state.storage_id(tensor) if tensor.layout is torch.strided else None
        return storage in self._copies and not torch.equal(self._copies[storage], tensor_state.memory_of(tensor))

    def restore(self) -> None:
        """Put back all bytes as they were; no version counter sees it."""
        for storage, copy in self._copies.items():
            tensor_state.memory_of(self._watched[storage]).copy_(copy)
        self._copies.clear()


def _written(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """List the tensors that an operator may write to: by its schema, or all that a kernel of the user's takes."""
    if isinstance(operator, HigherOrderOperator):
        return tensor_state.tensors_among((args, kwargs)) if "triton" in operator.name() else []
    found: list[Any] = []
    for position, argument in enumerate(operator._schema.arguments):
        is_declared = argument.alias_info is not None and argument.alias_info.is_write
        if is_declared or argument.name in _WRITTEN_UNDECLARED:
            found.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return tensor_state.tensors_among(found)
