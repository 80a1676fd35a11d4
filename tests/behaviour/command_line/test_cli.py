"""The command line: each command, its exit code, and what it says where something is wrong."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hiremate_lightning.command_line import commands, doctor
from hiremate_lightning.command_line.arguments import read_inputs
from hiremate_lightning.command_line.cli import main
from hiremate_lightning.command_line.doctor import Grade
from hiremate_lightning.command_line.factory import Workload, make_input
from hiremate_lightning.command_line.user_code import find_factory, import_failures
from hiremate_lightning.errors import ConfigurationError
from hiremate_lightning.planning.solvers import worker
from hiremate_lightning.planning.solvers.base import Solution, Status
from hiremate_lightning.reporting.html_report import write_html
from hiremate_lightning.reporting.timeline import COLOURS, Band
from hiremate_lightning.units import format_bytes
from tests.processes import run_python
from tests.tiny import blocks_plan
from tests.units.torch_private.test_hacks import as_on

MODELS = """
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self, depth=3):
        super().__init__(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(depth)))

def with_inputs():
    return Net(), torch.zeros(512, 32)

class Scored(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, ids, labels=None):
        return {"loss": (self.net(ids) - labels).square().mean()}

def by_name():
    return Scored(), {"ids": torch.zeros(8, 32), "labels": torch.zeros(8, 32)}

def by_one_tensor():
    ids = torch.zeros(8, 32)
    return Scored(), {"ids": ids, "labels": ids}

def of_trained_inputs():
    return Net(), torch.zeros(8, 32, requires_grad=True)

class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        return self.convolution(x)

def needs_more(width):
    return Net()

class Picking(Net):
    def forward(self, x):
        return super().forward(x[x.sum(1) > 0])

def picks():
    return Picking(), torch.zeros(8, 32)

class Split(Net):
    def forward(self, x):
        x = self[0](x)
        torch._dynamo.graph_break()
        return self[2](self[1](x))

def fails():
    raise RuntimeError("no weights\\nat all")

def interrupted():
    raise KeyboardInterrupt

def number():
    return 3

built = Net()
frozen = Net().requires_grad_(False)
compiled = torch.compile(Net())
LARGE = 512
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "zoo_of_models.py"
    path.write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path / "restored_with_the_path")
    monkeypatch.delitem(sys.modules, "zoo_of_models", raising=False)
    return str(path)


def plan(models, *more, name="Net", budget="70%"):
    inputs = [] if name in ("with_inputs", "by_name") or "--input" in more else ["--input", "512x32"]
    return main(["plan", f"{models}:{name}", *inputs, "--budget", budget, "--time-limit", "2", *more])


STOPPED = "hiremate: stopped by Ctrl-C, before there was an answer\n"


class TestPlan:
    def test_a_plan_is_shown_with_what_it_rests_on(self, models, capsys):
        assert plan(models) == 0
        output = capsys.readouterr().out
        text = " ".join(output.split())
        assert text.startswith("╭─ HiRemate plan of Net ─")
        assert "Times are estimates from operation counts (0.05 TFLOP/s, 10 GB/s: about one core of a server)" in text
        assert "Captured as one graph at batch size 512, without memory" in text
        assert "optimizer: AdamW" in text
        assert "\x1b" not in output

    def test_json_is_all_that_goes_to_the_output(self, models, capsys):
        assert plan(models, "--json", "-", "--optimizer", "none") == 0
        numbers = json.loads(capsys.readouterr().out)
        assert numbers["planned_peak_bytes"] <= numbers["budget_bytes"] < numbers["unplanned_peak_bytes"]
        assert numbers["resident"]["optimizer state"] == 0
        assert numbers["batch_size"] == 512
        assert numbers["costs"] == "estimate"
        assert numbers["planned_step_ms"] > numbers["step_ms"]

    @pytest.mark.parametrize("name", ["with_inputs", "by_name", "built"])
    def test_factories_have_several_forms(self, models, capsys, name):
        assert plan(models, name=name, budget="100%") == 0
        assert "HiRemate plan of" in capsys.readouterr().out

    def test_costs_are_measured_where_asked_for(self, models, capsys):
        assert plan(models, "--measure", "--json", "-") == 0
        numbers = json.loads(capsys.readouterr().out)
        assert numbers["costs"].startswith("cpu")
        assert numbers["notes"][0].startswith("Times and workspaces of operations are measured")

    def test_rates_are_as_given(self, models, capsys):
        times = []
        for bandwidth in ("1", "10"):
            assert plan(models, "--json", "-", "--tflops", "1000", "--bandwidth", bandwidth) == 0
            times.append(json.loads(capsys.readouterr().out)["step_ms"])
        assert 5 < times[0] / times[1] < 10

    def test_a_budget_that_nothing_fits_is_a_problem(self, models, capsys):
        assert plan(models, budget="1MiB", name="with_inputs") == 0  # 512 rows of 32 need less
        capsys.readouterr()
        assert plan(models, "--input", "51200x32", budget="1MiB") == 1
        error = capsys.readouterr().err
        assert error.startswith("hiremate: The budget 1.00 MiB (1,048,576 bytes) is too small for Net.")
        assert error.count("\n") == 1
        assert "on_infeasible" not in error, "the command has no such option"
        for named in re.search(r"smallest budget found is (.* [KM]iB) \((.*) bytes", error).groups():
            size = named if named.endswith("iB") else f"{named}B"
            assert plan(models, "--input", "51200x32", budget=size) == 0, size

    def test_debug_shows_where_an_error_comes_from(self, models):
        with pytest.raises(RuntimeError, match="no weights"):
            plan(models, "--debug", name="fails")


