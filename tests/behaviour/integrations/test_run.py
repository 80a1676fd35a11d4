"""`hiremate run` on scripts that know nothing of us, each in its project's style: the same bits, inside the budget.

They run in this process, plainly and then planned, as the commands `python` and `hiremate run` would run them.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.zoo.stand_in import torchvision_or_stand_in
from hiremate_lightning.command_line import cli, doctor
from hiremate_lightning.command_line.run import main
from hiremate_lightning.integrations import alive
from tests.processes import TORCHRUN, run_python

SCRIPTS = Path(__file__).parents[2] / "scripts"
QUICK = ("--time-limit", "2")

pytestmark = pytest.mark.filterwarnings("ignore")  # the scripts' packages warn of what is theirs


@pytest.fixture(autouse=True)
def _in_folder(tmp_path, monkeypatch) -> Iterator[None]:
    """Run in a folder of the test's own; afterwards nothing stands in for calls of modules any more."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HIREMATE_BUDGET", raising=False)
    found = dict(os.environ)
    yield
    assert "_compiled_call_impl" in vars(nn.Module)
    assert nn.Module._compiled_call_impl is None
    os.environ.clear()  # transformers' and Lightning's choices, for example
    os.environ.update(found)


def python(script: Path, *arguments: str) -> None:
    """Run a script plainly."""
    before = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [str(script), *arguments], str(script.parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[0] = before


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors_in(inner)


def assert_same(found: Path, expected: Path) -> None:
    """Compare what two runs have saved, bit for bit."""
    one, other = (list(tensors_in(torch.load(path, weights_only=False))) for path in (found, expected))
    assert len(one) == len(other) > 0
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def run_both(capsys, budget: str, script: str, *arguments: str, out: str = "out.pt") -> dict[str, Any]:
    """Run a script plainly and within a budget; compare what it prints and saves.

    Returns:
        The plan of its one model, as JSON has it.
    """
    python(SCRIPTS / script, *arguments)
    printed = capsys.readouterr().out
    Path(out).rename("plain.pt")
    assert main(["--budget", budget, *QUICK, "--json", "plan.json", str(SCRIPTS / script), *arguments]) == 0
    output = capsys.readouterr()
    assert [line for line in output.out.splitlines() if "HiRemate plan" not in line] == printed.splitlines()
    assert_same(Path(out), Path("plain.pt"))
    [model] = json.loads(Path("plan.json").read_text())["models"]
    plan = model["plan"]
    assert f"{model['model']}: peak" in output.err
    assert (plan["measured_peak_bytes"] or plan["planned_peak_bytes"]) <= plan["budget_bytes"]
    return plan


def plan_written() -> dict[str, Any]:
    """Return the plan of the one model of a run, as JSON has it."""
    [model] = json.loads(Path("plan.json").read_text())["models"]
    return model["plan"]


# ---------------------------------------------------------------- scripts of each kind


def test_a_script_in_the_style_of_nanogpt_trains_the_same(capsys):
    """Evaluation first, gradient accumulation, clipping, tied weights, all at the top level of the module."""
    plan = run_both(capsys, "70%", "train_gpt.py", "--out=out.pt", "--max_iters=3", "--n_layer=2")
    assert plan["planned_peak_bytes"] < plan["unplanned_peak_bytes"]


@pytest.mark.models
@pytest.mark.parametrize("checkpointing", [(), ("--gradient_checkpointing", "true")], ids=["plain", "checkpointed"])
def test_a_script_with_transformers_trainer_trains_the_same(capsys, checkpointing):
    """With activation checkpointing too, which the Trainers of trl switch on by default."""
    arguments = ("--output_dir", ".", "--max_steps", "4", "--use_cpu", "--report_to", "none", "--disable_tqdm", "true")
    evaluation = ("--save_strategy", "no", "--eval_strategy", "steps", "--eval_steps", "2")
    python(SCRIPTS / "run_clm.py", *arguments, *evaluation, *checkpointing)
    Path("out.pt").rename("plain.pt")
    capsys.readouterr()
    options = ("--budget", "70%", *QUICK, "--json", "plan.json")
    assert main([*options, str(SCRIPTS / "run_clm.py"), *arguments, *evaluation, *checkpointing]) == 0
    assert_same(Path("out.pt"), Path("plain.pt"))
    assert plan_written()["measured_peak_bytes"] <= plan_written()["budget_bytes"]
    assert ("in place of activation checkpointing (2 modules)" in capsys.readouterr().err) == bool(checkpointing)


@pytest.mark.models
def test_a_loop_of_accelerate_on_padded_batches_trains_the_same(capsys):
    run_both(capsys, "90%", "run_glue_no_trainer.py")


def test_a_diffusion_loop_with_accelerate_trains_the_same(capsys):
    """With a frozen encoder, and an average of the weights that is kept beside."""
    run_both(capsys, "70%", "train_text_to_image.py", "--use_ema", "--max_train_steps", "4")


@pytest.mark.models
def test_a_script_in_the_style_of_timm_trains_the_same(capsys):
    with torchvision_or_stand_in():
        run_both(capsys, "85%", "train_timm.py", "--amp", "--updates", "4")


def test_a_gan_has_one_plan_for_both_networks(capsys):
    plan = run_both(capsys, "100%", "gan.py", "--niter", "4", "--out", "out.pt")
    assert plan["target"] == "DiscriminatorAndGenerator"


def test_lightnings_command_line_trains_the_same(capsys):
    settings = {"max_epochs": 2, "accelerator": "cpu", "logger": "false", "enable_checkpointing": "false"}
    quiet = {"enable_progress_bar": "false", "enable_model_summary": "false"}
    arguments = [f"--trainer.{name}={value}" for name, value in {**settings, **quiet}.items()]
    plan = run_both(capsys, "70%", "lightning_main.py", "fit", *arguments)
    assert plan["target"] == "AutoEncoder"


def test_two_processes_of_torchrun_train_the_same(tmp_path):
    """Only the first of them speaks."""
    path = os.pathsep.join(filter(None, sys.path))
    script = str(SCRIPTS / "train_ddp.py")
    for command, out in (
        ([script], "plain.pt"),
        (["-m", "hiremate_lightning.run", "--budget", "70%", *QUICK, "--json", "plan.json", script], "out.pt"),
    ):
        done = run_python(*TORCHRUN, *command, out, timeout=300, PYTHONPATH=path)
        assert done.returncode == 0, done.stderr
    assert_same(Path("out.pt"), Path("plain.pt"))
    assert done.stderr.count("hiremate run: Sequential: peak") == 1
    assert plan_written()["measured_peak_bytes"] <= plan_written()["budget_bytes"]


def test_a_notebook_runs_it_by_its_magic(capsys):
    interactive = pytest.importorskip("IPython.core.interactiveshell", reason="IPython is not installed")
    shell = interactive.InteractiveShell.instance()
    main_module = sys.modules["__main__"]
    write("net.py", LOOP)
    shell.run_line_magic("run", "-m hiremate_lightning.run -- --budget 70% --time-limit 2 net.py")
    assert "Net: peak" in capsys.readouterr().err
    assert sys.modules["__main__"] is main_module


# ---------------------------------------------------------------- as python runs a script

NET = """
    import sys
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))

        def forward(self, x):
            return self.layers(x)

    torch.manual_seed(0)
"""
HEAD = NET + "    model = Net()\n    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
LOOP = (
    HEAD
    + """
    for _ in range(4):
        model(torch.randn(128, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
)


def write(name: str, text: str) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(textwrap.dedent(text))
    return name


def run(*given: str, budget: str = "80%") -> int:
    return main(["--budget", budget, *QUICK, *given])


def test_arguments_names_and_folders_are_those_of_python(capsys):
    """Where a script is given by a path, and as a module of a package with relative imports."""
    text = "import sys; from pathlib import Path; print(__name__, sys.argv, Path(sys.path[0]).name)"
    write("folder/train.py", f"import beside; {text}")
    write("folder/beside.py", "")
    write("package/__init__.py", "")
    write("package/train.py", f"from . import other; {text}; print(__package__, __spec__.name)")
    write("package/other.py", "")
    before = sys.argv, [*sys.path], sys.modules["__main__"]
    assert run("folder/train.py", "--budget", "3", "-m") == 0
    assert run("-m", "package.train", "--epochs") == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == "__main__ ['folder/train.py', '--budget', '3', '-m'] folder"
    assert second.startswith("__main__ ['")
    assert second.endswith(f"--epochs'] {Path.cwd().name}")
    assert third == "package package.train"
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before


@pytest.mark.parametrize(
    ("text", "kind", "code"),
    [
        ("import sys\nsys.exit(3)", SystemExit, 3),
        ("import sys\nsys.exit('words')", SystemExit, "words"),
        ("exit()", SystemExit, None),
        ("raise KeyboardInterrupt", KeyboardInterrupt, None),
        (
            "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: exit(5))\nos.kill(os.getpid(), 15)",
            *(SystemExit, 5),
        ),
    ],
    ids=["number", "words", "none", "Ctrl-C", "signal"],
)
def test_exit_codes_are_those_of_the_script(text, kind, code):
    write("train.py", text)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(kind) as stop:
            run("train.py")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert getattr(stop.value, "code", None) == code


def test_an_error_of_the_script_shows_its_own_traceback(capsys):
    write("train.py", "def f():\n    raise ValueError('wrong')\n\nf()")
    assert run("train.py") == 1
    printed = capsys.readouterr().err
    assert "ValueError: wrong" in printed
    assert "runpy" not in printed
    assert "command_line" not in printed
    assert "no training step was seen: the script ended before one, by ValueError: wrong" in printed


def test_a_file_that_cant_be_written_leaves_the_exit_code(capsys):
    """The script may have trained for days by then."""
    write("train.py", LOOP + "    import os\n    os.mkdir('folder')\n    sys.exit(3)\n")
    with pytest.raises(SystemExit) as stop:
        run("--html", "folder", "--json", "new/plan.json", "train.py")
    assert stop.value.code == 3
    assert "can't write what was asked for: " in capsys.readouterr().err
    assert Path("new/plan.json").is_file()


@pytest.mark.parametrize("path", ["folder", "/proc/page.html", "folder/file/page.html"])
@pytest.mark.parametrize("option", ["--html", "--json"])
def test_a_file_that_cant_be_written_is_refused_at_once(path, option, capsys):
    write("train.py", "raise AssertionError('the script is not to run')")
    Path("folder").mkdir()
    Path("folder/file").touch()
    assert run(option, path, "train.py") == 2
    assert path.split("/")[-1] in capsys.readouterr().err


def test_threads_that_a_script_leaves_end_before_its_plans(capsys):
    """One that saves the model, whose class is in the script, and one that trains; a pool waits for the exit."""
    text = """
    import concurrent.futures, threading

    pool = concurrent.futures.ThreadPoolExecutor(1)
    pool.submit(print, "pooled").result()

    def train():
        for _ in range(3):
            model(torch.randn(128, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.save(model, "net.pt")

    threading.Thread(target=train).start()
    """
    write("train.py", HEAD + text)
    before = sys.modules["__main__"]
    assert run("train.py") == 0
    assert "Net: peak" in capsys.readouterr().err
    assert Path("net.pt").is_file()
    assert sys.modules["__main__"] is before


def test_the_script_is_main_to_what_runs_at_exit(monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    write("train.py", "class Net: ...")
    assert main(["train.py"], ends_process=True) == 0
    assert "Net" in vars(sys.modules["__main__"])


def test_commands_that_are_scripts_of_python_are_found(capsys, monkeypatch, tmp_path):
    """Also where there is a folder of their name, as in a clone of their source."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name, first in (("trainer", f"#!{sys.executable}"), ("shell", "#!/bin/sh")):
        Path(write(f"bin/{name}", f"{first}\nimport sys; print(sys.argv)")).chmod(0o755)
    Path("trainer").mkdir()
    assert run("trainer", "sft", "-x") == 0
    assert capsys.readouterr().out == f"{[str(tmp_path / 'bin' / 'trainer'), 'sft', '-x']}\n"
    for given, words in (
        (["shell"], "is no script of Python"),
        (["python3", "train.py"], "'python3' is the interpreter: leave it out, as in hiremate run [options] train.py"),
        (["bin"], "'bin' is a folder without __main__.py"),
        (["-m", "nowhere"], "Can't run -m nowhere: No module named nowhere"),
        (["torchrun", "train.py"], "torchrun [its options] -m hiremate_lightning.run [options] train.py"),
        (["-m", "torch.distributed.run"], "torchrun [its options] -m hiremate_lightning.run [options] train.py"),
        (["accelerate", "launch", "a.py"], "accelerate launch [its options] -m hiremate_lightning.run [options]"),
    ):
        assert run(*given) == 2
        assert words in capsys.readouterr().err


def test_classes_of_the_script_are_saved_and_loaded_whole():
    text = "torch.save(Net(), 'net.pt'); torch.load('net.pt', weights_only=False)(torch.ones(2, 32)).sum().backward()"
    write("train.py", NET + f"    {text}\n")
    assert run("train.py") == 0


def test_workers_of_data_loaders_plan_nothing(capfd):
    """Whether they are forked or spawned; these import the script again."""
    write(
        "train.py",
        LOOP.replace("for _ in range(4):", "for _ in ():")
        + """
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            layer = nn.Linear(2, 2)
            layer(torch.ones(2)).sum().backward()
            return layer.weight.grad + (nn.Module._compiled_call_impl is not None)

    if __name__ == "__main__":
        for context in ("fork", "spawn"):
            loader = torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context=context)
            print([batch.sum().item() for batch in loader])
""",
    )
    done = run_python("-m", "hiremate_lightning.run", "train.py", PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    assert done.stdout.splitlines() == ["[4.0, 4.0, 4.0, 4.0]"] * 2, done.stderr
    assert done.stderr.count("no training step was seen") == 1


# ---------------------------------------------------------------- what is planned


def test_a_dry_run_stops_after_the_plan_was_measured(capsys):
    write("train.py", LOOP.replace("range(4):", "range(10**9):"))
    with pytest.raises(SystemExit) as stop:
        run("--dry-run", "--html", "plan.html", "train.py")
    assert stop.value.code == 0
    printed = capsys.readouterr().err
    assert "Net: peak" in printed
    assert "stopped by --dry-run after 2 updates of the weights" in printed
    assert "run --html" not in printed, "it was asked for"
    assert Path("plan.html").is_file()


def test_a_dry_run_of_one_step_says_what_it_lacks(capsys):
    write("train.py", LOOP.replace("range(4):", "range(1):"))
    assert run("--dry-run", "train.py") == 0
    printed = capsys.readouterr().err
    assert "Net: no plan was made. One is made in the second step; 2 are needed at least" in printed
    assert "stopped by --dry-run" not in printed


def test_targets_are_chosen_by_path(capsys):
    write("train.py", LOOP)
    assert run("--target", "layers.0,layers.1", "--json", "plan.json", "train.py", budget="100%") == 0
    assert plan_written() is not None
    capsys.readouterr()
    assert run("--target", "encoder", "train.py") == 0
    assert "Net has no submodule 'encoder' (--target): it is not planned" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("pass", "no module with trainable parameters was called with gradients on"),
        ("model.eval()(x).sum().backward()", "Net was called with gradients on, but in eval mode"),
        (
            "w = nn.Parameter(x); sgd = torch.optim.SGD([w]); w.sum().backward(); sgd.step()",
            "an optimizer stepped, but no call of a module with its parameters was seen",
        ),
        ("torch.func.grad(lambda y: model(y).sum())(x)", "Net was called inside of transforms of torch.func"),
        ("nn.Linear(32, 32)(x).sum().backward()", "no optimizer of torch.optim has the parameters of Linear"),
    ],
)
def test_it_says_why_no_training_step_was_seen(capsys, call, reason):
    write("train.py", f"{LOOP.replace('range(4):', '():')}\n    x = torch.ones(2, 32)\n    {call}")
    assert run("train.py") == 0
    assert f"no training step was seen: {reason}" in capsys.readouterr().err


ITSELF = (
    HEAD
    + """
    from hiremate_lightning import get_plan, hiremate

    def train():
        for _ in range(3):
            model(torch.randn(128, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(int(sys.argv[1])):
        train()
    hiremate(model, "95%", verbose=False)
    train()
    print(get_plan(model).budget)
"""
)


@pytest.mark.parametrize("trainings", [0, 1])
def test_a_script_that_plans_by_itself_wins(capsys, trainings):
    """Whether its model was found before that, or not."""
    write("train.py", ITSELF)
    assert run("train.py", str(trainings)) == 0
    printed = capsys.readouterr()
    assert printed.out == "95%\n"
    assert "the script plans Net by itself: that holds" in printed.err


TRAIN = """
    def train(call, before=lambda: None):
        for _ in range(4):
            with torch.no_grad():
                before()
            loss = call(torch.randn(128, 32)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(loss.item())
"""
STYLES = {
    "autograd.grad": """
    for _ in range(4):
        loss = model(torch.randn(128, 32)).square().mean()
        for p, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):
            p.grad = gradient
        optimizer.step()
        print(loss.item())
    """,
    "closures": """
    def train_by_closures(forward, steps=3):
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
        for _ in range(steps):
            x = torch.randn(128, 32)
            def closure():
                optimizer.zero_grad()
                loss = forward(x).square().mean()
                loss.backward()
                return loss
            print(optimizer.step(closure).item())
    train_by_closures(lambda x: model(x))
    """,
    "a compiled model, and an export that is tried out": """
    torch.jit.script(Net())(torch.ones(2, 32))
    compiled = torch.compile(model, backend="eager")
    train(compiled)
    """,
    "a model compiled in place": """
    model.compile(backend="eager")
    train(model, lambda: print(model(torch.ones(2, 32)).sum().item()))
    """,
    "layers compiled in both ways": """
    model.layers[0].compile(backend="eager")
    model.layers[1] = torch.compile(model.layers[1], backend="eager")
    train(model, lambda: model.layers[2].compile(backend="eager"))
    """,
    "DataParallel of one device": """
    parallel = nn.DataParallel(model)
    train(parallel)
    """,
}


@pytest.mark.parametrize("style", STYLES)
def test_other_styles_train_the_same(capsys, monkeypatch, style):
    """What exists is looked at for what is new, not at each step: that takes tenths of a second."""
    looks, look = [], alive.Alive.__init__
    monkeypatch.setattr(alive.Alive, "__init__", lambda found: looks.append(found) or look(found))
    write("train.py", HEAD + TRAIN + STYLES[style])
    python(Path("train.py").absolute())
    printed = capsys.readouterr().out
    assert run("--on-infeasible", "warn", "--json", "plan.json", "train.py") == 0
    output = capsys.readouterr()
    assert output.out == printed
    assert len(looks) <= 3
    assert output.err.count("in place of torch.compile") >= ("compiled" in style)
    assert plan_written()["planned_peak_bytes"] < plan_written()["unplanned_peak_bytes"]


def test_processes_that_a_script_started_itself_are_refused(capsys):
    """They have no plan, and would not keep to the budget. The other one is PyTorch's fake process."""
    write("train.py", LOOP)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        assert run("train.py") == 2
    finally:
        torch.distributed.destroy_process_group()
    printed = capsys.readouterr().err
    assert "The script trains in 2 processes and has started the others itself" in printed
    assert "Start all of them: torchrun --nproc-per-node 2 -m hiremate_lightning.run" in printed


def test_options_that_are_not_there_are_named(capsys):
    for given, words in (
        (["--bugdet", "3", "train.py"], "there is no option '--bugdet'. Did you mean '--budget'"),
        (["--largest-batch", "train.py"], "find_max_batch_size"),
        ([], "no script to run"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(given)
        assert stop.value.code == 2
        assert words in capsys.readouterr().err
    assert main(["nowhere.py"]) == 2
    assert "There is no file 'nowhere.py' to run" in capsys.readouterr().err


def test_it_is_a_command_of_hiremate(capsys, monkeypatch):
    """Its budget may come from the environment."""
    write("train.py", "print('ran')")
    assert cli.main(["run", "train.py"]) == 0
    assert capsys.readouterr().out == "ran\n"
    monkeypatch.setenv("HIREMATE_BUDGET", "10")
    assert main(["train.py"]) == 2
    assert "Cannot read the budget '10'" in capsys.readouterr().err


def test_doctor_stops_before_the_first_step(capsys):
    write("train.py", LOOP + "    print('trained')\n")
    found = doctor.script_finding(["train.py", "--epochs", "3"])
    assert (found.name, found.verdict) == ("train.py", doctor.Grade.GOOD)
    assert found.words.startswith("Net, 4,224 parameters to train (SGD): not refused")
    assert "trained\n" not in capsys.readouterr().out
