"""Costs are measured once for each distinct operation, without a trace in the model, and kept between runs."""

from __future__ import annotations

import itertools
import json
import logging
import mmap
import operator
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed._functional_collectives as functional_collectives
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hiremate_lightning import hiremate
from hiremate_lightning.capturing.capture import Captured
from hiremate_lightning.measuring import operators, profiling
from hiremate_lightning.measuring.profiling import CostCache, TimedRun, device_name, measure
from hiremate_lightning.memory.metering import MemoryMeter, measure_peak
from hiremate_lightning.records.costs import Profile, estimate
from hiremate_lightning.records.schedule import lower
from hiremate_lightning.running.program import build
from hiremate_lightning.torch_private import tensor_state
from tests.exact import captured_by, captured_graphs, network
from tests.tiny import recompute_lazily

CPU = torch.device("cpu")
ROWS, WIDTH = 256, 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.dropout(torch.atan(self.norm(self.first(x)))))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    model = hiremate(Net(), "100%", verbose=False)
    model(torch.randn(ROWS, WIDTH)).sum().backward()
    return model


@pytest.fixture
def captured(model) -> Captured:
    return captured_graphs(model)[0]


@contextmanager
def counting_calls() -> Iterator[list[str]]:
    """List the operators that run."""
    calls: list[str] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            calls.append(str(function))
            return function(*args, **(kwargs or {}))

    with Counting():
        yield calls


@pytest.mark.parametrize("part", [2, 3])
def test_the_seed_and_offset_of_attention_are_made_on_the_host(part):
    """Its CUDA kernels read both there, which traces do not say: memory of the device would crash the process."""
    graph = fx.Graph()
    attention = torch.ops.aten._scaled_dot_product_efficient_attention.default
    with FakeTensorMode(allow_non_fake_inputs=True):
        query = torch.empty(2, 4, 8, 16, device="cuda")
        values = attention(query, query, query, None, True, 0.1)
    node = graph.call_function(attention, (None, None, None))
    got = graph.call_function(operator.getitem, (node, part))
    got.meta["val"] = values[part]
    assert values[part].device.type == "cuda"
    made = operators.stand_in(got)
    assert (made.device.type, made.dtype, made.shape) == ("cpu", torch.int64, ())


@pytest.mark.parametrize("name", ["cuda.matmul", "cudnn", "cudnn.conv"])
@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_settings_of_a_gpu_can_be_read_whatever_sets_them(name, precision):
    """`allow_tf32` can't, once the newer name has been used."""
    setting = attrgetter(name)(torch.backends)
    before = setting.fp32_precision
    setting.fp32_precision = precision
    try:
        products = profiling._cuda_settings().split(", ")
        assert name != "cuda.matmul" or ("TF32" in products) is (precision == "tf32")
    finally:
        setting.fp32_precision = before


def counted(captured: Captured, cache: CostCache) -> tuple[Profile, int]:
    """Measure; return the costs, and how many operations were run for them."""
    heard = []
    profile = measure(captured, cache, progress=lambda done, total: heard.append(done))
    return profile, max(heard, default=0)


def test_every_node_has_its_costs_or_the_same_estimate(captured):
    profile = measure(captured, CostCache())
    assert len(profile.time_ms) == len(profile.workspace_bytes) == len(captured.graph.nodes)
    assert all(time_ms > 0 for time_ms in profile.time_ms)
    assert all(size >= 0 for size in profile.workspace_bytes)
    threads = torch.get_num_threads()
    assert profile.device == device_name(CPU)
    assert device_name(CPU) == f"cpu, {threads} thread{'s' * (threads > 1)}, torch {torch.__version__}"
    assert estimate(captured.graph) == estimate(captured.graph)
    assert estimate(captured.graph).device == "estimate"


@network(lambda: {"linear": nn.Linear(WIDTH, WIDTH)})
def normed_by_all(self, x: torch.Tensor) -> torch.Tensor:
    """Divides by what all processes have."""
    y = self.linear(x)
    total = functional_collectives.all_reduce(y.detach().square().sum(), "sum", torch.distributed.group.WORLD)
    return torch.atan(y / total)


