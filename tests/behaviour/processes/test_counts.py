"""Planning for several GPUs without them: what is sharded, what is counted, and how many are enough."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hiremate_lightning.command_line.arguments import read_counts, read_inputs
from hiremate_lightning.command_line.cli import main
from hiremate_lightning.command_line.comparisons import POWERS, Count, answer, count_line, ends_auto
from hiremate_lightning.command_line.factory import Workload
from hiremate_lightning.command_line.offline import OfflineOptions, capture_offline
from hiremate_lightning.command_line.without_device import Layout, planned_paths, repeated_blocks
from hiremate_lightning.errors import ConfigurationError
from hiremate_lightning.torch_private import sharding
from hiremate_lightning.units import format_bytes

MODELS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(3))})
        self.head = nn.Linear(64, 8)

    def forward(self, x):
        for layer in self.inner["layers"]:
            x = layer(x)
        return self.head(x).square().mean()

class Divided(Net):
    _tp_plan = {"inner.layers.*.up": "colwise", "inner.layers.*.down": "rowwise", "head": "colwise_gather_output"}

def net():
    return Net(), torch.zeros(64, 64)

def divided():
    return Divided(), torch.zeros(64, 64)
"""
WEIGHTS = 3 * (64 * 256 + 256 + 256 * 64 + 64) + 64 * 8 + 8


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "spread_models.py"
    path.write_text(MODELS)
    return str(path)


def planned(capsys, *arguments):
    code = main(["plan", *arguments, "--time-limit", "2", "--json", "-"])
    return code, json.loads(capsys.readouterr().out)


def test_several_numbers_of_gpus_are_planned_side_by_side(models, capsys):
    options = "--fsdp", "1,2,4", "--optimizer", "SGD", "--zero-grad", "after-forward"
    code, numbers = planned(capsys, f"{models}:net", "--budget", "1100KiB", *options)
    rows = numbers["counts"]

    assert code == 0
    assert [row["gpus"] for row in rows] == [1, 2, 4]
    assert all(row["fits"] and row["peak_bytes"] <= 1100 * 2**10 for row in rows)
    assert [row["overhead"] > 0 for row in rows] == [True, False, False]
    assert [row["peak_parts"]["parameters"] for row in rows] == [4 * WEIGHTS // shards for shards in (1, 2, 4)]
    assert all(sum(row["peak_parts"].values()) == row["peak_bytes"] for row in rows)
    assert rows[0]["sent_bytes"] == 0 < rows[1]["sent_bytes"] < rows[2]["sent_bytes"]
    assert rows[0]["unplanned_peak_bytes"] > rows[1]["unplanned_peak_bytes"]
    assert numbers["target"] == "Net"


def test_a_ring_sends_the_share_of_each_gather(models, capsys):
    """Blocks are gathered twice and the root once, and all gradients are reduced once: three times all weights."""
    _, numbers = planned(capsys, f"{models}:net", "--budget", "8MiB", "--fsdp", "4")

    head = 4 * (64 * 8 + 8)
    assert numbers["sent_bytes"] == (3 * 4 * WEIGHTS - head) * 3 // 4
    assert numbers["sending_ms"] == pytest.approx(numbers["sent_bytes"] / 10e6)
    assert {*numbers["peak_parts"]} >= {"parameters", "outside", "activations"}


def test_blocks_are_divided_by_the_plan_of_the_model(models, capsys):
    _, alone = planned(capsys, f"{models}:divided", "--budget", "8MiB", "--tp", "2")
    _, both = planned(capsys, f"{models}:divided", "--budget", "8MiB", "--tp", "2", "--fsdp", "2")

    biases = 3 * 64  # of what is added up over all parts
    assert alone["resident"]["parameters"] == 4 * (WEIGHTS + biases) // 2
    assert both["resident"]["parameters"] == 2 * (WEIGHTS + biases) // 2
    assert alone["gpus"] == 2
    assert both["gpus"] == 4
    assert 0 < alone["sent_bytes"] < both["sent_bytes"]


def test_the_table_answers_how_many_are_needed(models, capsys):
    assert main(["plan", f"{models}:net", "--budget", "100MiB", "--fsdp", "1,2", "--device", "cuda"]) == 0
    output = capsys.readouterr().out

    assert output.startswith("Net, budget 100 MiB on each GPU, batch size 64 on each: 1 GPU is enough; nothing is rec")
    assert "peak of the plan" in output
    assert "Each of 2 GPUs has a batch of its own." in output
    assert "Steps for several GPUs are captured on CPU tensors and accounted as on a GPU." in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--fsdp", "two"], "--fsdp takes a number of GPUs such as 8, several such as 2,4,8, or auto, found 'two'"),
        (["--fsdp", "0"], "found '0'"),
        (["--tp", "0"], "--tp must be above 0, found 0"),
        (["--tp", "2"], "Net has no plan for tensor parallelism: expected _tp_plan"),
        (["--fsdp", "2", "--units", "Blok"], "no module of a class 'Blok' to shard. Did you mean 'Block'?"),
        (["--param-dtype", "half"], "--param-dtype must be bfloat16 or float16, found 'half'"),
        (["--fsdp", "2", "--measure"], "--measure is of a step on one GPU. Leave it out with --fsdp and --tp."),
        (["--fsdp", "1,2", "--measure"], "--measure is of a step on one GPU."),
        (["--units", "Block"], "--units and --param-dtype say how --fsdp shards: add --fsdp 8, or leave them out."),
        (["--fsdp", "2,4", "--html", "page.html"], "A page or a picture is of one plan: name one number"),
    ],
)
def test_wrong_options_for_several_gpus_are_refused(models, capsys, monkeypatch, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", f"{models}:net", "--budget", "8MiB", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_shares_and_curves_are_of_one_number(models, capsys):
    assert main(["plan", f"{models}:net", "--budget", "50%", "--fsdp", "auto"]) == 2
    assert "give --budget as bytes" in capsys.readouterr().err
    assert main(["curve", f"{models}:net", "--fsdp", "2,4"]) == 2
    assert "Only plan takes several numbers of GPUs: expected one, found --fsdp 2,4" in capsys.readouterr().err
    assert main(["fit", f"{models}:net", "--budget", "8MiB", "--fsdp", "2"]) == 2
    assert "there is no option '--fsdp'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"0": "packed_colwise"}, "Can't divide 0 (Linear) by the style 'packed_colwise'"),
        ({"1": "colwise"}, "Can't divide 1 (GELU) by the style 'colwise'"),
        ({"0": "colwise"}, "--tp 3 doesn't divide the 8 features of 0."),
        ({"0": "rowwise"}, "--tp 3 doesn't divide the 4 heads of keys and values."),
    ],
)
def test_plans_of_models_that_can_not_be_followed_are_refused(plan, words):
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU())
    model._tp_plan, model.config = plan, SimpleNamespace(num_key_value_heads=4)
    with pytest.raises(ConfigurationError) as error:
        capture_offline(Workload(lambda: model, "factory", read_inputs("4x6")), OfflineOptions(layout=Layout(1, 3)))
    assert words in str(error.value)
    assert not torch.distributed.is_initialized()


