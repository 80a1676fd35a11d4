"""The private torch APIs that the project stands on: each test fails loudly where one has moved."""

from __future__ import annotations

import copy
import logging
import pickle
import re
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torchgen
from torch import fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hiremate_lightning import hiremate, remove_hiremate, torch_private
from hiremate_lightning.command_line.without_device import CountingMeter
from hiremate_lightning.measuring.saved_offload import LEAST_OFFLOAD, SavedOffload
from hiremate_lightning.rewriting.straight_line import compiled
from hiremate_lightning.testing import captured_count, session_of
from hiremate_lightning.torch_private import (
    aot,
    autocasting,
    captured_code,
    dynamo,
    hooks,
    sharding,
    tensor_state,
)
from hiremate_lightning.torch_private.size_symbols import SizeSymbols, sizes_among
from tests.exact import TORCH, network


class Own(torch.Tensor):
    pass


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def test_this_torch_was_checked():
    version = ".".join(map(str, TORCH))
    assert version in torch_private.CHECKED_VERSIONS, (
        f"torch {version} is not among the versions that the private APIs were checked on. "
        "Read hiremate_lightning/torch_private against it, run all tests, and add it there."
    )


def test_the_call_slot_replaces_a_call_and_copies_drop_it():
    module = Doubled()
    hooks.set_call(module, lambda x: "taken")
    assert not hooks.has_backward_hooks(module)
    assert module(1) == "taken"
    assert hooks.get_call(copy.deepcopy(module)) is None
    assert pickle.loads(pickle.dumps(module))(torch.ones(1)).item() == 2
    assert hooks.plain_call(module, torch.ones(1)).item() == 2
    hooks.set_call(module, None)
    assert hooks.CALL_SLOT not in module.__dict__
    assert module(torch.ones(1)).item() == 2


def test_the_backend_hears_of_joint_graph_forward_and_backward():
    heard = []

    def partition(joint, inputs, *, num_fwd_outputs, **rest):
        from functorch.compile import default_partition

        outputs, gradients, *_ = aot.joint_outputs(joint, num_fwd_outputs)
        tangents = [n for n in joint.graph.find_nodes(op="placeholder") if aot.is_tangent(n)]
        heard.append((len(outputs), len(gradients), len(tangents)))
        return default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **rest)

    def compiler(name):
        def compile_graph(module, inputs):
            heard.append(name)
            return compiled(module)

        return compile_graph

    backend = aot.make_backend(partition, compiler("forward"), compiler("backward"), compiler("inference"))
    linear = nn.Linear(3, 2)
    torch.compile(lambda x: linear(x).sin(), backend=backend)(torch.ones(1, 3)).sum().backward()
    assert heard == [(1, 3, 1), "forward", "backward"]


def noting(note, seen):
    """A backend that runs captured code as it is, and notes something of each graph and its inputs."""

    def backend(module, inputs):
        seen.append(note(module, inputs))
        return module.forward

    return backend


def runs_by(backend, function, *inputs):
    """Run a function as torch.compile captures it for a backend; return its result and what became of the inputs."""
    own = [t.clone() if not t.requires_grad else t.detach().clone().requires_grad_() for t in inputs]
    return [torch.compile(function, backend=backend)(*own).detach(), *(t.detach() for t in own)]


def change_two(v, w, a, b):
    a.add_(v)
    b.add_(w)
    return b


def test_a_changed_input_is_returned_in_its_own_place():
    inputs = torch.tensor(3.0, requires_grad=True), torch.tensor(1.0), torch.tensor(10.0), torch.tensor(20.0)
    with aot.returning_the_right_values():
        assert runs_by("aot_eager", change_two, *inputs) == runs_by("eager", change_two, *inputs)
    torch.compiler.reset()
    if TORCH == (2, 13):
        assert runs_by("aot_eager", change_two, *inputs)[3] == 21, "the fault of AOTAutograd, which is mended"


