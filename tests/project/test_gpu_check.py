"""The check of a GPU: it rehearses whole on the simulated one, and nothing that ends it loses what was measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # where scripts find their neighbours

import gpu_check
import rival_worker
from gpu_parts import PARTS, headline, processes, raw, records, trials, truth
from zoo import large

from hiremate_lightning.measuring import profiling
from hiremate_lightning.planning import solutions

COMMAND = [sys.executable, str(Path(gpu_check.__file__))]
WAIT_S = 120


def by_part(folder: Path) -> dict[str, list[records.Record]]:
    found = records.load(folder)
    return {part.name: [r for r in found if r["part"] == part.name] for part in PARTS}


def alive(pid: int) -> bool:
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"


def end_soon(pids: list[int]) -> bool:
    """Wait until processes have ended; return whether they have within seconds."""
    end = time.time() + 10
    while any(alive(pid) for pid in pids) and time.time() < end:
        time.sleep(0.1)
    return not any(alive(pid) for pid in pids)


# -------------------------------------------------------------------- the command line


def test_the_list_names_each_part_and_its_seconds(capsys):
    assert gpu_check.main(["--budget-of-parts", "--minutes", "9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [part.name for part in PARTS]
    assert sum(int(line.split()[1]) for line in lines) == pytest.approx(9 * 60 - gpu_check.END_S, abs=4)


@pytest.mark.parametrize("given", [["--parts", "nonsense"], [], ["--out", "FULL"]])
def test_a_wrong_command_line_is_refused(given, tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        gpu_check.parse([str(tmp_path) if word == "FULL" else word for word in given])
    assert "expected" in capsys.readouterr().err
    (tmp_path / records.PLANS).mkdir()  # what a call before left is continued, on a machine that has nothing else
    assert gpu_check.parse(["--out", str(tmp_path)]).out == tmp_path


def test_time_that_a_part_leaves_goes_to_those_after_it():
    first, second, third = PARTS[:3]
    assert gpu_check.limit_s([first, second], 340.0) == pytest.approx(40.0)
    assert gpu_check.limit_s([second, third], 300.0) < gpu_check.limit_s([second, third], 400.0)
    assert gpu_check.limit_s([third], 77.0) == gpu_check.limit_s([third], 77.0, is_toy=True) == 77.0


@pytest.mark.parametrize("minutes", [4, 7, 9])
def test_short_of_time_the_last_parts_go_without(minutes):
    """Each part that begins has its seconds, the headline always."""
    limits, left_s, parts = {}, 60 * minutes - gpu_check.END_S, list(PARTS)
    while parts:
        limits[parts[0].name] = limit = gpu_check.limit_s(parts, left_s)
        left_s -= limit
        del parts[0]
    seconds = {part.name: part.seconds for part in PARTS}
    assert list(limits)[:3] == ["environment", "headline", "three"]
    assert limits["environment"] >= 20
    assert limits["headline"] >= seconds["headline"]
    short = [name for name, limit in limits.items() if limit < seconds[name]]
    assert short == [part.name for part in PARTS][len(PARTS) - len(short) :]


# -------------------------------------------------------------------- records


def test_a_report_is_readable_after_each_record(tmp_path):
    """Tests that passed are counted, and others shown."""
    results = records.Results(tmp_path)
    results.add("headline", "eager", peak_mib=4.0, ms=2.5)
    results.add("headline", "ours-50", peak_mib=2.0, ms=2.6, predicted_overhead=0.04)
    results.add("headline", "selective", "out of memory", traceback="Traceback\nOutOfMemoryError")
    for index in range(3):
        results.add("truth", f"test_{index}", kind="test")
    results.add("truth", "test_bad", "failed", kind="test", traceback="E  assert 1 == 2")
    with (tmp_path / records.LINES).open("a") as lines:
        lines.write('{"part": "headline", "na')

    assert [r["name"] for r in records.load(tmp_path) if r["part"] == "headline"] == ["eager", "ours-50", "selective"]
    text = (tmp_path / records.REPORT).read_text()
    assert "| name | status | peak mib | ms | predicted overhead |" in text
    assert "| ours-50 | ok | 2 | 2.6 | 0.04 |" in text
    assert "| headline | 3 | 1 |  | under way  |" in text
    assert "OutOfMemoryError" in text
    assert "- 3 tests passed" in text
    assert "test_0" not in text
    assert "E  assert 1 == 2" in text


def test_events_are_kept_around_the_peak():
    actions = [("alloc", 5), ("free_requested", 5), ("alloc", 7), ("free_completed", 5), ("alloc", 1), ("alloc", 1)]
    kept = raw.around_peak([{"action": action, "size": size} for action, size in actions], 2)
    assert [event["live"] for event in kept] == [5, 5, 12, 7]
    assert raw.around_peak([]) == []


def test_a_digest_sees_each_bit_and_its_place():
    torch = pytest.importorskip("torch")
    numbers = torch.randn(1000).bfloat16()
    swapped = numbers[torch.cat((torch.tensor([1, 0]), torch.arange(2, 1000)))]
    assert trials.digest(numbers) == trials.digest(numbers.clone())
    assert trials.digest(numbers) != trials.digest(swapped)
    assert trials.digest(torch.tensor([0.0])) != trials.digest(torch.tensor([-0.0]))
    expected = {"loss": torch.tensor(2.0), "gradient of a": torch.tensor([1.0, 4.0])}
    found = {**expected, "gradient of a": torch.tensor([1.0, 5.0])}
    assert truth.difference(expected, dict(expected)) == truth.EQUAL
    assert truth.difference(found, expected) == "1 of 2 differ, most gradient of a, by 2.5e-01"


def test_a_second_call_neither_profiles_nor_solves(tmp_path, monkeypatch):
    """It runs in another process, on a machine that has nothing but the folder of plans."""
    torch = pytest.importorskip("torch")
    monkeypatch.setitem(rival_worker.MODELS, "gpt", large.toy_gpt)
    setup = rival_worker.Setup("gpt", "ours", tmp_path, time_limit_s=1.0)
    calls, measured, measure = [], [], profiling._measure_node
    monkeypatch.setattr(profiling, "_measure_node", lambda *given: measured.append(given) or measure(*given))
    for _ in range(2):
        rows: dict[str, dict[str, object]] = {}
        budgets = [trials.Budget("ours-least"), trials.Budget("ours-100")]
        trials.run_ours(
            lambda name, status="ok", rows=rows, **values: rows.update({name: values}),
            trials.Task(setup, timed_s=0.1),
            budgets,
            tmp_path,
        )
        calls.append((rows, sorted(path.name for path in (tmp_path / records.PLANS).iterdir()), len(measured)))
        torch.compiler.reset()
        solutions.forget()
    (first, files, measured_nodes), (second, files_after, measured_after) = calls
    assert first.keys() == second.keys() >= {"ours-least", "ours-100"}
    assert files == files_after
    assert measured_nodes == measured_after > 0
    for name, row in first.items():
        assert second[name]["predicted_mib"] == row["predicted_mib"]
        assert second[name]["graphs"] == 1


def test_the_verdict_names_the_bar_and_what_was_measured():
    found = {"eager": {"ms": 2.0}, "ours-50": {"peak_of_eager": 0.57, "time_of_eager": 1.25}}
    text = headline.verdict(found)
    assert "43 % for 7.3 %" in text
    assert "ours-50 takes 43.0% less memory for 20.0% of the throughput" in text


# -------------------------------------------------------------------- processes


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
def test_a_tree_of_processes_ends_with_sessions_of_their_own():
    script = "import subprocess, sys, time; subprocess.Popen(['sleep', '60'], start_new_session=True); time.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    while not (children := processes.descendants(parent.pid)):
        time.sleep(0.05)
    processes.end_tree(parent.pid)
    parent.wait()
    assert end_soon(children)


def start(folder: Path) -> subprocess.Popen[str]:
    """Start the check without a device, and wait until it has a record of one of its parts."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*COMMAND, "--out", str(folder), "--parts", "truth"]
    check = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    end = time.time() + WAIT_S
    while time.time() < end and not ((folder / records.LINES).exists() and by_part(folder)["truth"]):
        time.sleep(0.2)
    assert by_part(folder)["truth"], (folder / records.CONSOLE).read_text()
    return check


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_records_outlive_the_command_and_processes_do_not(how, tmp_path):
    check = start(tmp_path)
    started = processes.descendants(check.pid)
    assert started
    check.send_signal(how)
    printed = check.communicate(timeout=30)[0]

    text = (tmp_path / records.REPORT).read_text()
    assert "## truth" in text
    assert "no device" in text
    assert all(json.loads(line)["part"] for line in (tmp_path / records.LINES).read_text().splitlines())
    if how == signal.SIGTERM:
        assert printed == text
        assert "told to stop by SIGTERM" in text
        assert check.returncode == 1
    assert end_soon(started)