@pytest.mark.usefixtures("one_process")
def test_collectives_are_not_run_to_be_measured(monkeypatch):
    monkeypatch.setattr(tensor_state, "real_mode", nullcontext)  # else nothing is counted
    captured = captured_by(normed_by_all(), torch.randn(ROWS, WIDTH))
    with counting_calls() as calls:
        profile = measure(captured, CostCache())
    collectives = [i for i, node in enumerate(captured.graph.nodes) if "c10d" in node.op]
    assert collectives
    assert all(profile.time_ms[i] > 0 for i in collectives)
    assert calls
    assert not any("c10d" in call for call in calls)


def test_all_stays_as_it_was(model, captured):
    """Random state, gradients and buffers, the mode of gradients, and autocast."""
    before = [t.clone() for t in (*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters()))]
    random_state = torch.get_rng_state()

    measure(captured, CostCache())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        measure(captured, CostCache())
        assert torch.is_autocast_enabled("cpu")

    after = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_equal_work_is_measured_once_and_what_is_known_not_again(captured, tmp_path):
    """Progress counts up to all that is measured; costs on disk serve the next run, in whole files."""
    heard, folder = [], tmp_path / "deep" / "er"
    total = len({node.key for node in captured.graph.nodes})
    assert total < len(captured.graph.nodes)
    cache = CostCache(folder)
    first = measure(captured, cache, progress=lambda *progress: heard.append(progress))
    assert heard == [(done, total) for done in range(total + 1)]
    for known in (cache, CostCache(folder)):
        assert counted(captured, known) == (first, 0)
    assert [path.suffix for path in folder.iterdir()] == [".json"]


class Operation:
    """Runs for set milliseconds, on a clock of its own."""

    def __init__(self, *times_ms: float) -> None:
        self.left_ms, self._now_s = list(times_ms), 0.0

    def __call__(self) -> torch.Tensor:
        self._now_s += self.left_ms.pop(0) / 1e3
        return torch.ones(4)

    def clock(self) -> float:
        return self._now_s


@pytest.mark.parametrize(
    ("times_ms", "found_ms", "runs"),
    [([0.9, 0.5, 0.7, 0.6, 0.8, 0.6, 0.7, 0.8, 0.4], 0.5, 8), ([90.0, 80.0, 70.0], 80.0, 2)],
    ids=["eight times", "a slow one, twice"],
)
def test_an_operation_is_timed_eight_times_or_twice_if_slow(times_ms, found_ms, runs, monkeypatch):
    """The run that shows memory counts as timed."""
    run = Operation(*times_ms)
    monkeypatch.setattr(profiling.time, "perf_counter", run.clock)
    cost = profiling._cost(run, CPU, ())
    assert (cost.time_ms, cost.workspace_bytes) == (pytest.approx(found_ms), 0)
    assert run.left_ms == times_ms[runs:]


def _file_in(folder):
    return next(folder.glob("*.json"))


def _without(text, field):
    data = json.loads(text)
    del data[field]
    return json.dumps(data)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[: len(text) // 2], ""),
        (lambda text: "", ""),
        (lambda text: "[]", ""),
        (lambda text: text.replace('"format": 2', '"format": 99'), "it was written for another version or device"),
        (lambda text: text.replace(device_name(CPU), "another"), "it was written for another version or device"),
        (lambda text: _without(text, "costs"), ""),
        (lambda text: json.dumps({**json.loads(text), "costs": {"aten.mm": ["fast", 0]}}), ""),
    ],
    ids=["cut", "empty", "no object", "other format", "other device", "no costs", "no number"],
)
def test_a_file_that_cannot_be_used_is_ignored_with_a_warning(damage, words, captured, tmp_path, caplog):
    measure(captured, CostCache(tmp_path))
    path = _file_in(tmp_path)
    path.write_text(damage(path.read_text()))

    with caplog.at_level(logging.WARNING, "hiremate_lightning"):
        _, count = counted(captured, CostCache(tmp_path))

    assert "Ignored the profile" in caplog.text
    assert path.name in caplog.text
    assert words in caplog.text
    assert count
    assert json.loads(path.read_text())["device"] == device_name(CPU)


