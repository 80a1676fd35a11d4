"""What is planned, what is refused, and that modules are left as they were found."""

from __future__ import annotations

import copy
import logging
import pickle
import re
import traceback
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils.memory import should_reduce_batch_size
from lightning.pytorch.utilities.memory import is_oom_error
from torch import nn
from torch.utils.checkpoint import checkpoint

from hiremate_lightning import (
    BudgetError,
    CaptureError,
    ConfigurationError,
    HiRemateWarning,
    InfeasibleBudgetError,
    get_plan,
    hiremate,
    remove_hiremate,
)
from hiremate_lightning.sessions import graph_programs
from hiremate_lightning.targets.modules import targets_of
from hiremate_lightning.testing import captured_count, runs, session_of
from hiremate_lightning.torch_private import hooks
from tests.exact import assert_same, network, quiet, recorded, take_steps

OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory."  # as a CPU says it


class Net(nn.Module):
    def __init__(self, depth=4, width=32):
        super().__init__()
        self.encoder = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)))
        self.head = nn.Linear(width, width)

    def forward(self, x):
        return self.head(self.encoder(x))


def batch():
    return torch.randn(64, 32)


def train(model, steps=3, call=None):
    for _ in range(steps):
        (call or model)(batch()).square().mean().backward()
        model.zero_grad()


def trained_alike(plain, model, batches, call=lambda net, x: net(x)):
    """Train both, and fail where gradients differ; return the warnings."""
    with recorded() as warned:
        for x in batches:
            for each in (plain, model):
                each.zero_grad()
                torch.manual_seed(3)
                call(each, x).sum().backward()
            assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    return warned


def state_of(model):
    return [(name, sorted(m.__dict__), type(m)) for name, m in model.named_modules()]


def _compiled():
    model = Net()
    model.encoder.compile()
    return model


class DeepSpeedEngine(nn.Module):
    """Called as DeepSpeed's."""


def _fsdp():
    return type("FullyShardedDataParallel", (nn.Sequential,), {})(Net())


def _on_xla():
    """Make a module that says it is on a device of XLA; there is none here."""
    module = nn.Linear(2, 2)
    module.parameters = lambda recurse=True: iter([SimpleNamespace(device=torch.device("xla"))])
    return module