def test_a_factory_that_starts_processes_is_refused():
    options = OfflineOptions(layout=Layout(2))
    with sharding.imagined_group(2), pytest.raises(ConfigurationError, match="has started a process group"):
        capture_offline(Workload(lambda: nn.Linear(4, 4), "factory", read_inputs("4x4")), options)


def test_the_outermost_repeated_blocks_are_units():
    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(2))

    model = nn.ModuleDict({"body": nn.ModuleList([Stage(), Stage()]), "head": nn.Sequential(nn.Linear(4, 4))})

    assert repeated_blocks(model) == [*model["body"]]
    assert repeated_blocks(model["head"]) == []
    assert planned_paths(model) == [""]


def count(gpus, fits, peak_bytes, overhead=0.1, eager_bytes=None):
    eager_bytes = 2 * peak_bytes if eager_bytes is None else eager_bytes
    row = {"gpus": gpus, "fsdp": gpus, "tp": 1, "fits": fits, "overhead": overhead}
    return {**row, "unplanned_peak_bytes": eager_bytes, "peak_bytes": peak_bytes}


def counts_of_auto(count_on: Callable[[int], Count]) -> list[Count]:
    """Return the counts up to that with which "auto" ends."""
    counts = []
    for gpus in POWERS:
        counts.append(count_on(gpus))
        if ends_auto(counts):
            break
    return counts


def test_auto_ends_with_the_first_that_is_enough():
    counts = counts_of_auto(lambda gpus: count(gpus, gpus > 2, 100 // gpus))

    assert [c["gpus"] for c in counts] == [1, 2, 4]
    assert answer(counts) == "4 GPUs are enough, with +10.0% time for recomputation."


def test_the_answer_names_the_number_without_recomputation():
    counts = [count(2, False, 50), count(4, True, 25), count(16, True, 6, 0.0)]
    words = "4 GPUs are enough, with +10.0% time for recomputation. With 16 nothing is recomputed."
    assert answer(counts) == words


def test_numbers_of_gpus_are_read_and_written_in_a_line():
    assert [read_counts(text) for text in ("1", "2, 4,2", "auto")] == [(1,), (2, 4), ()]
    assert count_line(count(1, False, 2**30)) == "1 GPU: does not fit, the smallest peak found is 1.00 GiB"
    assert count_line(count(2, True, 2**30)) == "2 GPUs: fits, peak 1.00 GiB, extra time +10.0%"
    assert count_line(count(4, True, 2**30, 0.0)) == "4 GPUs: fits, peak 1.00 GiB, nothing recomputed"


def test_auto_ends_where_more_gpus_do_not_help():
    found = counts_of_auto(lambda gpus: count(gpus, False, 2**30 + 2**30 // gpus))

    assert [c["gpus"] for c in found] == [1, 2, 4, 8, 16, 32, 64]
    least = format_bytes(found[-1]["peak_bytes"], up=True)
    assert f"is enough: the smallest peak found is {least} on each GPU, with 64. Raise the budget" in answer(found)
