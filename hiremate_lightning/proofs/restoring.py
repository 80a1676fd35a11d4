"""Run code on tensors as they are, and put back what it has written to them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..torch_private import tensor_state
from ..torch_private.aot import HigherOrderOperator
from ..torch_private.tensor_state import TorchDispatchMode

_WRITTEN_UNDECLARED = ("running_mean", "running_var")  # by kernels of batch norms, whose schemas don't tell

_UNWRITTEN = tuple(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
)


class Watching(TorchDispatchMode):
    """Sees each operator: tells what it may write to, and fills memory that it returns unwritten.

    So two runs of code find the same numbers in such memory.

    Args:
        tell: Called with each dense tensor that an operator may be about to write to.
        fill: The byte to fill with; 255 makes NaN of floating-point numbers.

    Attributes:
        has_filled: Whether there was any such memory.
    """

    def __init__(self, tell: Callable[[torch.Tensor], None], fill: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.supports_higher_order_operators = True
        self.has_filled = False
        self._tell, self._byte = tell, fill

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator.

        Before it runs, the function is told what it may write to. After it, memory that it left unwritten is filled.
        """
        kwargs = kwargs or {}
        for tensor in _written(operator, args, kwargs):
            if tensor.layout is torch.strided:
                self._tell(tensor)
        result = operator(*args, **kwargs)
        if getattr(operator, "overloadpacket", None) in _UNWRITTEN and tensor_state.is_dense(result):
            self.has_filled |= result.numel() > 0
            if result.dtype is torch.bool:
                result.fill_(bool(self._byte))
            elif type(result) is torch.Tensor and not result.is_quantized:
                tensor_state.memory_of(result).fill_(self._byte)
        return result


class Restoring:
    """Copies the memory of tensors before an operator writes to it, as `Watching` tells.

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
    places = _places_written(operator)
    if not places:
        return []
    return tensor_state.tensors_among([args[i] if i < len(args) else kwargs.get(name) for i, name in places])


@functools.cache
def _places_written(operator: Any) -> tuple[tuple[int, str], ...]:
    """List the arguments that an operator writes to, each by its position and its name."""
    places = []
    for position, argument in enumerate(operator._schema.arguments):
        is_declared = argument.alias_info is not None and argument.alias_info.is_write
        if is_declared or argument.name in _WRITTEN_UNDECLARED:
            places.append((position, argument.name))
    return tuple(places)
