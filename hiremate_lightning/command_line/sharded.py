"""How a module is spread over processes: sharded by FSDP2, divided by tensor parallelism, or neither."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import ConfigurationError, did_you_mean
from ..torch_private import sharding
from ..torch_private.storage_events import StorageEvents

SHARDS, PARTS = "shards", "parts"  # dimensions of the mesh


@dataclass(frozen=True, slots=True)
class Layout:
    """How a module is spread over processes.

    Attributes:
        shards: Processes that `fully_shard` shards parameters over, 1 for none.
        parts: Processes that each block is divided over, 1 for none.
        units: Classes whose modules are sharded each, beside the root; none for the repeated blocks.
        dtype: Type that parameters are gathered in, their gradients reduced in float32; None for their own.
    """

    shards: int = 1
    parts: int = 1
    units: tuple[str, ...] = ()
    dtype: torch.dtype | None = None

    @contextmanager
    def processes(self, device: torch.device) -> Iterator[Any]:
        """Let this process be the first of all while a block runs; yield their mesh, None where there is one process.

        Args:
            device: Where the module is.
        """
        if self.shards * self.parts == 1:
            yield None
            return
        with sharding.imagined_group(self.shards * self.parts):
            yield torch.distributed.device_mesh.init_device_mesh(
                device.type, (self.shards, self.parts), mesh_dim_names=(SHARDS, PARTS)
            )

    def spread(self, root: nn.Module, mesh: Any) -> None:
        """Divide and shard a module.

        Raises:
            ConfigurationError: If it has no module of a class that was named.
        """
        if self.shards == 1:
            return
        policy = torch.distributed.fsdp.MixedPrecisionPolicy()
        if self.dtype is not None:
            policy = torch.distributed.fsdp.MixedPrecisionPolicy(self.dtype, torch.float32)
        for module in [*self.units_of(root), root]:
            torch.distributed.fsdp.fully_shard(module, mesh=mesh[SHARDS], mp_policy=policy)

    def units_of(self, root: nn.Module) -> list[nn.Module]:
        """List the modules that are sharded each, without the root.

        Raises:
            ConfigurationError: If there is no module of a class that was named.
        """
        if not self.units:
            return repeated_blocks(root)
        kinds = {type(module).__name__ for module in root.modules()}
        for name in self.units:
            if name not in kinds:
                raise ConfigurationError(
                    f"{type(root).__name__} has no module of a class {name!r} to shard.{did_you_mean(name, kinds)} "
                    "Name classes of its modules with --units, such as the class of its layers."
                )
        return [module for module in root.modules() if type(module).__name__ in self.units and module is not root]

    def sent_bytes(self, events: StorageEvents) -> int:
        """Compute what a process sends to others, by the collectives that were seen: by rings, as NCCL does."""
        gathered = (events.gathered_bytes + events.scattered_bytes) * (self.shards - 1) // self.shards
        return gathered + 2 * events.reduced_bytes * (self.parts - 1) // self.parts


ONE = Layout()


def repeated_blocks(root: nn.Module) -> list[nn.Module]:
    """List the outermost modules with children that have a sibling of the same class: the layers of a transformer."""
    found = list[nn.Module]()
    waiting = [root]
    while waiting:
        children = [child for child in waiting.pop(0).children() if next(child.parameters(), None) is not None]
        kinds = Counter(type(child) for child in children if next(child.children(), None) is not None)
        blocks = [child for child in children if kinds[type(child)] > 1]
        found += blocks
        waiting += [child for child in children if child not in blocks]
    return found


def planned_paths(root: nn.Module) -> list[str]:
    """List the outermost modules below which nothing is sharded: the root, or its units and what is between them."""
    if not sharding.has_units_below(root):
        return [""]
    found = list[str]()
    for path, module in root.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in found)
        trains = any(p.requires_grad for p in module.parameters())
        if trains and not is_inside and not sharding.has_units_below(module):
            found.append(path)
    return found