@pytest.mark.usefixtures("one_process")
def test_shards_kept_on_the_cpu_are_refused():
    """Whether fully_shard() is called before hiremate() or after it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    options = {"mesh": init_device_mesh("cpu", (1,)), "offload_policy": CPUOffloadPolicy(pin_memory=False)}
    with pytest.raises(ConfigurationError, match=r"FSDPNet.*CPUOffloadPolicy.*Leave offload_policy out"):
        hiremate(fully_shard(Net(), **options), "50%")
    model = hiremate(Net(), "50%", verbose=False)
    fully_shard(model.encoder, **options)
    with pytest.raises(ConfigurationError, match=r"submodule 'encoder'.*CPUOffloadPolicy"):
        model(batch())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_fsdp, r"FSDP1 flattens the parameters.*fully_shard\(\).*DistributedDataParallel"),
        (DeepSpeedEngine, r"no part of such a model could be captured.*fully_shard\(\).*DistributedDataParallel"),
        (_on_xla, "XLA decides on memory itself.*on the CPU"),
        (_compiled, "submodule 'encoder'.*compiled already"),
        (lambda: torch.compile(Net()), "compiled already"),
        (lambda: nn.DataParallel(Net()), "DataParallel copies modules at every step. Use DistributedDataParallel"),
        (lambda: torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), "TorchScript"),
        (lambda: "model", "Expected a torch.nn.Module"),
        (lambda: Net, "Expected a torch.nn.Module to plan, found the class Net. Make one of it."),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit.trace:FutureWarning")
def test_models_that_cannot_be_planned_are_refused_by_name(make, words):
    with pytest.raises(ConfigurationError, match=words):
        hiremate(make(), "50%")


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ({"budget": "10"}, "no unit.*10 GiB"),
        ({"on_infeasible": "ignore"}, "'raise' or 'warn', found 'ignore'"),
        ({"time_limit_s": "30"}, "time_limit_s must be above 0 seconds, found '30'"),
        ({"max_plans": "8"}, "max_plans must be at least 1, found '8'"),
        ({"optimizer": "adam"}, "optimizer must be a torch.optim.Optimizer, .*, found 'adam'. Leave it out"),
        ({"optimizer": [torch.optim.SGD(nn.Linear(1, 1).parameters())] * 2}, "found list. Leave it out where"),
        ({"target": nn.Linear(1, 1)}, "target takes paths of submodules, .*, found Linear"),
        ({"target": ["encoder", 3]}, "target takes paths of submodules, .*, found int"),
        ({"target": "encodr"}, r"Net has no submodule 'encodr' to plan \(target=\). Did you mean 'encoder'"),
        ({"solver": "magic"}, "Unknown solver 'magic'. Choose one of: "),
        ({"solver": "hlip"}, "Unknown solver 'hlip'. Did you mean 'hilp'"),
    ],
)
def test_an_argument_out_of_its_range_is_refused(argument, words):
    model = Net()
    before = state_of(model)
    with pytest.raises(BudgetError if "budget" in argument else ConfigurationError, match=words):
        hiremate(model, **{"budget": "50%", **argument})
    assert state_of(model) == before


@pytest.mark.parametrize("function", [get_plan, remove_hiremate])
def test_what_is_no_module_is_refused(function):
    with pytest.raises(ConfigurationError, match=f"{function.__name__} takes the model .* found 'net'"):
        function("net")


def test_a_model_and_a_budget_in_the_wrong_order_are_told_apart():
    with pytest.raises(ConfigurationError, match=r"expected hiremate\(model, '50%'\), found a Net as the budget"):
        hiremate("50%", Net())
    with pytest.raises(ConfigurationError, match=r"expected hiremate\(model, SGD\), found a Net as the budget"):
        hiremate(torch.optim.SGD(Net().parameters()), Net())


@pytest.mark.parametrize("rows", [1, 3])
def test_a_wrong_shape_reads_as_in_plain_training(rows, request):
    """The first step and later ones raise PyTorch's own error, and torch.compile logs nothing before it.

    From PyTorch 2.15 on, an operator that is traced puts its name before it.
    """
    model, seen = hiremate(Net(), "90%", verbose=False), []
    log, handler = logging.getLogger("torch._subclasses.fake_tensor"), logging.Handler()
    handler.emit = seen.append
    train(model, steps=rows - 1)
    log.addHandler(handler)
    request.addfinalizer(lambda: log.removeHandler(handler))
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(64, 31))
    text = "mat1 and mat2 shapes cannot be multiplied (64x31 and 32x32)"
    assert str(caught.value) in (text, f"addmm: {text}")
    assert not seen
    before = runs(model)
    train(model)
    assert runs(model) == before + 3, "later steps run by the plan"


def test_an_error_of_an_operation_has_no_words_of_the_tracer():
    model = hiremate(nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8)), "90%", verbose=False)
    with pytest.raises(IndexError) as caught:
        model(torch.full((2, 8), 9))
    assert str(caught.value) == "index out of range in self"


def test_a_compile_around_a_planned_model_is_refused():
    model = torch.compile(hiremate(Net(), "90%", verbose=False), backend="eager")
    with pytest.raises(ConfigurationError, match=r"around a module that is planned.* pass torch_compile=False"):
        model(batch())


def test_an_infeasible_budget_names_what_a_step_has_shown():
    model = Net()
    hiremate(model, "1 MiB", verbose=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.randn(4096, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(InfeasibleBudgetError) as caught:
        model(torch.randn(4096, 32))
    error = caught.value
    assert isinstance(error, torch.OutOfMemoryError)
    assert OUT_OF_MEMORY in error.args[0]
    assert OUT_OF_MEMORY not in str(error), "people read it as memory that ran out"
    assert is_oom_error(error)
    assert should_reduce_batch_size(error)
    assert f"{error.smallest_bytes:,} bytes" in str(error)
    assert error.smallest_bytes > error.budget_bytes == 2**20
    assert error.module in str(error)


def test_a_first_step_without_memory_is_refused(monkeypatch):
    monkeypatch.setattr(graph_programs, "free_bytes", lambda device: 2**20)
    model = Net()
    weights = [p.clone() for p in model.parameters()]
    hiremate(model, "1 MiB", verbose=False)
    with pytest.raises(InfeasibleBudgetError, match="It needs at least"):
        model(torch.randn(4096, 32))
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_a_planned_model_is_left_as_it_was():
    model = Net()
    before = state_of(model)
    hiremate(model, "60%", verbose=False)
    train(model)
    assert get_plan(model) is not None
    remove_hiremate(model)
    assert state_of(model) == before
    assert get_plan(model) is None
    assert remove_hiremate(model) is model


def test_copies_of_a_planned_model_run_eager_on_own_weights():
    model = hiremate(Net(), "60%", verbose=False)
    train(model, steps=2)
    x = batch()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert targets_of(copied) is None
        assert torch.equal(copied(x), model(x))
        with torch.no_grad():
            copied.head.weight.zero_()
        assert not torch.equal(copied(x), model(x))


def test_submodules_are_planned_where_only_they_are_called():
    torch.manual_seed(0)
    model = hiremate(Net(), "70%", verbose=False)
    train(model, call=lambda x: model.head(model.encoder(x)))
    assert list(targets_of(model).adopted) == ["encoder", "head"]
    assert get_plan(model) is not None


@pytest.mark.parametrize(
    "call",
    [lambda model, x: model.encoder(x) + model(x), lambda model, x: model(x) + model.encoder(x)],
    ids=["alone first", "whole first"],
)
def test_what_is_called_alone_and_in_a_plan_is_planned_in_both(call):
    plain = Net()
    model, counts = hiremate(copy.deepcopy(plain), "100%", verbose=False), [0]
    for _ in range(3):
        trained_alike(plain, model, [batch()], call)
        counts.append(runs(model))
    assert counts == [0, 2, 4, 6]


def test_a_part_that_is_called_alone_later_on_is_planned(change_thresholds):
    change_thresholds(watched_calls=3)
    model = hiremate(Net(), "100%", verbose=False)
    train(model, steps=4)
    train(model, steps=1, call=model.encoder)
    assert list(targets_of(model).adopted) == [""], "looked at now and again"
    train(model, steps=2)
    train(model, steps=1, call=model.encoder)
    assert list(targets_of(model).adopted) == ["", "encoder"]


def test_a_part_called_in_a_backward_is_left_to_its_outer_call():
    class Checkpointing(Net):
        @torch.compiler.disable
        def outside(self, x):
            return checkpoint(self.encoder, x, use_reentrant=False)

        def forward(self, x):
            return self.head(self.outside(self.head(x)))

    plain = Checkpointing()
    model = hiremate(copy.deepcopy(plain), "100%", verbose=False)
    trained_alike(plain, model, [batch() for _ in range(3)])
    assert list(targets_of(model).adopted) == [""]


def test_a_part_of_what_was_called_is_known_to_be_planned():
    model = hiremate(Net(), "100%", verbose=False)
    for is_called in (False, True):
        if is_called:
            train(model)
        assert targets_of(model.encoder) is targets_of(model)
        with pytest.raises(ConfigurationError, match="planned already"):
            hiremate(nn.Sequential(model.encoder, nn.Linear(32, 4)), "50%", verbose=False)
    hiremate(model.encoder, "90%")
    assert session_of(model).options.budget.share == 0.9


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            {"solver": "segments"},
            "keeps its arguments, but for the budget: expected solver='portfolio'.*found 'segments'",
        ),
        ({"compile": "inductor"}, "expected compile=None.*'inductor'"),
        ({"time_limit_s": 1.0}, "expected time_limit_s=30.0.*1.0"),
        ({"max_plans": 2}, "expected max_plans=8.*2"),
        ({"on_infeasible": "warn"}, "expected on_infeasible='raise'.*'warn'"),
        ({"cache_dir": "plans"}, "expected cache_dir=None.*plans"),
        ({"target": "head"}, "keeps its targets: expected target='encoder' as at first, found 'head'.*remove_hiremate"),
    ],
)
def test_a_second_request_for_more_than_a_budget_changes_nothing(asked, words):
    model = hiremate(Net(), "100%", target="encoder", verbose=False)
    train(model)
    plan = get_plan(model)
    with pytest.raises(ConfigurationError, match=words):
        hiremate(model, "50%", **asked)
    assert get_plan(model) is plan
    hiremate(remove_hiremate(model), "50%", verbose=False, **asked)


def test_a_second_request_may_repeat_or_name_an_optimizer():
    model, first = Net(), {"solver": "segments", "time_limit_s": 5.0, "target": ["encoder"]}
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch()).sum().backward()
    optimizer.step()
    hiremate(model, "100%", **first)
    hiremate(model, "90%", **first)
    hiremate(model, "80%", optimizer=optimizer, verbose=False)
    session = session_of(model)
    assert session.options.solver == "segments"
    assert session.reporter.is_silent
    train(model, steps=2)
    assert dict(get_plan(model).resident_parts)["optimizer state"] > 0


@pytest.mark.parametrize(
    ("make", "target", "adopted"),
    [
        (lambda: Net(), "encoder", ["encoder"]),
        (lambda: nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)), None, [""]),
    ],
    ids=["a part", "a sequential of torch itself"],
)
def test_only_the_named_target_is_planned(make, target, adopted):
    model = hiremate(make(), "90%", target=target, verbose=False)
    train(model)
    assert list(targets_of(model).adopted) == adopted
    assert get_plan(model) is not None


def test_steps_that_no_plan_saw_are_warned_of_once():
    model = hiremate(nn.Linear(32, 32), "60%", verbose=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model.forward(batch()).square().mean().backward()
        optimizer.step()

    step()
    with pytest.warns(HiRemateWarning, match="Linear trains without its plan.*where code calls its forward"):
        step()
    step()


def test_two_optimizers_that_step_in_turn_cause_no_warning():
    model = hiremate(Net(), "7 GiB", verbose=False)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.encoder, model.head)]
    for _ in range(4):
        model(batch()).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert get_plan(model) is not None


def test_calls_without_gradients_are_not_planned():
    """Nor is an export."""
    model = hiremate(Net(), "60%", verbose=False)
    with torch.no_grad():
        model(batch())
    assert captured_count(model) == 0
    x = batch()
    model.eval()
    with torch.no_grad():
        assert torch.equal(torch.export.export(model, (x,)).module()(x), model(x))


@network(lambda: {"layers": [nn.Linear(16, 16) for _ in range(4)]})
def plain_list(self, x):
    """Its layers are none of its modules."""
    for layer in self.layers:
        x = torch.relu(layer(x))
    return x


def test_layers_in_a_list_are_warned_of_once_and_planned_later():
    model = hiremate(plain_list(), "64 MiB", verbose=False)
    parameters = [p for layer in model.layers for p in layer.parameters()]
    x = torch.randn(8, 16)

    def gradients():
        model(x).square().sum().backward()
        found = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        return found

    with pytest.warns(HiRemateWarning, match="plain list: this call ran without a plan"):
        gradients()
    gradients()  # silent: pytest makes warnings errors
    found = gradients()

    assert len(get_plan(model).graph.nodes) > 4
    remove_hiremate(model)
    assert all(map(torch.equal, found, gradients()))


def test_a_frozen_model_in_eval_mode_does_not_warn_of_lists(recwarn):
    model = hiremate(plain_list().requires_grad_(False), "64 MiB", verbose=False).eval()
    for layer in model.layers:
        layer.requires_grad_(False)

    model(torch.randn(8, 16, requires_grad=True)).sum().backward()

    assert not any("plain list" in str(w.message) for w in recwarn)


def test_steps_in_eval_mode_cause_one_warning(recwarn):
    model = hiremate(nn.Linear(32, 32), "60%", verbose=False).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    take_steps(model, lambda _: batch(), 3, optimizer=optimizer, clears="never")

    assert ["eval mode: such calls are not planned" in str(w.message) for w in recwarn] == [True]
    assert captured_count(model) == 0


class Disabled(nn.Linear):
    @torch.compiler.disable
    def forward(self, x):
        return super().forward(x)


class Chain(nn.Sequential):
    @torch.compiler.disable
    def forward(self, x):
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:.*captured")
@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (lambda: Disabled(4, 4), 1),
        (lambda: Chain(Chain(Disabled(4, 4), Disabled(4, 4)), Disabled(4, 4)), 4),
    ],
    ids=["nothing", "nor of its parts"],
)
def test_a_model_of_which_nothing_is_captured_is_an_error(make, steps):
    model = hiremate(make(), "60%", verbose=False)
    with pytest.raises(CaptureError, match=rf"Nothing of {type(model).__name__} was captured.*target="):
        take_steps(model, lambda _: torch.randn(2, 4), steps, loss_of=torch.sum, clears="never")


def test_an_error_says_what_ended_graphs_where_none_is_captured():
    class Looks(nn.Linear):
        def forward(self, x):
            for _ in range(2):
                x = x * self.weight if x.sum().item() > 0 else x
            return x

    model = hiremate(Looks(4, 4), "60%", verbose=False)
    with pytest.raises(CaptureError, match=r"What ends its graphs: [^;]*Tensor\.item\(\) call.*Name submodules"):
        model(torch.ones(4, 4))


@torch.compiler.disable
def look_at(x):
    return x.square() + x.exp() * x.sin()


def test_a_budget_not_met_beside_uncaptured_code_names_that_code():
    class Looking(Net):
        def forward(self, x):
            return self.head(look_at(self.encoder(x)))

    def train():
        take_steps(model, lambda _: torch.randn(4096, 32), 2, clears="never")

    model = hiremate(Looking(), "20%", verbose=False)
    with pytest.raises(InfeasibleBudgetError) as caught:
        train()
    text = "".join(traceback.format_exception(caught.value))
    assert "What ends its graphs: " in text
    reason = text.partition("What ends its graphs: ")[2]
    assert "look_at" in reason
    assert re.search(r"\(at \S*test_targets\.py:\d+, in forward\)", reason)
    assert "Code between captured graphs has no plan" in text

    model = hiremate(Looking(), "20%", verbose=False, on_infeasible="warn")
    with pytest.warns(HiRemateWarning, match=r"Nothing fits the budget.*look_at.*test_targets\.py:\d+"):
        train()


class BreaksInALoop(Net):
    """Dynamo gives up on a forward that breaks the graph in a loop."""

    def forward(self, x):
        for layer in self.children():
            x = layer(x)
            torch._dynamo.graph_break()
        return x


def test_parts_of_a_model_that_is_not_captured_are_planned():
    plain, model = BreaksInALoop(), BreaksInALoop()
    model.load_state_dict(plain.state_dict())
    hiremate(model, "90%", verbose=False, on_infeasible="warn")
    (text,) = (text for text in trained_alike(plain, model, [batch()] * 4) if "captured" in text)
    assert text.startswith(
        "Nothing of BreaksInALoop was captured as a whole; from the next step on its parts are planned. What ends"
    )
    assert get_plan(model) is not None
    hiremate(model, "95%")
    assert "" not in targets_of(model).adopted  # not tried again
    remove_hiremate(model)
    assert all(hooks.get_call(module) is None for module in model.modules())


@pytest.mark.parametrize("others", [(), ("last",)])
def test_uncaptured_parts_run_beside_the_plan_with_one_warning(others):
    model = BreaksInALoop()
    for name in ("middle", *others):
        setattr(model, name, Disabled(32, 32))
    hiremate(model, "95%", verbose=False, on_infeasible="warn")
    with recorded() as warned:
        take_steps(model, lambda _: batch(), 3, loss_of=torch.sum, clears="never")
    first, *more = (text for text in warned if "could not be captured" in text)
    assert first == "middle could not be captured and runs without a plan, beside what is planned."
    assert more == ["Other modules of the class Disabled could not be captured either."] * len(others)
    assert get_plan(model) is not None


@pytest.mark.parametrize("target", [None, ["first", "last"]])
def test_an_uncaptured_part_called_first_runs_beside_the_plan(target):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.LSTM(32, 32), nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))

    model = Recurrent()
    hiremate(model, "95%", verbose=False, on_infeasible="warn", target=target)
    with recorded() as warned:
        for _ in range(3):
            model.last(model.first(batch())[0]).sum().backward()
    assert [text for text in warned if "could not be captured" in text] == [
        "first could not be captured and runs without a plan, beside what is planned."
    ]
    assert get_plan(model) is not None


class Stem(nn.Linear):
    """A module whose forward is not of torch: Dynamo captures it wherever it is called."""

    def forward(self, x):
        return super().forward(x).tanh()


@network(lambda: {"stem": Stem(32, 32), "inner": BreaksInALoop(), "last": nn.Linear(32, 32)})
def within(self, x):
    """A forward of which all is captured but for the modules of torch that a part of it calls."""
    return self.last(self.inner(self.stem(x)))


class Beside(BreaksInALoop):
    """A forward that Dynamo gives up, and of whose parts it captures one all the same."""

    def __init__(self):
        super().__init__()
        self.middle = Stem(32, 32)


class InSequence(nn.Module):
    """A forward that is captured but for the sequence that it calls, one of whose modules ends the graph."""

    def __init__(self):
        super().__init__()
        self.stem, self.last = Stem(32, 32), nn.Linear(32, 32)
        self.inner = nn.Sequential(nn.Linear(32, 32), asks(), nn.Sequential(nn.Linear(32, 32), nn.Tanh()))

    def forward(self, x):
        return self.last(self.inner(self.stem(x)))


@network(lambda: {})
def asks(self, x):
    """A module that looks at a number."""
    return x * (2 if x.sum().item() > 0 else 3)


class EndsRecurrent(InSequence):
    """Its sequence ends in a module that Dynamo doesn't capture."""

    def __init__(self):
        super().__init__()
        self.inner.append(nn.LSTM(32, 32))

    def forward(self, x):
        return self.last(self.inner(self.stem(x))[0])


