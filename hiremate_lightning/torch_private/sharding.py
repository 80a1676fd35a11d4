"""What FSDP2 (`fully_shard`) keeps about the modules that it shards, and what DDP has to do with captured code.

Each unit lends its modules whole parameters while it runs, the same tensors at every use; their storages are resized to
nothing in between, and the modules have DTensors.

DistributedDataParallel fills its buckets anew after the first backward, in the order in which that made the gradients.
Three processes or more add up a gradient in an order that depends on its place in its bucket. A captured graph hands
its gradients to autograd all at once, so they are given the order of eager PyTorch as long as buckets are to be filled.
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

_FIRST = 2**64 - 1  # what autograd runs first has the highest number: what adds to `.grad` has this one


def is_unit(module: nn.Module) -> bool:
    """Whether fully_shard() was called on a module, or on a list that it is in."""
    return hasattr(type(module), "_get_fsdp_state")


def has_units(root: nn.Module) -> bool:
    """Whether fully_shard() was called on a module or on a part of it."""
    return any(map(is_unit, root.modules()))


def has_units_below(module: nn.Module) -> bool:
    """Whether fully_shard() was called on a part of a module; hooks around that part end what can be captured."""
    return any(is_unit(part) for part in module.modules() if part is not module)


def may_shard() -> bool:
    """Whether this process is one of several, so that a module may be sharded, now or later."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def offloads(module: nn.Module) -> bool:
    """Whether a unit keeps its parameters on the CPU while another device trains."""
    return any(group.offload_policy.__class__.__name__ == "CPUOffloadPolicy" for group in _groups_of(module))


def whole_parameters(root: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """List the sharded parameters below a module that have been whole: each as the unit lends it, and its shard."""
    pairs = ((getattr(p, "_unsharded_param", None), p.sharded_param) for p in _parameters(root))
    return [(whole, shard) for whole, shard in pairs if whole is not None]


def resized_tensors(root: nn.Module) -> list[torch.Tensor]:
    """List the tensors below a module whose storages FSDP2 resizes: whole parameters, and what they are gathered in."""
    return [
        *(whole for whole, _ in whole_parameters(root)),
        *(t for p in _parameters(root) for t in p.all_gather_outputs),
    ]


@contextmanager
def imagined_group(size: int) -> Iterator[None]:
    """Make this process the first of a group whose collectives do nothing: for tensors without memory."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    torch.distributed.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def shards(root: nn.Module) -> list[torch.Tensor]:
    """List the sharded parameters below a module as an optimizer has them, whatever the modules have now."""
    return [p.sharded_param for p in _parameters(root)]


def buffers_between_units(root: nn.Module) -> list[torch.Tensor]:
    """List what FSDP2 holds beside parameters and gradients: what is gathered, reduced, or waits to be reduced."""
    held = [p.unsharded_accumulated_grad for p in _parameters(root)]
    contexts = {id(group.comm_ctx): group.comm_ctx for group in _groups(root)}
    for group in _groups(root):
        held.append(group._partial_reduce_output)
    for context in contexts.values():
        gathered = getattr(context, "all_gather_state", None)  # both come with the first forward
        held.append(None if gathered is None else gathered.all_gather_result.all_gather_output)
        held.extend(state.reduce_scatter_input for state in getattr(context, "reduce_scatter_states", ()))
    return [tensor for tensor in held if tensor is not None]


def casts_gradients(operator: Any, args: Sequence[Any], device: torch.device) -> bool:
    """Whether an operator casts gradients of mixed types before FSDP2 reduces them: since 2.15, unseen by modes."""
    if operator.name() != "fsdp::chunk_cat_mixed_dtype":
        return False
    types = {gradient.dtype for gradient in args[0]}
    # The kernel of a GPU reads bfloat16 beside single precision as it is.
    return len(types) > 1 and (device.type == "cpu" or types != {torch.bfloat16, torch.float32})


def run_in_the_open(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator by the operators that it is composed of, which modes see."""
    return operator._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def _groups_of(module: nn.Module) -> list[Any]:
    if not is_unit(module):
        return []
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch 2.11 and 2.12 know one group


def _groups(root: nn.Module) -> list[Any]:
    """List the groups of parameters that are communicated together, each once."""
    groups = (group for module in root.modules() for group in _groups_of(module))
    return list({id(group): group for group in groups}.values())


def _parameters(root: nn.Module) -> Iterator[Any]:
    return (parameter for group in _groups(root) for parameter in group.fsdp_params)


# ---------------------------------------------------------------- DistributedDataParallel


@instead_of("torch._dynamo.backends.distributed.DDPOptimizer")
def smallest_buckets(optimizer: Callable[..., Any], bucket_bytes_cap: int, **options: Any) -> Any:
    """Split graphs by buckets of 1 MiB at least: on smaller ones DDPOptimizer fails, and such code runs uncaptured."""
    least = torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
    return optimizer(bucket_bytes_cap=max(bucket_bytes_cap, least), **options)


def fills_buckets() -> bool:
    """Whether a forward under DistributedDataParallel is under way whose backward may decide what buckets hold."""
    module: Any = DistributedDataParallel._active_ddp_module
    return module is not None and not getattr(module, "_has_rebuilt_buckets", True)


def put_in_order(leaves: Sequence[torch.Tensor]) -> None:
    """Make autograd add gradients to leaves in this order, before anything else, when it gets all of them at once."""
    for place, leaf in enumerate(leaf for leaf in leaves if leaf.requires_grad):
        node: Any = get_gradient_edge(leaf).node
        if hasattr(node, "_set_sequence_nr"):
            node._set_sequence_nr(_FIRST - place)
