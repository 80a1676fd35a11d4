"""Read what FSDP2 (`fully_shard`) keeps about sharded modules, and set the order of gradients for DDP's buckets.

An FSDP2 unit lends its modules unsharded parameters while it runs, the same tensors at every use. In between, their
storages are resized to 0 and the modules hold DTensors.

DistributedDataParallel rebuilds its buckets after the first backward, in the order in which gradients became ready.
Three processes or more add up a gradient in an order that depends on its place in its bucket. A captured graph returns
all gradients at once, so `put_in_order` gives them the order of eager PyTorch until the buckets are rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._C import DispatchKey
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from .hacks import instead_of

_FIRST = 2**64 - 1  # AccumulateGrad's sequence number; autograd runs the highest one first


def is_unit(module: nn.Module) -> bool:
    """Whether fully_shard() was called on a module, or on a list that contains it."""
    return hasattr(type(module), "_get_fsdp_state")


def has_units(root: nn.Module) -> bool:
    """Whether fully_shard() was called on a module or on a submodule."""
    return any(map(is_unit, root.modules()))


def has_units_below(module: nn.Module) -> bool:
    """Whether fully_shard() was called on a submodule, whose hooks break the captured graph."""
    return any(is_unit(part) for part in module.modules() if part is not module)


def may_shard() -> bool:
    """Whether torch.distributed is initialized, so that a module may be sharded now or later."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def offloads(module: nn.Module) -> bool:
    """Whether a unit offloads its parameters to the CPU while another device trains."""
    return any(group.offload_policy.__class__.__name__ == "CPUOffloadPolicy" for group in _groups_of(module))


def whole_parameters(root: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (unsharded parameter, its shard) for each parameter below a module that FSDP2 has unsharded before."""
    pairs = ((getattr(p, "_unsharded_param", None), p.sharded_param) for p in _parameters(root))
    return [(whole, shard) for whole, shard in pairs if whole is not None]


def resized_tensors(root: nn.Module) -> list[torch.Tensor]:
    """Return the tensors below a module whose storages FSDP2 resizes: unsharded parameters and all-gather outputs."""
    return [
        *(whole for whole, _ in whole_parameters(root)),
        *(t for p in _parameters(root) for t in p.all_gather_outputs),
    ]


@contextmanager
def imagined_group(size: int) -> Iterator[None]:
    """Make this process rank 0 of a fake process group, whose collectives do nothing: for fake tensors."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    torch.distributed.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def shards(root: nn.Module) -> list[torch.Tensor]:
    """Return the sharded parameters below a module, as an optimizer holds them, also while modules lend whole ones."""
    return [p.sharded_param for p in _parameters(root)]


def buffers_between_units(root: nn.Module) -> list[torch.Tensor]:
    """Return FSDP2's buffers: all-gather outputs, reduce-scatter inputs and outputs, gradients that wait for it."""
    held = [p.unsharded_accumulated_grad for p in _parameters(root)]
    contexts = {id(group.comm_ctx): group.comm_ctx for group in _groups(root)}
    for group in _groups(root):
        held.append(group._partial_reduce_output)
    for context in contexts.values():
        gathered = getattr(context, "all_gather_state", None)  # FSDP2 sets both in the first forward
        held.append(None if gathered is None else gathered.all_gather_result.all_gather_output)
        held.extend(state.reduce_scatter_input for state in getattr(context, "reduce_scatter_states", ()))
    return [tensor for tensor in held if tensor is not None]


def casts_gradients(operator: Any, args: Sequence[Any], device: torch.device) -> bool:
    """Whether FSDP2's operator casts gradients of mixed dtypes in its kernel, unseen by dispatch modes: since 2.15."""
    if operator.name() != "fsdp::chunk_cat_mixed_dtype":
        return False
    types = {gradient.dtype for gradient in args[0]}
    # The CUDA kernel reads bfloat16 beside float32 without a cast.
    return len(types) > 1 and (device.type == "cpu" or types != {torch.bfloat16, torch.float32})


def run_in_the_open(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator by its composite kernel, so that dispatch modes see the operators that it is composed of."""
    return operator._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def _groups_of(module: nn.Module) -> list[Any]:
    if not is_unit(module):
        return []
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch 2.11 and 2.12 have one group


def _groups(root: nn.Module) -> list[Any]:
    """Return the FSDP2 parameter groups below a module, each once; none in a process that trains alone."""
    if not may_shard():
        return []
    groups = (group for module in root.modules() for group in _groups_of(module))
    return list({id(group): group for group in groups}.values())


def _parameters(root: nn.Module) -> Iterator[Any]:
    return (parameter for group in _groups(root) for parameter in group.fsdp_params)


# ---------------------------------------------------------------- DistributedDataParallel


@instead_of("torch._dynamo.backends.distributed.DDPOptimizer")
def smallest_buckets(optimizer: Callable[..., Any], bucket_bytes_cap: int, **options: Any) -> Any:
    """Let DDPOptimizer split graphs at 1 MiB or more: smaller buckets make it fail, and such code runs uncaptured."""
    least = torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
    return optimizer(bucket_bytes_cap=max(bucket_bytes_cap, least), **options)


def fills_buckets() -> bool:
    """Whether a DDP forward is running whose backward may still decide the order of gradients in buckets."""
    module: Any = DistributedDataParallel._active_ddp_module
    return module is not None and not getattr(module, "_has_rebuilt_buckets", True)


def put_in_order(leaves: Sequence[torch.Tensor]) -> None:
    """Make autograd add gradients to `leaves` in this order, before it runs other nodes, if it gets all at once."""
    for place, leaf in enumerate(leaf for leaf in leaves if leaf.requires_grad):
        node: Any = get_gradient_edge(leaf).node
        if hasattr(node, "_set_sequence_nr"):
            node._set_sequence_nr(_FIRST - place)