def test_no_step_is_given_up_where_graphs_end_at_other_sizes(monkeypatch):
    model, abandoned = hiremate(EndsRecurrent(), "64 MiB", verbose=False), []
    session = session_of(model)
    abandon = session.abandon_step
    monkeypatch.setattr(session, "abandon_step", lambda: (abandoned.append(rows), abandon()))
    with quiet():
        for rows in (16, 16, 16, 24):
            model(torch.ones(rows, 32)).sum().backward()
            model.zero_grad()

    assert abandoned == [16]  # where the parts were found


@network(
    lambda: {
        "stem": nn.Linear(32, 32),
        "last": nn.Linear(32, 32),
        "inner": nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4))),
        "heard": [],
    }
)
def hooked(self, x):
    """One block of a sequence has a backward hook."""
    return self.last(self.inner(torch.relu(self.stem(x))))


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_module_with_a_backward_hook_leaves_its_kind_planned(register):
    plain = hooked()
    model = copy.deepcopy(plain)
    for each in (plain, model):
        getattr(each.inner[1], register)(lambda _, *gradients, heard=each.heard: heard.append(gradients[-1][0].clone()))
    hiremate(model, "64 MiB", verbose=False)
    trained_alike(plain, model, [torch.ones(16, 32)] * 5)
    operations = Counter(node.op for node in get_plan(model).graph.nodes)
    assert (operations["aten.addmm.default"], operations["aten.gelu.default"]) == (6, 4)
    assert len(plain.heard) == len(model.heard) == 5
    assert all(map(torch.equal, plain.heard, model.heard))


