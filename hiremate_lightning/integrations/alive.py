"""The models and optimizers that exist in this process, found among all objects: those of a script that nobody read."""

from __future__ import annotations

import gc

import torch
from torch import nn

from ..api import inside_wrappers
from ..calls.refused import refuse
from ..calls.replaced import take_compiled
from ..errors import ConfigurationError
from ..objects import parameters_of
from ..targets.candidates import has_weights
from ..targets.modules import targets_of
from ..targets.training_step import plans_step_of
from ..torch_private import compiled_by_torch
from .compile_backend import hiremate as compile_backend


class Alive:
    """The modules and optimizers that exist now. The search takes tenths of a second, so only new modules cause one."""

    def __init__(self) -> None:
        gc.collect()  # free unused modules and optimizers, so that they are not counted
        existing = gc.get_objects()
        modules = [o for o in existing if issubclass(type(o), nn.Module) and "_modules" in o.__dict__]
        inner_ids = {id(inner) for outer in modules for inner in outer.__dict__["_modules"].values()}
        self._tops = [top for top in modules if id(top) not in inner_ids]  # the modules that no other one contains
        optimizers = [o for o in existing if issubclass(type(o), torch.optim.Optimizer) and hasattr(o, "param_groups")]
        self.optimizers = [
            o for o in optimizers if not isinstance(getattr(o, "optimizer", None), torch.optim.Optimizer)
        ]
        self._parameter_ids = {id(p) for o in self.optimizers for p in parameters_of(o)}

    def knows(self, module: nn.Module) -> bool:
        """Whether any of a module's parameters is in an optimizer."""
        return any(id(p) in self._parameter_ids for p in module.parameters())

    def optimizers_of(self, root: nn.Module) -> list[torch.optim.Optimizer]:
        """List the optimizers that have any of a model's parameters."""
        ids = {id(p) for p in root.parameters()}
        return [o for o in self.optimizers if any(id(p) in ids for p in parameters_of(o))]

    def model_around(self, module: nn.Module) -> nn.Module:
        """Return the outermost module that contains one, without wrappers; of several, that with most parameters."""
        tops = [top for top in self._tops if any(inner is module for inner in top.modules())]
        best = max(tops or [module], key=lambda top: sum(id(p) in self._parameter_ids for p in top.parameters()))
        return unwrapped(best)

    def others_trained(self, root: nn.Module) -> list[nn.Module]:
        """List the other models that optimizers train and that can be planned, but are not planned yet."""
        tops = [top for top in self._tops if has_weights(top) and self.knows(top)]
        ids = {id(module) for module in root.modules()}
        inner_tops = {id(top): top for top in map(unwrapped, tops)}
        others = [top for top in inner_tops.values() if ids.isdisjoint(map(id, top.modules()))]
        others = [top for top in others if targets_of(top) is None and not plans_step_of(top)]
        return [top for top in others if may_be_planned(top) and not self.is_compiled_by_script(top)]

    def is_compiled_by_script(self, root: nn.Module) -> bool:
        """Whether the script compiles a model or part of it with the torch.compile backend "hiremate"."""
        compiled_modules = [*compiled_by_torch.compiled_around(root), *compiled_by_torch.compiled_inside(root)]
        return any(compiled_by_torch.is_compiled_by(compiled, compile_backend) for compiled in compiled_modules)


def may_be_planned(model: nn.Module) -> bool:
    """Whether a model can be planned, once what it compiles is replaced."""
    restores = take_compiled(model)
    try:
        refuse(model)
    except ConfigurationError:
        return False
    finally:
        for restore in restores:
            restore()
    return True


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside of all wrappers that a script puts around it for training."""
    inner = inside_wrappers(module)
    if isinstance(inner, nn.DataParallel) and len(inner.device_ids or ()) < 2:
        inner = inner.module
    inner = compiled_by_torch.original(inner)
    return module if inner is module else unwrapped(inner)


def name_of(module: nn.Module) -> str:
    """Return the class of a module inside of its wrappers, by which messages name it."""
    return type(unwrapped(module)).__name__.removeprefix("FSDP")
