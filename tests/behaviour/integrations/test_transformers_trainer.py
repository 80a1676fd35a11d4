"""transformers' Trainer with the callback: the same numbers within the budget; what is refused is named."""

from __future__ import annotations

import pytest
from torch.utils.checkpoint import checkpoint

from hiremate_lightning import BudgetError, ConfigurationError
from hiremate_lightning.targets.modules import targets_of
from tests.exact import assert_same
from tests.trainers import Sentences

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]  # transformers warns of what is its own


@pytest.fixture
def callback_of():
    pytest.importorskip("transformers")
    from hiremate_lightning.integrations.transformers_trainer import HiRemateTrainerCallback

    return HiRemateTrainerCallback


def trained(folder, *callbacks, **arguments):
    """Train a small GPT-2; return its Trainer."""
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
    data = dict.fromkeys(("train_dataset", "eval_dataset"), Sentences(32, 24))
    trainer = Trainer(GPT2LMHeadModel(config), TrainingArguments(**settings), **data, callbacks=[*callbacks])
    trainer.train()
    return trainer


def test_training_is_the_same_within_the_budget(callback_of, tmp_path):
    """With mixed precision, accumulated gradients, clipping and evaluation, as users have them."""
    arguments = {"bf16": True, "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    arguments["per_device_eval_batch_size"] = 4
    callback = callback_of("80%", verbose=True)
    plain, planned = (trained(tmp_path, *callbacks, **arguments).model for callbacks in ((), (callback,)))
    assert_same(planned.state_dict(), plain.state_dict())
    plan = callback.plan
    assert plan is not None
    assert plan.planned_peak_bytes < plan.unplanned_peak_bytes
    assert plan.measured.peak_bytes is not None
    assert plan.measured.peak_bytes <= plan.budget_bytes
    assert (tmp_path / "hiremate_plan.html").is_file()
    assert targets_of(planned) is None


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
    plain, planned = trained(tmp_path).model, trained(tmp_path, callback, **{argument: True}).model
    assert_same(planned.state_dict(), plain.state_dict())
    assert callback.plan is not None
    assert callback.plan.measured.peak_bytes <= callback.plan.budget_bytes
    assert words in capsys.readouterr().err
    if argument == "gradient_checkpointing":
        assert planned.transformer.h[0]._gradient_checkpointing_func.func is checkpoint
        assert planned.is_gradient_checkpointing


def test_the_callback_checks_its_own_arguments(callback_of):
    with pytest.raises(BudgetError, match="it has no unit"):
        callback_of("10")
    with pytest.raises(ConfigurationError, match="Unknown solver"):
        callback_of("50%", solver="magic")
