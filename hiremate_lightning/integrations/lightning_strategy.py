"""The Lightning strategy "hiremate": one device, and the callback's planning without naming the callback.

Importing this module registers the name. It adds nothing to what `HiRemateCallback` does, and the callback goes with
every strategy, DDP included; prefer it unless the choice has to be made by `strategy=` alone.

It is for the `lightning` package. `pytorch_lightning` has a registry and strategies of its own; use the callback there.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from ..callbacks.planning import HiRemateCallback
from ..planning.plan import Plan


class HiRemateStrategy(SingleDeviceStrategy):
    """Train on one device within a budget of bytes, with the same numbers.

    The device is the Trainer's: `Trainer(accelerator="gpu", devices=[1], strategy=HiRemateStrategy("10 GiB"))`.

    Args:
        budget: As for `HiRemateCallback`.
        accelerator: As for `SingleDeviceStrategy`, like the two that follow.
        checkpoint_io: Reads and writes checkpoints.
        precision_plugin: Converts inputs, modules and losses.
        options: The other arguments of `HiRemateCallback`, by name.

    Raises:
        BudgetError: If the budget can't be read.
        ConfigurationError: If another argument is out of its range.

    Example:
        >>> import hiremate_lightning.integrations.lightning_strategy
        >>> trainer = Trainer(strategy="hiremate")
    """

    strategy_name = "hiremate"
    # The Trainer fills it in; SingleDeviceStrategy, which has none, would stay on the CPU when it is made by its name.
    parallel_devices: list[torch.device] | None = None

    def __init__(
        self,
        budget: int | float | str = "auto",
        *,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        self._callback = HiRemateCallback(budget, **options)

    @property
    def plan(self) -> Plan | None:
        """The latest plan, None before there is one; it stays after fitting."""
        return self._callback.plan

    @property
    def root_device(self) -> torch.device:
        """The device that the Trainer chose, the CPU before there is a Trainer."""
        return self.parallel_devices[0] if self.parallel_devices else self._root_device

    def setup_environment(self) -> None:
        """Put the callback in front of the others, which are complete now, before their `setup` is called.

        Raises:
            MisconfigurationException: If the Trainer or the model has a HiRemateCallback already.
        """
        assert self.lightning_module is not None, "the Trainer connects the model first"
        callbacks = self.lightning_module.trainer.callbacks  # type: ignore[attr-defined]
        if any(isinstance(c, HiRemateCallback) and c is not self._callback for c in callbacks):
            raise MisconfigurationException(
                "strategy='hiremate' plans with a HiRemateCallback of its own. Keep one of the two: "
                "the callback, or the strategy."
            )
        if self._callback not in callbacks:
            callbacks.insert(0, self._callback)
        super().setup_environment()

    def _configure_launcher(self) -> None:
        """Refuse several devices, as soon as the Trainer knows them."""
        super()._configure_launcher()
        count = len(self.parallel_devices or ())
        if count > 1:
            raise MisconfigurationException(
                f"strategy='hiremate' trains on one device, found {count}. Pass devices=1, or plan on all of them by "
                "Trainer(strategy='ddp', callbacks=[HiRemateCallback(...)])."
            )


if HiRemateStrategy.strategy_name not in StrategyRegistry:
    HiRemateStrategy.register_strategies(StrategyRegistry)