def test_a_folder_that_cannot_be_written_is_only_logged(captured, tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    with caplog.at_level(logging.WARNING, "hiremate_lightning"):
        profile = measure(captured, CostCache(tmp_path / "file"))
    assert "Could not keep the profile" in caplog.text
    assert len(profile.time_ms) == len(captured.graph.nodes)


refusals: list[str] = []


@torch.library.custom_op("hiremate_tests::moody", mutates_args=())
def moody(x: torch.Tensor) -> torch.Tensor:
    """Copy a tensor, or refuse to."""
    if refusals:
        raise RuntimeError(refusals.pop())
    return x.clone()


moody.register_fake(torch.empty_like)
moody.register_autograd(lambda _, gradient: gradient)


@pytest.fixture
def with_moody() -> tuple[Captured, int]:
    """A captured graph, and the index of a node in it that may refuse to be run."""

    class Moody(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return moody(super().forward(x)).sin()

    captured = captured_by(Moody(WIDTH, WIDTH), torch.randn(ROWS, WIDTH))
    return captured, next(i for i, node in enumerate(captured.graph.nodes) if "moody" in node.op)


def test_the_estimate_of_what_cannot_run_alone_is_not_kept(with_moody, tmp_path):
    captured, refused = with_moody
    refusals.append("not alone")
    profile = measure(captured, CostCache(tmp_path))
    assert not refusals
    assert profile.time_ms[refused] == estimate(captured.graph).time_ms[refused]
    assert profile.workspace_bytes[refused] == 0
    (path,) = tmp_path.iterdir()
    missing = {node.key for node in captured.graph.nodes} - json.loads(path.read_text())["costs"].keys()
    assert missing == {captured.graph.nodes[refused].key}
    measure(captured, CostCache(tmp_path))
    assert missing < json.loads(path.read_text())["costs"].keys()


def scatter(x: torch.Tensor, mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Put values in the place of masked rows, as models do with what they make of pictures between words."""
    return x.sin().masked_scatter(mask[:, None].expand_as(x), values.sin())


def scatter_elements(x: torch.Tensor, mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return x.sin().masked_scatter((x > 0) & mask[:, None], values.sin())


def put(x: torch.Tensor, mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found = x.clone()
        found[mask] = values
    return x * found


def put_along(x: torch.Tensor, mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found = x.t().clone()
        found[:, mask] = values.t()
    return x * found.t()


def solve(x: torch.Tensor, mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    square = x[:WIDTH] + 100 * torch.eye(WIDTH)
    return x @ torch.linalg.lu_solve(*torch.linalg.lu_factor(square), square)


@pytest.mark.parametrize("masked", [0, 1, 5], ids=["no row", "one row", "five rows"])
@pytest.mark.parametrize("function", [scatter, scatter_elements, put, put_along, solve])
def test_what_chooses_by_a_mask_can_be_measured(function, masked):
    """So can what takes pivots: neither runs on any made-up mask or integers."""

    @network(lambda: {"one": nn.Linear(WIDTH, WIDTH), "two": nn.Linear(WIDTH, WIDTH)})
    def chooses(self, x, mask, values):
        return function(self.one(x), mask, self.two(values))

    model, mask, announced = hiremate(chooses(), "100%", verbose=False), torch.arange(ROWS) < masked, []
    model(torch.randn(ROWS, WIDTH), mask, torch.randn(masked, WIDTH)).sum().backward()
    graphs = captured_graphs(model)
    assert graphs
    for captured in graphs:
        measure(captured, CostCache(), warn=lambda *words: announced.append(words))
    assert not announced


def test_made_up_numbers_are_probabilities():
    """CUDA's kernels assert that they are, where they read some, and nothing runs on the device after that."""
    made = operators.made_up(torch.empty(1000, dtype=torch.float16))
    assert 0 <= made.min() < made.max() <= 1


def test_a_measurement_under_way_does_not_see_the_profiling(captured):
    with MemoryMeter(CPU) as meter:
        measure(captured, CostCache())
    assert max(interval.peak_bytes for interval in meter.intervals) < ROWS * WIDTH * 4


def refined(captured, first: dict[str, list[float]], again: dict[str, list[float]]) -> dict[str, float]:
    """Refine times of 1 ms each by samples of operations; give the time of each operation."""
    graph = captured.graph
    alone = Profile((1.0,) * len(graph.nodes), (0,) * len(graph.nodes), "cpu")
    run = TimedRun(CPU)
    keys = {node.op: node.key for node in graph.nodes}
    run.samples = {keys[op]: times for op, times in first.items()}
    run.samples_again = {keys[op]: times for op, times in again.items()}
    times = run.refine(alone, graph).time_ms
    return {node.op: time_ms for node, time_ms in zip(graph.nodes, times, strict=True)}


ATAN, LINEAR, VIEW = "aten.atan.default", "aten.addmm.default", "aten.t.default"
REFINED = {
    "longer inside of the step": ({ATAN: [1.5, 1.7, 9.0], LINEAR: [0.5]}, {}, {ATAN: 1.7, LINEAR: 1.0}),
    "recomputation goes before the forward": ({ATAN: [1.5]}, {ATAN: [2.5]}, {ATAN: 2.5}),
    "what an interpreter takes is left out": ({ATAN: [2.0], VIEW: [0.25]}, {}, {ATAN: 1.75, VIEW: 1.0}),
    "of other load little counts": ({ATAN: [500.0]}, {}, {ATAN: profiling.MOST_IN_STEP}),
}


@pytest.mark.parametrize("name", REFINED)
def test_times_of_operations_are_refined_by_those_inside_a_step(name, captured):
    first, again, expected = REFINED[name]
    times = refined(captured, first, again)
    assert {op: times[op] for op in expected} == expected


def test_what_overwrites_may_take_less_time_than_alone(captured):
    nodes = tuple(replace(node, is_mutating=node.op == ATAN) for node in captured.graph.nodes)
    overwriting = SimpleNamespace(graph=replace(captured.graph, nodes=nodes))
    assert refined(overwriting, {ATAN: [0.5]}, {})[ATAN] == 0.5


def test_time_that_went_into_page_faults_is_no_operation_s_own(captured, monkeypatch):
    program = build(captured, lower(captured.graph, recompute_lazily(captured.graph, ())))
    arguments = [torch.randn(p.meta["val"].shape) for p in captured.placeholders]
    for cost_ms, is_own in ((0.0, True), (1e9, False)):
        monkeypatch.setattr(profiling, "page_faults", itertools.count().__next__)
        monkeypatch.setattr(profiling, "page_fault_ms", lambda cost_ms=cost_ms: cost_ms)
        timed = TimedRun(CPU)
        timed.wrap(program).forward(list(arguments))
        assert timed.total_ms > 0
        assert all((time_ms > 0) == is_own for times in timed.samples.values() for time_ms in times)


def test_a_timed_run_takes_no_more_memory(captured):
    program = build(captured, lower(captured.graph, recompute_lazily(captured.graph, ())))
    timed = TimedRun(CPU).wrap(program)
    arguments = [torch.randn(p.meta["val"].shape) for p in captured.placeholders]
    peaks = [measure_peak(lambda p=p: p.forward(list(arguments)), CPU) for p in (program, timed)]
    assert peaks[0] == peaks[1]


# ---------------------------------------------------------------- page faults


PAGES = 1000


@pytest.fixture
def memory():
    if not profiling.HAS_PAGE_FAULTS:
        pytest.skip("this system does not count page faults")
    with mmap.mmap(-1, PAGES * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        yield memory


def touch(memory: mmap.mmap) -> int:
    """Write to each page; give how many page faults this took."""
    before = profiling.page_faults()
    for start in range(0, len(memory), mmap.PAGESIZE):
        memory[start] = 1
    return profiling.page_faults() - before


def test_a_page_is_counted_when_it_is_touched_first(memory):
    first, again = touch(memory), touch(memory)
    assert first > again
    assert again < PAGES / 10


def test_the_cost_is_the_extra_time_of_the_first_touch():
    clocks, faults = iter([0.0, 0.003, 0.004]), iter([100, 104])
    assert profiling._page_fault_ms(clocks.__next__, faults.__next__) == pytest.approx(0.5)


def test_the_cost_is_no_more_than_that_of_clearing_a_huge_page():
    assert 0 <= profiling.page_fault_ms() < 1.0


def test_a_system_that_does_not_count_has_none(monkeypatch):
    profiling.page_fault_ms.cache_clear()
    monkeypatch.setattr(profiling, "HAS_PAGE_FAULTS", False)
    assert profiling.page_faults() == 0
    assert profiling.page_fault_ms() == 0
    profiling.page_fault_ms.cache_clear()
