"""What can't be planned, refused by name and with the way out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..errors import ConfigurationError
from ..torch_private import compiled_by_torch, hooks, sharding
from .slots import Slot

# By names of classes: what is not installed, or not used, need not be imported.
FOREIGN = {
    "FullyShardedDataParallel": (
        "FSDP1 flattens the parameters of each unit into one, which no plan can follow. Use fully_shard() (FSDP2) "
        "or DistributedDataParallel."
    ),
    "DeepSpeedEngine": (  # and what inherits from it: its PipelineEngine
        "DeepSpeed lays all weights into one flat tensor, and no part of such a model could be captured. Use "
        "fully_shard() (FSDP2) or DistributedDataParallel."
    ),
}


def refuse(root: nn.Module) -> None:
    """Refuse what can't be planned, by name and with the way out.

    Raises:
        ConfigurationError: If the model is compiled, sharded or replicated already, or is no module.
    """
    if isinstance(root, type):
        raise ConfigurationError(
            f"Expected a torch.nn.Module to plan, found the class {root.__name__}. Make one of it."
        )
    if not isinstance(root, nn.Module):
        raise ConfigurationError(f"Expected a torch.nn.Module to plan, found {type(root).__name__}.")
    if isinstance(root, torch.jit.ScriptModule):
        raise ConfigurationError(
            f"Can't plan {type(root).__name__}: it is a TorchScript module, which has no Python to capture. Pass the "
            "module that it was made from."
        )
    refuse_each(root, lambda module: _reason_to_refuse(module) or reason_of_others(module))


def refuse_each(root: nn.Module, reason_of: Callable[[nn.Module], str | None]) -> None:
    """Refuse a model of which any module has a reason to be refused.

    Raises:
        ConfigurationError: Names the module and says the reason.
    """
    for name, module in root.named_modules():
        reason = reason_of(module)
        if reason is not None:
            where = f"submodule {name!r} ({type(module).__name__})" if name else type(module).__name__
            raise ConfigurationError(f"Can't plan {where}: {reason}")


def reason_of_others(module: nn.Module) -> str | None:
    """Return why what another tool did to a module prevents a plan; it may have done so after we took over."""
    reason = next((FOREIGN[c.__name__] for c in type(module).__mro__ if c.__name__ in FOREIGN), None)
    if reason is None and any(p.device.type == "xla" for p in module.parameters(recurse=False)):
        return "XLA decides on memory itself. Train on CUDA devices or on the CPU."
    if reason is None and sharding.offloads(module):
        return (
            "fully_shard() keeps its parameters on the CPU (CPUOffloadPolicy), which a budget for the device does not "
            "count. Leave offload_policy out."
        )
    return reason


def _reason_to_refuse(module: nn.Module) -> str | None:
    call, is_optimized = hooks.get_call(module), type(module).__name__ == "OptimizedModule"
    if isinstance(call, Slot):
        return "it is planned already. Call remove_hiremate(model) first."
    if call is not None or (is_optimized and not compiled_by_torch.runs_eager(module)):
        return "it is compiled already. Pass the module itself, without torch.compile or .compile()."
    if isinstance(module, nn.DataParallel):
        return "DataParallel copies modules at every step. Use DistributedDataParallel, one process for each device."
    if any(nn.parameter.is_lazy(p) for p in module.parameters(recurse=False)):
        return "its parameters have no shape yet. Call the model once with a batch under torch.no_grad() first."
    return None
