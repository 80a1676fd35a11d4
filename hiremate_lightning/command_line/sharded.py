"""How a module is spread over processes: sharded by FSDP2, divided by tensor parallelism, or neither."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import ConfigurationError, did_you_mean
from ..torch_private import sharding
from .without_device import CountingMeter

SHARDS, PARTS = "shards", "parts"  # dimensions of the mesh
DIMENSIONS = {"colwise": 0, "colwise_gather_output": 0, "rowwise": 1}  # of a weight that a style divides
WHOLE = ("replicated_with_grad_allreduce", "embedding_rowwise")  # styles of modules that every process has here


@dataclass(frozen=True, slots=True)
class Layout:
    """How a module is spread over processes."""

    shards: int = 1  # processes that `fully_shard` shards parameters over
    parts: int = 1  # processes that each block is divided over
    units: tuple[str, ...] = ()  # classes whose modules are sharded each, beside the root; none: the repeated blocks
    dtype: torch.dtype | None = None  # that parameters are gathered in, gradients reduced in float32; None: their own

    @property
    def count(self) -> int:
        """Number of processes."""
        return self.shards * self.parts

    @contextmanager
    def processes(self, device: torch.device) -> Iterator[Any]:
        """Make this process the first of all while a block runs; yield their mesh, None where there is one process."""
        if self.count == 1:
            yield None
            return
        if sharding.may_shard():
            raise ConfigurationError(
                "The factory has started a process group, and --fsdp and --tp imagine one. Let it build the module "
                "alone."
            )
        from torch.distributed.device_mesh import init_device_mesh

        with sharding.imagined_group(self.count):
            yield init_device_mesh(device.type, (self.shards, self.parts), mesh_dim_names=(SHARDS, PARTS))

    def spread(self, root: nn.Module, mesh: Any) -> None:
        """Divide and shard a module."""
        if self.parts > 1:
            divide(root, mesh[PARTS])
        if self.shards == 1:
            return
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # takes seconds to load

        policy = MixedPrecisionPolicy() if self.dtype is None else MixedPrecisionPolicy(self.dtype, torch.float32)
        for module in [*self.units_of(root), root]:
            fully_shard(module, mesh=mesh[SHARDS], mp_policy=policy)

    def units_of(self, root: nn.Module) -> list[nn.Module]:
        """List the modules that are sharded each, without the root."""
        if not self.units:
            return repeated_blocks(root)
        kinds = {type(module).__name__ for module in root.modules()}
        for name in self.units:
            if name not in kinds:
                raise ConfigurationError(
                    f"{type(root).__name__} has no module of a class {name!r} to shard.{did_you_mean(name, kinds)} "
                    "Name classes of its modules with --units, such as that of its layers."
                )
        return [module for module in root.modules() if type(module).__name__ in self.units and module is not root]

    def sent_bytes(self, meter: CountingMeter) -> int:
        """Compute what a process sends to others, by the collectives that were counted: by rings, as NCCL does."""
        gathered = (meter.gathered_bytes + meter.scattered_bytes) * (self.shards - 1) // self.shards
        return gathered + 2 * meter.reduced_bytes * (self.parts - 1) // self.parts


ONE = Layout()


def divide(root: nn.Module, mesh: Any) -> None:
    """Divide modules over processes by the model's own plan for tensor parallelism; refuse what can't be followed."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = getattr(root, "_tp_plan", None)
    if not plan:
        raise ConfigurationError(
            f"{type(root).__name__} has no plan for tensor parallelism: expected _tp_plan, as models of transformers "
            "have it, such as {'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}. Set it in the factory, or leave "
            "--tp out."
        )
    styles = {path: style for path, style in _styles(root, plan).items() if style not in WHOLE}
    for path, style in styles.items():
        module = root.get_submodule(path)
        if style not in DIMENSIONS or not isinstance(module, nn.Linear):
            raise ConfigurationError(
                f"Can't divide {path} ({type(module).__name__}) by the style {style!r} of the model's _tp_plan. "
                f"Expected a torch.nn.Linear and one of: {', '.join([*DIMENSIONS, *WHOLE])}. Use --fsdp alone."
            )
        size = module.weight.shape[DIMENSIONS[style]]
        if size % mesh.size():
            raise ConfigurationError(f"--tp {mesh.size()} doesn't divide the {size} features of {path}.")
    heads = getattr(getattr(root, "config", None), "num_key_value_heads", None)
    if isinstance(heads, int) and heads % mesh.size():
        raise ConfigurationError(f"--tp {mesh.size()} doesn't divide the {heads} heads of keys and values.")
    made = {
        "colwise": ColwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "rowwise": RowwiseParallel(),
    }
    uses = Counter(id(p) for module in root.modules() for p in module.parameters(recurse=False))
    own = {path: style for path, style in styles.items() if uses[id(root.get_submodule(path).weight)] == 1}
    parallelize_module(root, mesh, {path: made[style] for path, style in own.items()})


def _styles(root: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Find the modules that a tensor-parallel plan names; in it, * stands for one part of a path."""
    patterns = {re.compile(re.escape(path).replace(r"\*", "[^.]+")): style for path, style in plan.items()}
    styles = dict[str, str]()
    for path, _ in root.named_modules():
        style = next((style for pattern, style in patterns.items() if pattern.fullmatch(path)), None)
        if style is not None:
            styles[path] = style
    return styles


def repeated_blocks(root: nn.Module) -> list[nn.Module]:
    """List the outermost modules with children that have a sibling of the same class: the layers of a transformer."""
    repeated = list[nn.Module]()
    waiting = [root]
    while waiting:
        children = [child for child in waiting.pop(0).children() if next(child.parameters(), None) is not None]
        kinds = Counter(type(child) for child in children if next(child.children(), None) is not None)
        blocks = [child for child in children if kinds[type(child)] > 1]
        repeated += blocks
        waiting += [child for child in children if child not in blocks]
    return repeated


def planned_paths(root: nn.Module) -> list[str]:
    """List the outermost modules below which nothing is sharded: the root, or its units and what is between them."""
    if not sharding.has_units_below(root):
        return [""]
    paths = list[str]()
    for path, module in root.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in paths)
        trains = any(p.requires_grad for p in module.parameters())
        if trains and not is_inside and not sharding.has_units_below(module):
            paths.append(path)
    return paths
