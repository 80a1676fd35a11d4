"""Values without memory that are made like others, with no operation run for them: that takes fifty times as long.

A copy of traced operations gives what the traced ones gave: tensors of the same kinds, which share storages alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ..same_captures import expect
from ..tensor_state import changes_uncounted, is_symbolic, layout_of, map_leaves, storage_id


def can_be_made(value: Any) -> bool:
    """Whether a `Memory` can make a value like this: plain tensors of definite sizes that nothing has changed in place.

    A change that was counted may have been one of the operations that gave the value, which a copy would not make.
    """
    if type(value) in (tuple, list):
        return all(map(can_be_made, value))
    if value is None:
        return True
    if type(value) is not FakeTensor or value.layout is not torch.strided or value.is_inference():
        return False
    is_definite = not is_symbolic(value) and not value._has_symbolic_sizes_strides
    return is_definite and value._version == 0 and not value.is_conj() and not value.is_neg()


class Memory:
    """Where copies of traced values lie: they share storages as the traced ones do. None has memory.

    Traced values are known by their ids: they must live as long as this.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._places = dict[int, tuple[torch.UntypedStorage, int]]()  # by storages of traced values: offset added
        self._states = dict[torch.device, dict[str, Any]]()  # attributes of a new tensor
        self._copies = dict[int, torch.Tensor]()  # by the ids of traced values

    def give(self, shown: Sequence[Any], values: Sequence[Any]) -> None:
        """Lay out values that are in the place of traced ones, which must lie in memory as those do."""
        for one, value in zip(shown, values, strict=True):
            expect(isinstance(value, torch.Tensor) and layout_of(one) == layout_of(value), "what a block gets")
            place = value.untyped_storage(), int(value.storage_offset() - one.storage_offset())
            first, offset = self._places.setdefault(storage_id(one), place)
            expect((first._cdata, offset) == (place[0]._cdata, place[1]), "what of a block's inputs lies together")
            self._copies[id(one)] = value
        places = [storage._cdata for storage, _ in self._places.values()]
        expect(len(set(places)) == len(places), "what of a block's inputs lies apart")

    def like(self, value: Any) -> Any:
        """Return what is in a copy in the place of a traced value."""
        if isinstance(value, torch.Tensor):
            return self._tensor_like(value)
        return map_leaves(lambda v: self._tensor_like(v) if isinstance(v, torch.Tensor) else v, value)

    def _tensor_like(self, shown: torch.Tensor) -> torch.Tensor:
        copy = self._copies.get(id(shown))
        if copy is None:
            copy = self._copies[id(shown)] = self._made_like(shown)
        return copy

    def _made_like(self, shown: torch.Tensor) -> torch.Tensor:
        empty, device = self._laid_out(shown, shown.untyped_storage()), shown.device
        if device not in self._states:
            made = FakeTensor(self._mode, empty, device)
            self._states[device] = dict(vars(made))
            return made.requires_grad_(shown.requires_grad)
        # As its class makes it, but with known attributes: these take most of the time.
        made = torch.Tensor._make_subclass(
            FakeTensor, empty, shown.requires_grad, dispatch_device=True, device_for_backend_keys=device
        )
        vars(made).update(self._states[device])
        return made

    def _laid_out(self, shown: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
        if storage._cdata not in self._places:
            made = torch.empty_strided(shown.shape, shown.stride(), dtype=shown.dtype, device="meta")
            memory = made.untyped_storage()
            if memory.nbytes() == storage.nbytes():  # so it lies at the beginning
                self._places[storage._cdata] = memory, 0
                return made
            self._places[storage._cdata] = torch.UntypedStorage(storage.nbytes(), device="meta"), 0
        memory, offset = self._places[storage._cdata]
        made = torch.empty(0, dtype=shown.dtype, device="meta")
        with changes_uncounted([made]):
            return made.set_(memory, shown.storage_offset() + offset, shown.shape, shown.stride())