def test_inputs_that_are_listed_twice_are_an_error(models, capsys):
    assert plan(models, "--input", "a=5x32", "--input", "b=5x32") == 2
    assert "--input: given twice. Put what it lists behind one, with commas between" in capsys.readouterr().err


MISTAKES = [
    ("{}:Net", "gives a module without inputs. Name them, such as --input 64x3x224x224"),
    ("{}:Net --input 5x", "Can't read the input '5x'. Expected SHAPE, SHAPE:DTYPE"),
    ("{}:Net --input 5x5:tiny", "torch has no type 'tiny', in '5x5:tiny'"),
    ("{}:Net --input 5x32 --budget 12", "Cannot read the budget '12': it has no unit"),
    ("{}:needs_more", "can't be called without arguments (missing a required argument"),
    ("{}:number", "gives int. Expected a torch.nn.Module, (module, inputs)"),
    ("{}:LARGE", "gives int. Expected a torch.nn.Module, (module, inputs)"),
    ("{}:nothing", "has no 'nothing'. Name a function, a class or a module object in it."),
    ("{}:Nett", "has no 'Nett'. Did you mean 'Net'"),
    ("{}:Net --input 5x5:flaot32", "torch has no type 'flaot32', in '5x5:flaot32'. Did"),
    ("{}:with_inputs --optimizer Adan", "no optimizer 'Adan'. Did you mean 'Adam'"),
    ("{}:with_inputs --optimizer adamw", "'adamw'. Did you mean 'AdamW'?"),
    ("{}:with_inputs --loss modle", "Unknown loss 'modle'. Did you mean 'model'?"),
    ("{}:with_inputs --autocast bf16", "found 'bf16'. Did you mean 'bfloat16'?"),
    ("{}:fails --html no/plan.html", "There is no folder 'no' to write plan.html to."),
    ("{}:fails --svg no/plan.svg", "There is no folder 'no' to write plan.svg to."),
    ("{}:fails --json no/plan.json", "There is no folder 'no' to write plan.json to."),
    ("{}:fails --svg .", "'.' is a folder. Name a file in it."),
    ("{}:fails --svg /proc/plan.svg", "Can't write '/proc/plan.svg': "),
    ("{}:Net --input 5x31", "Net can't be called with --input 5x31: a and b must have"),
    ("{}:Images --input 2x4x8x8", "to have 3 channels, but got 4 channels instead ("),
    ("{}", "Expected PACKAGE.MODULE:NAME or path/to/file.py:NAME."),
    ("nowhere.py:Net", "There is no file 'nowhere.py'. Expected path/to/file.py:NAME."),
    ("no_such_package:Net", "There is no module 'no_such_package'."),
    ("{}:compiled --input 5x32", "Can't plan OptimizedModule: it is compiled already."),
    ("{}:with_inputs --solver luck", "Unknown solver 'luck'. Choose one of: "),
    ("{}:with_inputs --time-limit 0", "--time-limit must be above 0, found 0.0"),
    ("{}:with_inputs --autocast int8", "--autocast must be bfloat16 or float16"),
    ("{}:with_inputs --device abacus", "Can't plan for device 'abacus'. Choose cpu or cuda."),
    ("{}:with_inputs --device gpu", "'gpu'. Did you mean 'cuda'? Choose cpu or cuda."),
    ("{}:with_inputs --zero-grad befor", "--zero-grad must be one of before, after-forward, accumulate, found 'befor'"),
    ("{}:with_inputs --offload", "a GPU into the host's memory, which device 'cpu' has already. Add --device cuda"),
    ("{}:with_inputs --offload --device cuda --host-budget 9%", "must be bytes such as \"64 GiB\", found '9%'"),
    ("{}:Net --input 4,8", "x joins the sizes of an input, a comma separates inputs."),
    ("{}:Net --input 4x32,8x32", "Net can't be called with --input as it is (too many"),
    ("{}:with_inputs --budget 0.5", 'it has no unit. Expected bytes with a unit ("12 GiB", "800 MB"), a'),
    ("{}:with_inputs --budget 0.5", '"auto". Did you mean "50%"?'),
    ("{}:Net --input a=4x32", "A comma separates inputs, and NAME=SHAPE passes one"),
    ("./nowhere:Net", "Can't read './nowhere:Net'. Expected PACKAGE.MODULE:NAME or path"),
]


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        *((*mistake, 2) for mistake in MISTAKES),
        ("{}:fails", "RuntimeError: no weights ({}:", 1),
        ("{}:picks", "The step of {}:picks depends on values of its tensors ({}:", 1),
    ],
)
def test_a_mistake_gets_an_error_of_one_line(models, capsys, arguments, words, code):
    budget = [] if "--budget" in arguments else ["--budget", "50%"]
    assert main(["plan", *arguments.replace("{}", models).split(), *budget]) == code
    output, error = capsys.readouterr()
    assert words.replace("{}", models) in error
    assert error.startswith("hiremate: ")
    assert error.count("\n") == 1
    assert not output