def test_a_number_changed_in_place_is_captured_unread():
    def count(x, number):
        number.add_(x.shape[0])
        return 2 * x

    inputs = torch.ones(3, requires_grad=True), torch.zeros((), dtype=torch.float64)
    with dynamo.capturing_for_plans():
        assert runs_by("aot_eager", count, *inputs)[2] == 3
    torch.compiler.reset()
    if TORCH == (2, 13):
        assert runs_by("aot_eager", count, *inputs)[2] == 0, "the fault of Dynamo, which is mended"


@pytest.mark.skipif(TORCH < (2, 12), reason="torch 2.11 asks for the class of a gradient in the backward alone")
def test_tensors_of_a_subclass_run_as_captured():
    class Named(torch.Tensor):
        pass

    picture = torch.ones(3).as_subclass(Named)
    weight = torch.ones(3, requires_grad=True)
    with aot.not_looking_for_aliases(), aot.taking_gradients_with_metadata():
        result = torch.compile(lambda x, w: x * w, backend="aot_eager")(picture, weight)
    edge = torch.autograd.graph.get_gradient_edge(result.as_subclass(torch.Tensor))
    torch.autograd.backward([edge], [torch.ones(3).as_subclass(Named)])
    assert result.sum() == weight.grad.sum() == 3


def test_versions_count_changes_in_place():
    x = torch.zeros(1)
    before = tensor_state.versions_of([x])
    x.add_(1)
    assert tensor_state.versions_of([x]) == [before[0] + 1]
    with torch.inference_mode():
        assert tensor_state.versions_of([torch.zeros(1), x, None]) == [-1, before[0] + 1, -1]


def test_tensors_are_found_in_containers_in_the_order_of_pytree():
    one, two, three, four = torch.zeros(4, 1)
    pair = torch.return_types.max((three, four))
    tree = [one, {"b": (two, 1, None), "a": OrderedDict(c=pair)}, "text", {one}]
    expected = [leaf for leaf in tensor_state.leaves(tree) if isinstance(leaf, torch.Tensor)]
    found = tensor_state.tensors_among(tree)
    assert len(found) == len(expected) == 4
    assert all(mine is theirs for mine, theirs in zip(found, expected, strict=True))


def test_all_plain_tensors_of_python_are_found():
    tensors = [torch.zeros(2), nn.Parameter(torch.zeros(2))]
    others = [torch.zeros(2).as_subclass(Own), torch.zeros(2).to_sparse()]
    found = {id(tensor) for tensor in tensor_state.plain_tensors_of_python()}
    assert [id(tensor) in found for tensor in (*tensors, *others)] == [True, True, False, False]


def test_a_look_at_tensors_keeps_none_of_them_alive(no_automatic_collection):
    """No garbage is collected meanwhile: what the look held in a cycle would stay."""
    tensor = torch.zeros(2)
    lives = tensor_state.watch_storage(tensor)
    assert any(found is tensor for found in tensor_state.plain_tensors_of_python())
    del tensor
    assert not lives()


def test_a_watched_storage_is_not_kept_alive():
    x = torch.arange(10)
    lives, get = tensor_state.watch_storage(x), tensor_state.refer_weakly(x.untyped_storage())
    assert get().data_ptr() == x.data_ptr()
    view = x[2:]
    del x
    assert lives()
    del view
    assert not lives()
    assert get() is None


def test_only_hooks_that_save_memory_give_way_to_transforms():
    x = torch.randn(LEAST_OFFLOAD, requires_grad=True)
    found = torch.autograd.graph.disable_saved_tensors_hooks

    def loss(y: torch.Tensor) -> torch.Tensor:
        return (torch.func.grad(lambda z: (z * z * z).sum())(y) * y).sum()

    with hooks.giving_way_to_transforms(), SavedOffload(set()):
        offloaded = loss(x)
    assert torch.equal(*(torch.autograd.grad(each, x)[0] for each in (offloaded, loss(x))))
    raises = pytest.raises(RuntimeError, match="saved tensor hooks")
    with hooks.giving_way_to_transforms(), torch.autograd.graph.save_on_cpu(), raises:
        loss(x)
    assert torch.autograd.graph.disable_saved_tensors_hooks is found


