"""The Lightning strategy "hiremate": trains on one device with a `HiRemateCallback` that it adds by itself.

Importing this module registers the name. The strategy does no more than `HiRemateCallback`, and the callback works with
every strategy, DDP included. Prefer the callback unless `strategy=` is the only argument that you can set.

The strategy is for the `lightning` package. `pytorch_lightning` has its own registry; use the callback there.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from ..callbacks.planning import HiRemateCallback
from ..planning.plan import Plan


class HiRemateStrategy(SingleDeviceStrategy):
    """Train on one device within a budget of bytes, with the same numbers as without a plan.

    The device is the Trainer's: `Trainer(accelerator="gpu", devices=[1], strategy=HiRemateStrategy("10 GiB"))`.

    Args:
        budget: As for `HiRemateCallback`.
        accelerator: As for `SingleDeviceStrategy`, like `checkpoint_io` and `precision_plugin`.
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
    # The Trainer sets this attribute. SingleDeviceStrategy lacks it, and made by name it would stay on the CPU.
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
        """The latest plan, None before the first one; it stays after fitting."""
        return self._callback.plan

    @property
    def root_device(self) -> torch.device:
        """The device that the Trainer chose, the CPU before there is a Trainer."""
        return self.parallel_devices[0] if self.parallel_devices else self._root_device

    def setup_environment(self) -> None:
        """Insert the callback before all others; the Trainer has all its callbacks now and calls `setup` later.

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
        """Raise a MisconfigurationException if the Trainer has chosen several devices."""
        super()._configure_launcher()
        count = len(self.parallel_devices or ())
        if count > 1:
            raise MisconfigurationException(
                f"strategy='hiremate' trains on one device, found {count}. Pass devices=1, or plan on all of them by "
                "Trainer(strategy='ddp', callbacks=[HiRemateCallback(...)])."
            )


if HiRemateStrategy.strategy_name not in StrategyRegistry:
    HiRemateStrategy.register_strategies(StrategyRegistry)