@pytest.mark.parametrize(
    ("gb_per_s", "words"),
    [
        ("1000", "without it, this budget takes +"),
        ("0.001", "nothing goes there, since that would not be faster; without it, this budget takes +"),
    ],
)
def test_plan_says_what_offloading_gains(models, capsys, tmp_path, gb_per_s, words):
    asked = ["--input", "65536x32", "--device", "cuda", "--offload", "--host-link", gb_per_s]
    path = tmp_path / "plan.svg"
    assert plan(models, *asked, "--svg", str(path), name="Net", budget="60%") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert words in text
    assert "The smallest budget found is" in text
    assert (COLOURS[Band.OFFLOADED] in path.read_text()) == ("nothing goes" not in words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_what_needs_the_device_is_refused_without_it(models, capsys):
    assert plan(models, "--device", "cuda", budget="auto") == 2
    assert '"auto" needs the device, and there is no CUDA device here' in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["plan"], ["bake"], ["plan", "x:y"], ["show"], ["-x"]], ids=" ".join)
def test_a_command_line_that_makes_no_sense_is_a_mistake(capsys, arguments):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"(hiremate[ a-z]*): .*\. See: \1 --help\n", error)


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["help"], 0), (["--help"], 0)], ids=str)
def test_without_a_command_help_is_shown(capsys, arguments, code):
    assert main(arguments) == code
    output, error = capsys.readouterr()
    assert "doctor    check versions" in output
    assert not error


INPUTS = "--input 4x8 --budget 50%"
EARLY = [
    f"plan nowhere.py:Net {INPUTS}",
    *(f"plan {{}}:Net {more}" for more in ("--input 4x8 --budget 12", "--input 4,8 --budget 50%")),
    *(f"plan {{}}:Net {INPUTS} --{option}" for option in ("device gpu", "solver luck", "loss modle")),
    *(f"plan {{}}:Net {INPUTS} --{option}" for option in ("autocast bf16", "zero-grad after", "html no/plan.html")),
    *(f"plan {{}}:Net {INPUTS} --{option}" for option in ("time-limit 0", "fsdp auto")),
    *(f"curve {{}}:Net --input 4x8 --{option}" for option in ("points 0", "fsdp 2,4")),
    f"fit {{}}:Net {INPUTS}",
    "fit {}:Net --input 4x8 --budget 1GiB --max-overhead 3",
    f"compare {{}}:Net {INPUTS} --methods portfolio,hlip",
    *("doctor nowhere.py:Net", "doctor nowhere.py --epochs 3"),
    *(f"run --{option} {{}}" for option in ("budget lots", "time-limit 0", "cache-dir {}/plans", "budgt 1GiB")),
    "run",
]


