"""The separate package `pytorch_lightning`: the callbacks work in its Trainer; the strategy belongs to `lightning`."""

from __future__ import annotations

import pytest
import torch

from hiremate_lightning.callbacks import HiRemateCallback, MemoryMonitor
from hiremate_lightning.integrations.lightning_strategy import HiRemateStrategy
from tests.exact import assert_same
from tests.loops import BUDGET, assert_within_budget, make_batch, make_model

pl = pytest.importorskip("pytorch_lightning", reason="the package pytorch_lightning is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:pytorch_lightning")


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = make_model()

    def training_step(self, batch, index):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trainer(*callbacks, **options):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(accelerator="cpu", devices=1, max_steps=5, callbacks=list(callbacks), **quiet, **options)


def fit(*callbacks, **options):
    module = Regression()
    batches = torch.utils.data.DataLoader([(make_batch(i),) for i in range(5)], batch_size=None)
    runner = trainer(*callbacks, **options)
    torch.manual_seed(3)
    runner.fit(module, batches)
    return module


@pytest.mark.parametrize(
    "options", [{}, {"precision": "bf16-mixed", "accumulate_grad_batches": 2}], ids=["fp32", "bf16"]
)
def test_a_fit_with_the_callback_is_a_plain_fit_bit_for_bit(options):
    expected = fit(**options)
    callback = HiRemateCallback(BUDGET, verbose=False)

    found = fit(callback, MemoryMonitor(), **options)

    assert_within_budget(callback.plan)
    assert_same(found.state_dict(), expected.state_dict())
    assert all(m._compiled_call_impl is None for m in found.modules())


@pytest.mark.parametrize("chosen", ["hiremate", HiRemateStrategy()], ids=["name", "object"])
def test_the_strategy_is_not_one_of_its_trainer(chosen):
    with pytest.raises(ValueError, match="strategy="):
        trainer(strategy=chosen)
