"""transformers' Trainer with the callback: the same numbers within the budget; what is refused is named."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from hiremate_lightning import BudgetError, ConfigurationError
from hiremate_lightning.targets.modules import targets_of

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]  # transformers warns of what is its own


class Words(Dataset):
    """Random words, to be predicted from themselves."""

    def __init__(self) -> None:
        self.rows = torch.randint(0, 64, (32, 24), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


@pytest.fixture
def callback_of():
    pytest.importorskip("transformers")
    from hiremate_lightning.integrations.transformers_trainer import HiRemateTrainerCallback

    return HiRemateTrainerCallback


def trainer_of(folder, *callbacks, **arguments):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    set_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=24, n_embd=32, n_layer=2, n_head=2, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    settings = {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        **arguments,
    }
    data = {"train_dataset": Words(), "eval_dataset": Words()}
    return Trainer(GPT2LMHeadModel(config), TrainingArguments(**settings), **data, callbacks=[*callbacks])


def test_training_is_the_same_within_the_budget(callback_of, tmp_path):
    """With mixed precision, accumulated gradients, clipping and evaluation, as users have them."""
    arguments = {"bf16": True, "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    arguments["per_device_eval_batch_size"] = 4
    callback = callback_of("80%", verbose=True)
    weights = []
    for callbacks in ((), (callback,)):
        trainer = trainer_of(tmp_path, *callbacks, **arguments)
        trainer.train()
        weights.append([p.detach().clone() for p in trainer.model.parameters()])
    assert all(torch.equal(plain, planned) for plain, planned in zip(*weights, strict=True))
    plan = callback.plan
    assert plan is not None
    assert plan.planned_peak_bytes < plan.unplanned_peak_bytes
    assert plan.measured.peak_bytes is not None
    assert plan.measured.peak_bytes <= plan.budget_bytes
    assert (tmp_path / "hiremate_plan.html").is_file()
    assert targets_of(trainer.model) is None


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("gradient_checkpointing", "in place of activation checkpointing (2 modules)"),
        ("torch_compile", "in place of torch.compile"),
    ],
)
def test_arguments_that_do_what_a_plan_does_are_replaced(callback_of, tmp_path, capsys, argument, words):
    """For the time of the training; the numbers are those without them."""
    callback = callback_of("80%", time_limit_s=2)
    weights = []
    for callbacks, arguments in (((), {}), ((callback,), {argument: True})):
        trainer = trainer_of(tmp_path, *callbacks, **arguments)
        trainer.train()
        weights.append([p.detach().clone() for p in trainer.model.parameters()])
    assert all(torch.equal(plain, planned) for plain, planned in zip(*weights, strict=True))
    assert callback.plan is not None
    assert callback.plan.measured.peak_bytes <= callback.plan.budget_bytes
    assert words in capsys.readouterr().err
    if argument == "gradient_checkpointing":
        assert trainer.model.transformer.h[0]._gradient_checkpointing_func.func is checkpoint
        assert trainer.model.is_gradient_checkpointing


def test_the_callback_checks_its_own_arguments(callback_of):
    with pytest.raises(BudgetError, match="it has no unit"):
        callback_of("10")
    with pytest.raises(ConfigurationError, match="Unknown solver"):
        callback_of("50%", solver="magic")