def test_mistakes_and_help_are_shown_before_torch_is_loaded(models):
    folder = Path(models).parent
    lines = [line.replace("{}", models).split() for line in EARLY]
    code = (
        "import sys; from hiremate_lightning.command_line.cli import main\n"
        "def code(line):\n"
        "    try:\n        return main(line)\n    except SystemExit as stop:\n        return stop.code\n"
        f"print([code(line) for line in {[*lines, [], ['plan', '--help']]}], 'torch' in sys.modules)"
    )
    result = run_python("-c", code, cwd=folder)
    assert result.stdout.endswith(f"{[2] * len(EARLY) + [2, 0]} False\n")
    assert result.stderr.count("\n") == len(EARLY)


def test_ctrl_c_stops_a_command_with_a_message(models, capsys):
    assert plan(models, name="interrupted") == 130
    assert capsys.readouterr().err == STOPPED


def test_what_ends_graphs_is_one_sentence_with_its_line(models, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    assert plan(models, name="Split") == 0
    output, error = capfd.readouterr()
    assert re.search(r"without memory\. torch\.compile ends graphs, and .*zoo_of_models\.py:\d+, in forward", output)
    assert not error


def test_a_wrong_shape_is_named_without_the_log_of_torch(models, capsys, request):
    """It has a traceback for each operation that fails on tensors without memory."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(handler)
    request.addfinalizer(lambda: log.removeHandler(handler))
    assert plan(models, "--input", "5x31") == 2
    assert not records
    printed = capsys.readouterr().err
    assert printed.startswith("hiremate: Net can't be called with --input 5x31: ")
    assert "with 5x31. Give --input the shapes that its forward takes" in printed


@pytest.mark.parametrize(
    ("arguments", "usage", "words"),
    [
        ("plna x:y", "hiremate", "there is no command 'plna'. Did you mean 'plan'? Choose one of: plan, curve"),
        ("--budget 1GiB plan", "hiremate", "options come after the command, such as plan, "),
        ("bake", "hiremate", "there is no command 'bake'. Choose one of: plan, curve, compare, fit, show, doctor"),
        ("plan x:y --devise cuda", "hiremate plan", "no option '--devise'. Did you mean '--device'?"),
        ("plan x:y --batch 3", "hiremate plan", "no option '--batch'. The batch size is the first size of"),
        ("plan x:y --memory 3", "hiremate plan", "no option '--memory'. The memory to stay within is --bu"),
        ("curve x:y --budget 3", "hiremate curve", "This command looks at many budgets; plan, fit"),
        ("fit x:y --bugdet=1GiB", "hiremate fit", "there is no option '--bugdet'. Did you mean '--budget'"),
        ("doctor --jsno -", "hiremate doctor", "there is no option '--jsno'. Did you mean '--json'?"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_nearest(capsys, arguments, usage, words):
    assert main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{usage}: ")
    assert words in error
    assert error.endswith(f" See: {usage} --help\n")


@pytest.mark.parametrize("command", ["plan", "curve", "compare", "fit", "show", "doctor"])
def test_help_has_examples(capsys, command):
    assert main([command, "--help"]) == 0
    output = capsys.readouterr().out
    assert f"examples:\n  hiremate {command}" in output
    assert max(map(len, output.splitlines())) <= 80


class TestCurve:
    def test_less_memory_takes_more_time(self, models, capsys):
        arguments = ["curve", f"{models}:with_inputs", "--points", "3", "--time-limit", "3"]
        assert main([*arguments, "--json", "-"]) == 0
        points = json.loads(capsys.readouterr().out)["points"]
        assert len(points) >= 2
        peaks, times = [p["peak_bytes"] for p in points], [p["step_ms"] for p in points]
        assert peaks == sorted(peaks)
        assert times == sorted(times, reverse=True)
        assert points[-1]["overhead"] == 0
        assert all(p["bound_overhead"] <= p["overhead"] for p in points)

    def test_it_is_a_table_whose_peaks_are_budgets_that_can_be_met(self, models, capsys):
        assert main(["curve", f"{models}:with_inputs", "--points", "2", "--time-limit", "2"]) == 0
        output = capsys.readouterr().out
        assert "peak memory" in output
        assert "+0.0%" in output
        assert output.isascii()
        peaks = re.findall(r"^ *([\d.]+ [KM]iB) ", output, flags=re.MULTILINE)
        assert len(peaks) >= 2
        for peak in peaks:
            assert plan(models, "--json", "-", budget=peak, name="with_inputs") == 0
            numbers = json.loads(capsys.readouterr().out)
        assert format_bytes(numbers["unplanned_peak_bytes"], up=True) == peaks[-1]


class TestCompare:
    def compare(self, models, *more, budget="80%,60%", methods="segments,portfolio"):
        arguments = ["compare", f"{models}:with_inputs", "--budget", budget, "--methods", methods]
        return main([*arguments, "--time-limit", "2", *more])

    def test_each_method_has_a_row_under_each_budget(self, models, capsys):
        assert self.compare(models) == 0
        output = capsys.readouterr().out
        assert re.findall(r"^(?:segments|portfolio|budget \S+)", output, flags=re.MULTILINE).count("budget 60%") == 1
        assert len(re.findall(r"^(?:segments|portfolio) .*\+\d+\.\d%", output, flags=re.MULTILINE)) == 4
        assert "Net: plain training takes " in output
        assert max(map(len, output.splitlines())) <= 80

    def test_peaks_are_within_budgets_and_times_above_bounds(self, models, capsys):
        assert self.compare(models, "--json", "-") == 0
        numbers = json.loads(capsys.readouterr().out)
        budgets = [budget["budget_bytes"] for budget in numbers["budgets"]]
        assert [budget["budget"] for budget in numbers["budgets"]] == ["80%", "60%"]
        assert budgets == sorted(budgets, reverse=True)
        for budget in numbers["budgets"]:
            assert {found["method"] for found in budget["methods"]} == {"segments", "portfolio"}
            for found in budget["methods"]:
                assert numbers["resident_bytes"] < found["peak_bytes"] <= budget["budget_bytes"]
                assert found["overhead"] == pytest.approx(found["distance"] + budget["bound_overhead"])

    def test_a_plan_by_the_same_method_is_the_same(self, models, capsys):
        assert self.compare(models, "--json", "-", budget="60%", methods="segments") == 0
        (found,) = json.loads(capsys.readouterr().out)["budgets"][0]["methods"]
        assert plan(models, "--solver", "segments", "--json", "-", name="with_inputs", budget="60%") == 0
        numbers = json.loads(capsys.readouterr().out)
        assert numbers["planned_peak_bytes"] == found["peak_bytes"]
        assert numbers["predicted_overhead"] == pytest.approx(found["overhead"])

    def test_a_picture_has_more_budgets_than_the_one_asked_for(self, models, capsys, tmp_path):
        picture = tmp_path / "methods.svg"
        assert self.compare(models, "--svg", str(picture), "--json", "-", budget="60%", methods="segments") == 0
        budgets = json.loads(capsys.readouterr().out)["budgets"]
        assert len(budgets) == 5
        assert budgets[-1]["budget"] == "60%"
        assert picture.read_text().count("<title>segments: +") == 5

    @pytest.fixture
    def solves(self, monkeypatch):
        """Interrupt all solves but so many."""
        solve, left = commands.outcome_of, []

        def interrupted(problem, method):
            if not left:
                raise KeyboardInterrupt
            left.pop()
            return solve(problem, method)

        monkeypatch.setattr(commands, "outcome_of", interrupted)
        return left

    def test_an_interrupted_run_keeps_its_finished_rows(self, models, capsys, solves, tmp_path):
        solves.append("the first one")
        target = tmp_path / "methods.json"
        assert self.compare(models, "--json", str(target)) == 0
        assert "Interrupted: 1 of 4 solves are done. The rest is left out." in capsys.readouterr().out
        (budget,) = json.loads(target.read_text())["budgets"]
        assert [found["method"] for found in budget["methods"]] == ["segments"]

    @pytest.mark.usefixtures("solves")
    def test_nothing_is_kept_where_nothing_was_done(self, models, capsys):
        assert self.compare(models) == 130
        assert capsys.readouterr().err == STOPPED

    def test_a_budget_that_no_method_meets_is_a_problem(self, models, capsys):
        assert self.compare(models, "--optimizer", "none", budget="1%", methods="segments") == 1
        output = capsys.readouterr().out
        assert re.search(r"budget 1% \(.*\), proven: nothing fits", output)
        assert re.search(r"^segments +\| +no plan ", output, flags=re.MULTILINE)
        assert self.compare(models, methods="segmants") == 2
        assert "Unknown solver 'segmants'. Did you mean 'segments'?" in capsys.readouterr().err


class TestFit:
    def fit(self, models, *more, budget="2MiB"):
        return main(["fit", f"{models}:with_inputs", "--budget", budget, "--time-limit", "5", *more])

    def test_the_size_that_is_found_is_planned_within_the_budget(self, models, capsys):
        assert self.fit(models, "--json", "-") == 0
        found = json.loads(capsys.readouterr().out)
        size = found["size"]
        assert 0 < found["unplanned_size"] < size

        for rows, code in ((size, 0), (2 * size, 1)):
            arguments = ["--input", f"{rows}x32", "--budget", "2MiB", "--time-limit", "2", "--json", "-"]
            assert main(["plan", f"{models}:Net", *arguments]) == code
        trial = next(t for t in found["trials"] if t["size"] == size)
        numbers = json.loads(capsys.readouterr().out)
        assert trial["predicted_peak_bytes"] <= found["budget_bytes"]
        assert trial["unplanned_peak_bytes"] == numbers["unplanned_peak_bytes"]

    def test_it_is_a_table(self, models, capsys):
        assert self.fit(models, "--max-batch", "64") == 0
        output = capsys.readouterr().out
        assert "HiRemate: largest size within 2.00 MiB is 64" in output
        assert "Predicted from the step at batch sizes 4 and 8; nothing ran." in output

    def test_a_budget_or_overhead_that_makes_no_sense_is_refused(self, models, capsys):
        assert self.fit(models, budget="50%") == 2
        assert "A share is of what grows with the batch" in capsys.readouterr().err
        assert self.fit(models, "--max-overhead", "8GiB") == 2
        assert "--max-overhead must be a percentage" in capsys.readouterr().err

    def test_where_nothing_fits_is_a_problem(self, tmp_path, capsys):
        path = tmp_path / "wide_model.py"
        path.write_text("import torch\ndef wide():\n    return torch.nn.Linear(1000, 1000), torch.zeros(4, 1000)\n")
        assert main(["fit", f"{path}:wide", "--budget", "2MiB"]) == 1
        error = capsys.readouterr().err
        text = re.search(r"fits 2.00 MiB with at most 30% more time: that needs (.* MiB) \((.*) bytes", error)
        for named in (text[1], f"{text[2]}B"):
            assert main(["fit", f"{path}:wide", "--budget", named]) == 0, named


class TestShow:
    def test_what_plan_wrote_is_shown(self, models, tmp_path, capsys):
        path = tmp_path / "plan.json"
        assert plan(models, "--json", str(path)) == 0
        assert "HiRemate plan of Net" in capsys.readouterr().out
        assert main(["show", str(path)]) == 0
        output = capsys.readouterr().out
        assert output.startswith("model       Net\npeak ")
        assert " planned\n" in output
        assert "note        Times are estimates" in output
        assert re.search(r"^at {10}\S", output, flags=re.MULTILINE)
        assert re.search(r"^module +kept +not kept +recomputed +extra", output, flags=re.MULTILINE)
        assert re.search(r"^all +\d", output, flags=re.MULTILINE)

    def test_advice_that_plan_gave_is_shown_again(self, tmp_path, capsys):
        plan = blocks_plan(2)
        heavy = replace(plan, resident_bytes=plan.resident_bytes + 2**30, budget_bytes=plan.budget_bytes + 2**30)
        assert main(["show", str(write_html(heavy, tmp_path / "plan.html", curve_limit_s=0))]) == 0
        assert "\nadvice      1.00 GiB of the budget exist before the step" in capsys.readouterr().out

    def test_a_report_is_shown(self, models, tmp_path, capsys):
        page, picture = tmp_path / "plan.html", tmp_path / "plan.svg"
        assert plan(models, "--html", str(page), "--svg", str(picture)) == 0
        assert picture.read_text(encoding="utf-8").startswith("<svg ")
        capsys.readouterr()
        assert main(["show", str(page)]) == 0
        assert capsys.readouterr().out.startswith("model       Net\n")

    @pytest.mark.parametrize("text", ["", "3", "{}", "\0", None])
    def test_another_file_is_refused(self, tmp_path, capsys, text):
        path = tmp_path / "other.json"
        if text is not None:
            path.write_text(text)
        assert main(["show", str(path)]) == 2
        words = "No such file or directory. Expected what" if text is None else "is no plan"
        assert words in capsys.readouterr().err


class TestDoctor:
    def test_this_installation_works(self, models, capsys):
        assert main(["doctor", f"{models}:Net", "--json", "-"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["ok"]
        names = {finding["name"]: finding for finding in found["findings"]}
        assert {"python", "torch", "lightning", "accelerate", "mip", "solver CBC", "cpu"} <= names.keys()
        assert "gradients equal bit for bit" in names["small plan on cpu"]["words"]
        assert names[f"{models}:Net"]["words"] == "Net, 3,168 parameters to train: not refused"

    def test_what_does_not_work_is_a_problem(self):
        found = doctor.small_plan_finding("abacus")
        assert found.verdict is Grade.BAD
        assert found.words.startswith("RuntimeError: Expected one of cpu, cuda")

    def test_a_plan_that_was_not_solved_or_never_comes_is_a_problem(self, monkeypatch):
        """Without a solution all that is left is the least memory, which costs ten times the extra time."""
        given_up = Solution("portfolio", Status.NOT_FOUND, stopped_by="a failure of the solver")
        monkeypatch.setattr(worker, "_solve_apart", lambda problem, name, in_place: given_up)
        with pytest.raises(RuntimeError, match=r"no plan was solved \(a failure of the solver\), only the least"):
            doctor.small_plan("cpu")
        monkeypatch.setattr(doctor, "get_plan", lambda model: None)
        with pytest.raises(RuntimeError, match="no plan was made in"):
            doctor.small_plan("cpu")

    def test_packages_that_lack_or_are_too_old_are_named(self, monkeypatch):
        versions = {"accelerate": None, "timm": None, "lightning": "2.4.1"}
        monkeypatch.setattr(doctor, "installed_version", lambda name: versions.get(name, "99.0"))
        monkeypatch.setattr(doctor, "import_failures", lambda names: {})
        found = {f.name: f for f in doctor.packages()}
        assert found["accelerate"].verdict is Grade.BAD
        assert found["lightning"].verdict is Grade.BAD
        assert "2.4.1, but " in found["lightning"].words
        assert found["timm"].verdict is Grade.KNOW
        assert [f.name for f in doctor.known_bad_pairs()] == ["lightning 2.4.1 and torch 99.0"]

    def test_a_failed_import_is_a_problem_with_advice(self, monkeypatch):
        reason = "RuntimeError: operator torchvision::nms does not exist"
        failures = dict.fromkeys(("torchvision", "accelerate", "hiremate_lightning.callbacks"), reason)
        failures["timm"] = "ModuleNotFoundError: No module named 'other'"
        monkeypatch.setattr(doctor, "installed_version", lambda name: "99.0")
        monkeypatch.setattr(doctor, "import_failures", lambda names: failures)
        found = {f.name: f for f in doctor.packages()}
        fitting = f"0.{int(torch.__version__.split('.')[1]) + 15}.*"
        mending = f'mend it with: pip install --force-reinstall --no-deps "torchvision=={fitting}" from where'
        assert found["torchvision"].words.startswith(f"99.0, but can't be imported: {reason}; {mending}")
        assert found["accelerate"].words.endswith("; mend it with: pip install --force-reinstall --no-deps accelerate")
        assert found[doctor.CALLBACKS].words == f"can't be imported: {reason}; mend what is BAD above"
        assert {found[name].verdict for name in ("torchvision", "accelerate", doctor.CALLBACKS)} == {Grade.BAD}
        other = "99.0, but can't be imported: ModuleNotFoundError: No module named 'other'"
        assert found["timm"] == doctor.Finding("timm", Grade.KNOW, other)
        assert found["rich"] == doctor.Finding("rich", Grade.GOOD, "99.0")

    def test_all_that_is_called_ok_has_been_imported(self, monkeypatch):
        asked = []
        monkeypatch.setattr(doctor, "import_failures", lambda names: asked.extend(names) or {})
        findings = doctor.packages()
        names = [finding.name for finding in findings if finding.verdict is Grade.GOOD]
        assert {doctor.MODULES.get(name, name) for name in names} <= {*asked}
        assert {"lightning", "accelerate", "mip", "rich", "hiremate_lightning.callbacks"} <= {*asked}

    def test_a_package_is_found_broken_where_it_ends_the_process(self, tmp_path, monkeypatch):
        (tmp_path / "raising.py").write_text("print('hello')\nraise RuntimeError('operator nms\\ndoes not exist')")
        (tmp_path / "crashing.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
        (tmp_path / "leaving.py").write_text("import os\nos._exit(3)")
        monkeypatch.syspath_prepend(tmp_path)
        assert import_failures(["json", "raising", "crashing", "leaving", "nowhere", "csv"]) == {
            "raising": "RuntimeError: operator nms",
            "crashing": "importing it ends the process (SIGSEGV)",
            "leaving": "importing it ends the process (exit code 3)",
            "nowhere": "ModuleNotFoundError: No module named 'nowhere'",
        }

    def test_a_torch_that_can_not_be_imported_is_reported(self, tmp_path):
        (tmp_path / "torch.py").write_text("raise OSError('libcudart.so: cannot open shared object file')")
        path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        result = run_python("-m", "hiremate_lightning", "doctor", PYTHONPATH=path)
        assert result.returncode == 1
        expected = "hiremate: torch can't be imported (OSError: libcudart.so: cannot open shared object file). Mend it"
        assert result.stderr.startswith(expected)
        assert result.stderr.count("\n") == 1

    def test_a_torch_that_was_not_tried_is_reported(self):
        with as_on("9.9"):
            found = doctor.torch_finding()
        assert found.verdict is Grade.KNOW
        assert "was not tried (only 2.11, " in found.words
        assert "code is captured plainly, without: small buckets, checkpoint in segments, backwards" in found.words

    @pytest.mark.parametrize(
        ("lost", "verdict"), [(("HIGHS",), Grade.KNOW), (("HIGHS", "CBC"), Grade.BAD)], ids=["one", "both"]
    )
    def test_the_doctor_needs_one_of_the_two_solvers(self, lost, verdict, monkeypatch):
        monkeypatch.setattr(doctor, "backend_failure", lambda name: "no library" if name in lost else "")
        highs, _ = doctor.solvers()
        words = "no library; mend it with: pip install --force-reinstall highsbox"
        assert highs == doctor.Finding("solver HIGHS", verdict, words)

    def test_a_problem_is_the_exit_code(self, models, capsys):
        assert main(["doctor", f"{models}:compiled"]) == 1
        words = r"^BAD  \S+:compiled: Can't plan OptimizedModule: it is compiled already"
        assert re.search(words, capsys.readouterr().out, re.MULTILINE)
        found = doctor.model_finding(f"{models}:frozen")
        assert (found.verdict, found.words) == (Grade.BAD, "Net has no parameter to train")


class TestFactory:
    def test_inputs_have_names_shapes_and_types(self):
        first, second = read_inputs("64x3x8:bfloat16, ids=8:int64")
        assert first == ("", (64, 3, 8), "bfloat16")
        assert second == ("ids", (8,), "int64")
        made = make_input(second, 5)
        assert (made.shape, made.dtype) == ((5,), torch.int64)

    def test_the_batch_of_a_factory_is_resized(self, models):
        """A tensor that is two inputs stays one, and one whose gradient is taken keeps that."""
        named, shared, trained = (
            Workload(find_factory(f"{models}:{name}"), name).build(3)
            for name in ("by_name", "by_one_tensor", "of_trained_inputs")
        )
        assert {name: tuple(t.shape) for name, t in named.kwargs.items()} == {"ids": (3, 32), "labels": (3, 32)}
        assert named.size == 3
        assert shared.kwargs["ids"] is shared.kwargs["labels"]
        assert trained.args[0].requires_grad

    def test_a_package_is_imported_from_the_working_folder(self, models, monkeypatch):
        """An import that fails inside of it is not hidden."""
        folder = Path(models).parent
        (folder / "needs_other.py").write_text("import some_other_package_that_is_not_there\n")
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(folder)
        assert find_factory("zoo_of_models:Net").__name__ == "Net"
        with pytest.raises(ModuleNotFoundError, match="some_other_package"):
            find_factory("needs_other:Net")
        (folder / "broken.py").write_text("def Net(:\n")
        for name in ("broken", "broken.py"):
            with pytest.raises(ConfigurationError, match=r"Can't read \S*broken.py, line 1: invalid syntax\."):
                find_factory(f"{name}:Net")
        with pytest.raises(ConfigurationError, match="Can't read 'Net'"):
            find_factory("Net")


def test_an_output_that_is_not_read_to_its_end_is_no_error(tmp_path):
    """As by `hiremate show plan.json | head -1`, of more than a pipe holds."""
    path = tmp_path / "plan.json"
    numbers = {**blocks_plan(2).to_dict(), "notes": ["word " * 20000] * 10}
    path.write_text(json.dumps(numbers))
    command = [sys.executable, "-m", "hiremate_lightning", "show", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_the_package_is_a_command(tmp_path):
    """It shows the numbers of a plan alone: Plan.to_json() has no table of modules, as files of earlier versions."""
    path = tmp_path / "plan.json"
    path.write_text(blocks_plan().to_json())
    result = run_python("-m", "hiremate_lightning", "show", path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("model       GPT\npeak ")
    assert "+16.8% planned" in result.stdout
    assert not result.stderr


def test_a_step_of_more_memory_than_there_is(models, capsys):
    """One of its values would take 128 GiB."""
    assert plan(models, "--input", f"{2**30}x32", "--device", "cuda", "--json", "-") == 0
    numbers = json.loads(capsys.readouterr().out)
    assert 2**37 < numbers["planned_peak_bytes"] <= numbers["budget_bytes"] < numbers["unplanned_peak_bytes"]
