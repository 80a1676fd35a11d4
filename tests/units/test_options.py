"""Each option is defined once, in `hiremate_lightning.options`; all else is made from it, or compared with it here."""

import inspect
import re
from pathlib import Path

import pytest
from torch import nn

from hiremate_lightning import find_max_batch_size, hiremate
from hiremate_lightning.callbacks import HiRemateBatchSizeFinder, HiRemateCallback
from hiremate_lightning.command_line.run import parser
from hiremate_lightning.errors import ConfigurationError
from hiremate_lightning.integrations.transformers_trainer import HiRemateTrainerCallback
from hiremate_lightning.options import OPTIONS, SIZE_OPTIONS, Option, SessionOptions, make_size_options
from hiremate_lightning.planning.planner import make_options
from hiremate_lightning.targets.modules import targets_of
from tests import option_docs

ROOT = Path(__file__).resolve().parents[2]
OTHERS = {  # another allowed value of each option
    "budget": "1 GiB",
    "time_limit_s": 7.0,
    "max_plans": 3,
    "on_infeasible": "warn",
    "cache_dir": "costs",
    "solver": "segments",
    "compile": "inductor",
    "offload": "auto",
    "host_budget": "2 GiB",
    "verify": 2,
    "sizes": {"words": {1: (1, 9)}},
    "recomputable_operators": ("mylibrary::attention",),
    "verbose": False,
}
WRONG = {  # values that are not allowed, of the options that have a check
    "time_limit_s": 0,
    "max_plans": 0,
    "on_infeasible": "stop",
    "cache_dir": "/proc/plans",
    "compile": "nvfuser",
    "offload": "never",
    "host_budget": "50%",
    "verify": "always",
    "recomputable_operators": "attention",
    "verbose": "loud",
    "init_val": 0,
    "max_overhead": -0.5,
    "objective": "fastest",
    "margin": 1.0,
    "max_trials": 2,
}
FLAGS = [option for option in OPTIONS.values() if option.flag is not None]


def test_each_option_is_tried_here():
    assert list(OTHERS) == list(OPTIONS)
    checked = [o.name for o in {**OPTIONS, **SIZE_OPTIONS}.values() if o.allowed]
    assert sorted(WRONG) == sorted(checked)


def test_files_are_written_as_the_options_say():
    assert option_docs.stale() == [], "run: python -m tests.option_docs --write"


ENTRIES = {
    **dict.fromkeys((hiremate, HiRemateCallback), OPTIONS),
    **dict.fromkeys((find_max_batch_size, HiRemateBatchSizeFinder), option_docs.SEARCH),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_signatures_and_docstrings_have_each_option(entry):
    parameters, documented = inspect.signature(entry).parameters, " ".join(entry.__doc__.split())
    for option in ENTRIES[entry].values():
        assert parameters[option.name].default == option.default
        assert parameters[option.name].annotation.replace("'", '"') == option.annotation
        assert f"{option.name}: {option.meaning}" in documented


def test_the_page_of_the_interface_has_each_option():
    assert option_docs.table() in (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("option", FLAGS, ids=lambda option: option.name)
def test_flags_are_in_the_help_and_the_table(option: Option):
    assert f"`{option.flag_name}`" in option_docs.table()
    help_of_all = " ".join(parser().format_help().split())
    assert option.flag_name in help_of_all
    assert option.flag["help"] in help_of_all


@pytest.mark.parametrize("option", FLAGS, ids=lambda option: option.name)
def test_a_flag_sets_its_option(option: Option):
    other = OTHERS[option.name]
    given = [option.flag_name] if isinstance(other, bool) else [option.flag_name, str(other)]
    assert getattr(parser().parse_args([*given, "train.py"]), option.name) == other
    assert getattr(parser().parse_args(["train.py"]), option.name) == option.default


@pytest.mark.parametrize(("name", "value"), WRONG.items())
def test_a_wrong_value_is_named_with_what_is_allowed(name: str, value):
    option = {**OPTIONS, **SIZE_OPTIONS}[name]
    words = f"{name} must be {option.allowed}, found {value!r}"
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        make_options("1 GiB", **{name: value}) if name in OPTIONS else make_size_options(**{name: value})
    explained = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert f"{name} must be {option.allowed}, found …" in explained


@pytest.mark.parametrize("name", OPTIONS)
def test_hiremate_passes_each_option_on(name: str):
    model = hiremate(nn.Linear(2, 2), **{"budget": "1 GiB", "verbose": False, name: OTHERS[name]})
    planned = targets_of(model)
    assert planned is not None
    assert getattr(planned.session.options, name) == OPTIONS[name].value_of(OTHERS[name])


@pytest.mark.parametrize("name", OPTIONS)
def test_callbacks_pass_each_option_on(name: str):
    callback = HiRemateCallback(**{"budget": "1 GiB", name: OTHERS[name]})
    assert getattr(callback.options, name) == OPTIONS[name].value_of(OTHERS[name])
    assert HiRemateTrainerCallback(**{"budget": "1 GiB", name: OTHERS[name]}).plan is None


def test_what_is_left_out_has_its_default():
    assert make_options("auto") == SessionOptions()
    assert make_options(**{name: option.default for name, option in OPTIONS.items()}) == SessionOptions()


def test_a_misspelt_option_is_answered_with_the_nearest():
    with pytest.raises(TypeError, match=r"no option 'max_plan'\. Did you mean 'max_plans'\?"):
        make_options("1 GiB", max_plan=3)


def test_an_option_is_written_into_files_that_lack_it():
    """The writer adds it to the signature and to the docstring; whatever is there is passed on."""
    new = Option("patience", "int", 4, "Steps to wait, a number.")
    entry = option_docs.EntryPoint("hiremate_lightning/api.py", "hiremate", {**OPTIONS, "patience": new}, has_all=True)
    (path,) = option_docs.stale((entry,))
    assert path.name == "api.py"
    text = option_docs._written((entry,))[path]
    assert "    patience: int = 4,\n) -> nn.Module:" in text
    assert "        patience: Steps to wait, a number.\n\n    Returns:" in text
