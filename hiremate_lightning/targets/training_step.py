"""The training step of a LightningModule as one planned function."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from ..calls.refused import refuse
from ..calls.slots import TrainingStepSlot
from ..errors import ConfigurationError
from ..sessions.session import Session
from ..torch_private import sharding
from ..torch_private.hacks import replaced_entries
from .entry_points import Compiler
from .overseeing import check_captured, listen_to_optimizers, planned_call


class TrainingStepTarget:
    """The training step of a LightningModule, loss included, as one planned function.

    `self.log` and `self.log_dict` are kept out of the trace: they read and write the Trainer's state. Calls without
    gradients, as of a validation that calls the training step, run as they are.

    Attributes:
        root: The LightningModule.
        session: Plans the step.
    """

    METHOD = "training_step"

    def __init__(self, root: nn.Module, session: Session) -> None:
        refuse(root)
        self.root = root
        self.session = session
        self._eager = getattr(root, self.METHOD)
        self._compiler = Compiler(session)
        self._compiled = self._compiler.compile(self._eager)

    def attach(self) -> None:
        """Take over the training step, until the session closes."""
        if not plans_step_of(self.root):
            listen_to_optimizers(self.session)
            self.session.closing.callback(self._compiler.close)
            slot = TrainingStepSlot(self._call, self._eager)
            self.session.closing.enter_context(replaced_entries(self.root.__dict__, {self.METHOD: slot}))

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or self.session.leaves_out(self.METHOD, (args, kwargs)):
            return self._eager(*args, **kwargs)
        if self.session.begin_call(self.METHOD, (args, kwargs), self._eager):
            return self.session.run_eager((args, kwargs), partial(self._eager, *args, **kwargs))
        if not self.session.captured_count and sharding.has_units(self.root):
            raise ConfigurationError(
                "target='training_step' can't be planned where fully_shard() shards a part of it: hooks around each "
                "unit end what can be captured. Leave target out to plan the units."
            )
        before = self.session.runs
        name = f"{type(self.root).__name__}.{self.METHOD}"
        logs = [name for name in ("log", "log_dict") if hasattr(self.root, name)]
        untraced = {name: torch.compiler.disable(getattr(self.root, name)) for name in logs}
        with planned_call(self.session, name, self.root), replaced_entries(self.root.__dict__, untraced):
            result = self._compiled(*args, **kwargs)
        if self.session.runs == before:
            check_captured(self.session, name, result)
        return result


def plans_step_of(module: nn.Module) -> bool:
    """Whether the training step of a module is planned as a whole."""
    return isinstance(module.__dict__.get(TrainingStepTarget.METHOD), TrainingStepSlot)