def test_an_error_leaves_no_ban_on_hooks():
    ban = torch._C._autograd._saved_tensors_hooks_disable
    with pytest.raises(RuntimeError, match="why"), autocasting.as_found_on_error(), torch.autograd.graph.save_on_cpu():
        ban("why")
    assert torch._C._autograd._saved_tensors_hooks_is_enabled()


def captured_inputs(function, calls):
    """Compile a function as plans do, call it, and give the inputs of each captured graph."""
    seen = []
    note = noting(lambda _, inputs: [i if isinstance(i, torch.Tensor) else type(i) for i in inputs], seen)
    compiled = torch.compile(function, backend=note)
    with dynamo.capturing_for_plans():
        for arguments in calls:
            compiled(*arguments)
    return seen


NUMBERS = {
    "a number": (lambda x, n: x * n, (2, 3, 4)),
    "a number that makes a size": (lambda x, n: x[:n] * 2, (2, 3, 4, 3)),
    "a fraction": (lambda x, t: x * t, (0.1, 0.2, 0.3, 0.1)),
}


@pytest.mark.parametrize(("function", "numbers"), NUMBERS.values(), ids=NUMBERS)
def test_a_number_is_an_input_from_its_second_value_on(function, numbers):
    seen = captured_inputs(function, [(torch.ones(9), number) for number in numbers])
    assert [len(inputs) for inputs in seen] == [1, 2]
    assert (torch.SymInt in seen[1]) == isinstance(numbers[0], int)


def test_sizes_stay_numbers():
    seen = captured_inputs(lambda x: x * 2, [(torch.ones(4),), (torch.ones(5),), (torch.ones(6),)])
    assert [inputs[0].shape for inputs in seen] == [(4,), (5,), (6,)]
    assert not any(tensor_state.is_symbolic(inputs[0]) for inputs in seen)


def test_varying_sizes_are_symbols_unless_dynamo_fails_on_them():
    """A size is a symbol from its third value on: the first two are only seen."""
    seen = []

    def backend(module, inputs):
        if fails and any(isinstance(value, torch.SymInt) for value in inputs):
            raise AssertionError("no symbols")
        seen.append(any(isinstance(value, torch.SymInt) for value in inputs))
        return module

    for fails in (False, True):
        seen.clear()
        compiled = torch.compile(lambda x: x * 2, backend=backend)
        for rows in (4, 5, 6, 7):
            with dynamo.capturing_for_plans(sizes_vary=rows > 4):
                compiled(torch.ones(rows))
        assert seen == ([False, False, False, False] if fails else [False, False, True])
        torch.compiler.reset()