@pytest.mark.parametrize(("make", "name"), [(within, "inner"), (Beside, "Beside"), (InSequence, "inner")])
def test_modules_of_torch_that_uncaptured_code_calls_are_planned(make, name):
    plain, model = make(), make()
    model.load_state_dict(plain.state_dict())
    hiremate(model, "90%", verbose=False, on_infeasible="warn")
    warned = trained_alike(plain, model, [torch.ones(rows, 32) for rows in (16, 16, 16, 24, 24, 24)])
    plan = get_plan(model)
    layers = sum(isinstance(module, nn.Linear) for module in model.modules())
    assert sum(node.op == "aten.addmm.default" for node in plan.graph.nodes) == layers
    (text,) = (text for text in warned if "was not captured" in text)
    assert text.startswith(
        f"{name} was not captured as a whole; from the next step on its parts are planned. What ends"
    )
    remove_hiremate(model)
    assert all(hooks.get_call(module) is None for module in model.modules())


def test_hooks_run_once_and_patched_forwards_are_honoured():
    model = Net()
    seen = []
    model.register_forward_pre_hook(lambda m, args: seen.append("before"))
    model.register_forward_hook(lambda m, args, out: seen.append("after"))
    original = model.forward
    model.forward = lambda x: original(x) * 2
    x = batch()
    expected = model(x)
    hiremate(model, "60%", verbose=False)
    seen.clear()
    assert torch.equal(model(x), expected)
    assert seen == ["before", "after"]
