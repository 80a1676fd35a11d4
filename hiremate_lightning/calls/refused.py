"""Models that can't be planned: why, and what to do instead, with the names of the framework in use."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..errors import ConfigurationError
from ..torch_private import compiled_by_torch, hooks, sharding
from .slots import Slot

_FSDP1 = "FSDP1 flattens the parameters of each unit"
_DEEPSPEED = "DeepSpeed lays all weights into one flat tensor, and no part of such a model could be captured. "
_XLA = "XLA decides on memory itself. Train on CUDA"

# Modules by the name of their class, so that packages that are not installed or not used are not imported.
MODULES = {
    "FullyShardedDataParallel": _FSDP1
    + " into one, which no plan can follow. Use fully_shard() (FSDP2) or DistributedDataParallel.",
    "DeepSpeedEngine": _DEEPSPEED + "Use fully_shard() (FSDP2) or DistributedDataParallel.",  # and PipelineEngine in it
}
# Kinds of training that Accelerate has.
DISTRIBUTED_TYPES = {
    "FSDP": _FSDP1 + ". Set fsdp_version: 2, or launch with --multi_gpu (DDP).",
    "DEEPSPEED": _DEEPSPEED + "Launch with FSDP and fsdp_version: 2, or with --multi_gpu (DDP).",
    "MEGATRON_LM": "Megatron-LM splits and recomputes layers itself. Launch with --multi_gpu (DDP) instead.",
    "XLA": _XLA + " devices or on the CPU.",
}
# Strategies of Lightning, by the name of their class.
STRATEGIES = {
    "FSDPStrategy": _FSDP1 + ". Use ModelParallelStrategy or strategy='ddp'.",
    "DeepSpeedStrategy": _DEEPSPEED + "Use ModelParallelStrategy or strategy='ddp'.",
    "SingleDeviceXLAStrategy": _XLA + " or on the CPU.",
    "XLAStrategy": _XLA + " or on the CPU.",
}


def refuse(root: nn.Module) -> None:
    """Refuse a model that can't be planned; the error names the module and what to do.

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
    """Raise a ConfigurationError if any module of a model has a reason to be refused."""
    for name, module in root.named_modules():
        reason = reason_of(module)
        if reason is not None:
            where = f"submodule {name!r} ({type(module).__name__})" if name else type(module).__name__
            raise ConfigurationError(f"Can't plan {where}: {reason}")


def reason_of_others(module: nn.Module) -> str | None:
    """Return how another tool has changed a module so that it can't be planned; it may do so after `attach`."""
    reason = next((MODULES[c.__name__] for c in type(module).__mro__ if c.__name__ in MODULES), None)
    if reason is None and any(p.device.type == "xla" for p in module.parameters(recurse=False)):
        return DISTRIBUTED_TYPES["XLA"]
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