@pytest.mark.skipif(not hasattr(torch.compiler.config, "dynamic_values"), reason="sizes are symbols from the third on")
def test_varying_sizes_are_symbols_in_graphs_after_a_break_too():
    seen = []
    note = noting(lambda _, inputs: [type(value) for value in inputs if not isinstance(value, torch.Tensor)], seen)

    def function(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    with dynamo.capturing_for_plans(sizes_vary=True, vary=[5]):
        torch.compile(function, backend=note)(torch.ones(4, 5))
    assert seen == [[torch.SymInt], [torch.SymInt]]


def test_ranges_that_users_mark_on_tensors_are_read():
    x = torch.ones(4, 5, 6)
    assert dynamo.named_ranges(x) == []
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(x, 2, min=3, max=9)
    assert dynamo.named_ranges(x) == [(2, 3, 9)]


@pytest.mark.parametrize(("size", "layouts"), [(9, [None, ((9, 3), (3, 1))]), (8, None), (99, None)])
def test_layouts_at_other_sizes_pass_the_guards_of_captured_code(size: int, layouts):
    found = []
    note = noting(lambda *graph: SizeSymbols(graph[0], sizes_among(*graph)).layouts_at((size,)), found)

    def function(x):
        return x * 2 if x.shape[0] % 2 and x.shape[0] < 50 else x

    x = torch.ones(5, 3)
    torch._dynamo.mark_dynamic(x, 0)
    torch.compile(function, backend=note)(x)
    assert found == [layouts]


def test_a_log_ends_a_graph_only_if_each_call_may_be_heard(caplog):
    class Logger(logging.Logger):
        def warning_once(self, text):
            self.warning(text)

    log = Logger("a model's")
    log.addHandler(caplog.handler)
    log.setLevel(logging.INFO)

    def forward(x, method):
        x = x + 1
        getattr(log, method)("heard")
        return x + 2

    for method, graphs, heard in (("warning_once", 1, 1), ("debug", 1, 0), ("info", 2, 3)):
        caplog.clear()
        seen = captured_inputs(forward, [(torch.ones(4), method)] * 3)
        assert (method, len(seen), [record.message for record in caplog.records]) == (method, graphs, ["heard"] * heard)


@pytest.mark.parametrize("limit", [3, 5])
def test_nested_and_failed_calls_restore_the_users_settings(limit):
    config, seen = torch._dynamo.config, []
    note = noting(lambda *_: config.recompile_limit, seen)

    def nested():
        with dynamo.capturing_for_plans():
            with dynamo.capturing_for_plans():
                torch.compile(lambda x: x + 1, backend=note)(torch.ones(3))
            torch.compile(lambda x: x + 2, backend=note)(torch.ones(3))
            raise RuntimeError("a call that fails")

    with config.patch(recompile_limit=limit, suppress_errors=limit == 3):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="that fails"):
                nested()
            assert (config.recompile_limit, config.suppress_errors) == (limit, limit == 3)
    assert set(seen) == {256}


def test_what_the_user_called_is_known_of_a_captured_node():
    called = []

    def partition(joint, inputs, *, num_fwd_outputs, **rest):
        from functorch.compile import default_partition

        called.extend(aot.called(n) for n in joint.graph.nodes if n.target is torch.ops.aten.bernoulli.p)
        return default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **rest)

    backend = aot.make_backend(partition, *(lambda module, inputs: compiled(module) for _ in range(3)))
    weight = torch.ones(3, requires_grad=True)
    torch.compile(lambda: weight * torch.bernoulli(torch.ones(3), 0.5), backend=backend)().sum().backward()
    assert called == [torch.bernoulli]


@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support is in beta state")
def test_sparse_tensors_have_parts():
    dense = torch.eye(3)
    assert tensor_state.dense_parts(dense) == (dense,)
    for layout, parts in ((torch.sparse_coo, 2), (torch.sparse_csr, 3), (torch.sparse_csc, 3)):
        assert len(tensor_state.storage_sizes([dense.to_sparse(layout=layout)])) == parts


def test_guards_that_fail_with_symbols_stay_silent_with_numbers(monkeypatch, caplog):
    """As EnCodec's do: `sources must not be empty for symbol s49`."""
    heard = torch._guards.log

    def capture(code):
        if dynamo.builder.tensor_always_has_static_shape is not dynamo._has_static_shape and code is not failing:
            return "captured"
        heard.error("Error while creating guard")
        raise AssertionError

    code, failing = compile("0", "one", "eval"), compile("1", "two", "eval")
    monkeypatch.setattr(dynamo, "_capture", capture)
    assert dynamo._capture_in_turn(True, code) == "captured"
    assert not caplog.records
    with pytest.raises(AssertionError):
        dynamo._capture_in_turn(True, failing)
    assert [record.name for record in caplog.records] == ["torch._guards"]


def test_derivatives_that_copy_their_gradient_are_known():
    """Each is in `kernels._READ_MEMORY`, or traced as what does so itself (convolutions), or not planned (nested)."""
    text = (Path(torchgen.__file__).parent / "packaged" / "autograd" / "derivatives.yaml").read_text(encoding="utf-8")
    entries = re.split(r"^- name: ", text, flags=re.MULTILINE)[1:]
    found = {re.match(r"\w+", entry)[0] for entry in entries if re.search(r"grad\w*(\.\w+\(\))*\.contiguous\(", entry)}

    read_memory = {"_cdist_forward", "as_strided_scatter", "view_as_complex", "view_as_real", "_weight_norm_interface"}
    batch_norms = {"cudnn_batch_norm", "miopen_batch_norm"}
    convolutions, nested = {"_conv_depthwise2d", "conv_depthwise3d"}, {"values"}
    assert found == read_memory | batch_norms | convolutions | nested


NO_FORMAT = pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.12 can't trace str.format")
FORMAT = pytest.param("{:.2f}".format, marks=NO_FORMAT)


@pytest.mark.parametrize("write", [FORMAT, lambda t: f"{t:.2f}", lambda t: "%.2f" % t, str])  # noqa: UP031
@pytest.mark.parametrize("sizes_vary", [False, True])
def test_a_fraction_in_a_string_keeps_its_format(write, sizes_vary):
    def forward(x, t):
        return x * len(write(t))

    values = (1.0, 1.25, 1.375, 2.123456)
    compiled = torch.compile(forward, backend="eager")
    with dynamo.capturing_for_plans(sizes_vary=sizes_vary):
        found = [compiled(torch.ones(1), t) for t in values]
    assert found == [forward(torch.ones(1), t) for t in values]
    assert forward.__code__ not in dynamo._given_up
    torch.compiler.reset()


@pytest.fixture
def mesh(one_process):
    return torch.distributed.device_mesh.init_device_mesh("cpu", (1,))


def test_a_unit_lends_whole_parameters(mesh):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    assert not sharding.has_units(model)
    torch.distributed.fsdp.fully_shard(model[0], mesh=mesh)
    assert sharding.has_units_below(model)
    torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    assert sharding.is_unit(model)
    assert sharding.may_shard()
    assert sharding.whole_parameters(model) == []

    loss = model(torch.ones(1, 2)).sum()
    given = {id(whole): shard for whole, shard in sharding.whole_parameters(model)}
    assert id(model[1].weight) in given  # the root stays whole until the end of the backward
    loss.backward()

    assert {id(shard) for shard in given.values()} == {id(p) for p in model.parameters()}
    assert [whole.untyped_storage().nbytes() for whole, _ in sharding.whole_parameters(model)] == [0] * 4
    assert [tensor.untyped_storage().nbytes() for tensor in sharding.resized_tensors(model)] == [0] * 8
    assert len(sharding.shards(model)) == 4
    assert sharding.buffers_between_units(model) == []


def test_an_imagined_group_only_counts_what_it_would_send():
    meter = CountingMeter(torch.device("cpu"))
    with sharding.imagined_group(4), tensor_state.fake_mode(), meter:
        name, collectives = torch.distributed.group.WORLD.group_name, torch.ops._c10d_functional
        gathered = collectives.all_gather_into_tensor(torch.ones(8), 4, name)
        part = collectives.reduce_scatter_tensor(gathered, "sum", 4, name)
        collectives.all_reduce(part, "sum", name)

    assert meter.sent == {"gathered": 128, "scattered": 128, "reduced": 32}
    assert not sharding.may_shard()


def test_code_is_captured_where_storages_are_watched():
    seen, function = [], lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
    with CountingMeter(torch.device("cpu")):
        torch.compile(function, backend=noting(lambda *_: "captured", seen))(torch.ones(4))
    assert seen == ["captured"]


def test_gradients_that_wait_to_be_reduced_are_found(mesh):
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = torch.distributed.fsdp.fully_shard(nn.Linear(2, 3), mesh=mesh, mp_policy=policy)
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 2)).sum().backward()
    assert sorted(t.nbytes for t in sharding.buffers_between_units(model)) == [12, 24]


def test_a_distributed_tensor_has_the_bytes_of_its_local_part(mesh):
    local = torch.zeros(4)
    spread = torch.distributed.tensor.DTensor.from_local(local, mesh, [torch.distributed.tensor.Shard(0)])
    assert tensor_state.storage_sizes([spread]) == tensor_state.storage_sizes([local])


def test_hooks_on_saved_tensors_are_offloaded_and_back():
    seen: list[str] = []

    def noting(name: str) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(name) or t, lambda t: t)

    x = torch.ones(2, requires_grad=True)
    with noting("outer"), noting("inner"):
        with hooks.no_saved_tensor_hooks():
            x.exp()
        assert seen == []
        x.exp()
    assert seen == ["inner"]
    with noting("outer"):
        with noting("inner"), hooks.no_saved_tensor_hooks():
            pass
        x.exp()
    assert seen == ["inner", "outer"]


def test_captured_code_enters_autocast_by_the_expected_call():
    seen = []
    note = noting(lambda module, _: autocasting.leaving_as_found(module, torch.sin) is not torch.sin, seen)

    @torch.compile(backend=note)
    def half(x):
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x

    half(torch.ones(2, 2))
    torch.compile(torch.sin, backend=note)(torch.ones(2))
    assert seen == [True, False]


def test_views_count_changes_with_their_base_and_chunks_apart():
    """PyTorch tells no more of it than whose count has grown."""
    x = torch.zeros(4, 6)
    views, chunks = x.chunk(2), x.unsafe_chunk(2)
    assert [tensor_state.versioned_at(part) for part in (x, *views, *chunks)] == [0, 0, 0, 0, 12]
    before = tensor_state.versions_of([x, *views, *chunks])
    chunks[1].add_(1)
    views[1].add_(1)
    after = tensor_state.versions_of([x, *views, *chunks])
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1, 1, 0, 1]


@pytest.mark.parametrize("entered", ["_grad_increment_nesting", "_jvp_increment_nesting"])
def test_an_error_ends_the_transforms_entered_before_it(entered):
    """Captured code enters and leaves them by single operations."""
    x = torch.ones(2)

    def fail():
        getattr(torch._C._functorch, entered)()
        level = torch._C._functorch._vmap_increment_nesting(2, "error")
        torch._C._functorch._add_batch_dim(x, 0, level)
        assert tensor_state.is_transforming()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), autocasting.as_found_on_error():
        fail()
    assert not tensor_state.is_transforming()


SETTINGS = {
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "cuDNN": lambda: torch.backends.cudnn.flags(deterministic=True),
}


@pytest.mark.parametrize("block", SETTINGS)
def test_settings_show_what_computes_otherwise(block):
    before = tensor_state.kernel_settings()
    with SETTINGS[block]():
        assert tensor_state.kernel_settings() != before
    assert tensor_state.kernel_settings() == before


def test_settings_show_the_precision_of_products():
    before, found = tensor_state.kernel_settings(), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert tensor_state.kernel_settings() != before
    finally:
        torch.set_float32_matmul_precision(found)


def test_a_block_of_autocast_stays_the_same_while_it_is_open():
    def here():
        return autocasting.block("cpu")

    assert here() is None
    with torch.autocast("cpu", torch.bfloat16):
        first = here()
        with torch.autocast("cpu", torch.bfloat16), torch._C._DisableAutocast():
            assert here() is first
        autocasting.forget_casts("cpu")
        assert here() is first
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            assert here() is not first
    with torch.autocast("cpu", torch.bfloat16):
        assert here() not in (first, None)


@pytest.mark.skipif(not torch.__version__.startswith(("2.13", "2.15")), reason="other releases end a graph there")
def test_names_of_classes_end_no_graph():
    """As peft asks whether a weight is quantized."""

    @network(lambda: {"linear": nn.Linear(8, 8)})
    def asking(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.linear.weight
        if type(weight).__module__.startswith("torchao.") or weight.__class__.__name__ == "Params4bit":
            x = 2 * x
        return x @ weight

    model = hiremate(asking(), "1 MiB", verbose=False)
    model(torch.randn(8, 8)).sum().backward()
    assert captured_count(model) == 1
    assert not session_of(model).why_uncaptured()
    remove_hiremate(model)


def test_a_module_of_a_graph_has_no_text_until_it_is_called():
    graph = fx.Graph()
    graph.output(graph.call_function(torch.neg, (graph.placeholder("value"),)))
    module = captured_code.module_of(torch.nn.Module(), graph)
    assert "_code" not in vars(module)
    assert module(torch.ones(())).item() == -1
    assert "neg" in vars(module)["_code"]
