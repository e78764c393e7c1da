"""What torch.compile sees of the operators: shapes of tensors without values, and what a graph writes to.

Kernels are neither compiled nor run here.
"""

import os
from contextlib import nullcontext

import pytest
import torch
from cases import BF16, Case, draw
from cce_kernels import PRESETS, linear_cross_entropy
from cce_kernels.arguments import checked
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from cce_kernels import backends
from cce_kernels.backends import with_triton
from cce_kernels.planner import Plan
from cce_kernels.saved import GradientSums
from compiling import pretend

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the same without kernels")
ROWS, VOCAB = 64, 391


@pytest.fixture
def backward_graph(monkeypatch):
    """A function from options to the graph of the backward pass through a compiled loss with stored exponentials."""
    pretend(monkeypatch, 90)
    monkeypatch.setattr(backends, "_backend_on", lambda device: with_triton)
    monkeypatch.setattr(with_triton, "plan", lambda *_: Plan(ROWS, 0))

    def of(**options) -> torch.fx.Graph:
        graphs = []

        def keep(module, inputs):
            graphs.append(module.graph)
            return make_boxed_func(module.forward)

        e, c, targets, _ = draw(Case("compiled", shape=(150,), dim=64, vocab=VOCAB, dtype=BF16), "cpu")
        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=lambda module, inputs: make_boxed_func(module.forward), bw_compiler=keep)

        def program(e, c):
            return linear_cross_entropy(2 * e, c, targets, **options)

        torch.compile(program, backend=backend, fullgraph=True)(e, c).backward()
        [graph] = graphs
        return graph

    return of


def written(graph: torch.fx.Graph) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes that the compiler copies because the operator may write to them."""
    [node] = [node for node in graph.nodes if "auto_functionalized" in str(node.target)]
    assert node.args[0] is torch.ops.cce_kernels.cross_entropy_backward.default
    bases = [base.meta["val"] for base in node.kwargs["_all_bases"]]
    return [(tuple(base.shape), base.dtype) for base in bases]


def test_exponentials_keys_and_factors_are_read_only(backward_graph):
    graph = backward_graph()
    found = written(graph)
    assert len(found) == len(GradientSums._fields)
    assert all(shape[0] != ROWS for shape, _ in found), "stored exponentials, or hidden states times factors"
    assert {dtype for _, dtype in found} <= {torch.bfloat16, torch.float32, torch.int8}, "keys are integers"
    assert sum(shape == (VOCAB, 64) for shape, _ in found) == 2  # dC and what its rounding lost
    assert not [node for node in graph.nodes if "copy_" in str(node.target) or "clone" in str(node.target)]


def test_a_buffer_of_the_callers_is_the_only_other_thing_written_to(backward_graph):
    plain = written(backward_graph())
    with_buffer = written(backward_graph(main_grad_c=torch.zeros(VOCAB, 64)))
    assert sorted(map(str, with_buffer)) == sorted(map(str, [*plain, ((VOCAB, 64), torch.float32)]))


OPTIONS = {  # the shape in place of a tensor
    "plain": {},
    "rows": {"reduction": "none", "shift": 1, "return_lse": True},
    "statistics": {"preset": "cce_filter", "return_stats": True, "return_metrics": True},
    "filtered": PRESETS["cce_filter"] | {"filter_if_faster": False, "return_stats": True},
    "main_grad": {"main_grad_c": (1000, 64)},
    "weights": {"token_weights": (6, 40)},
    "several": {"target_weights": (6, 40, 3), "reduction": "none", "shift": 1},
}


@pytest.mark.parametrize("kind", ["fake", "meta"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_shapes_of_losses_and_gradients(options, kind):
    mode, device = (FakeTensorMode(), "cpu") if kind == "fake" else (nullcontext(), "meta")
    with mode:
        e = torch.empty(6, 40, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        c = torch.empty(1000, 64, device=device, requires_grad=True)
        targets = torch.empty(options.get("target_weights", (6, 40)), device=device, dtype=torch.int64)
        options = {k: torch.empty(x, device=device) if isinstance(x, tuple) else x for k, x in options.items()}
        found = linear_cross_entropy(e, c, targets, **options)
        loss, *extras = found if isinstance(found, tuple) else (found,)
        loss.sum().backward()
    assert loss.shape == ((6, 39) if options.get("reduction") == "none" else ())
    assert (loss.dtype, loss.device.type) == (torch.float32, device)
    assert (e.grad.shape, e.grad.dtype) == (e.shape, e.dtype)
    if "main_grad_c" not in options:
        assert (c.grad.shape, c.grad.dtype) == (c.shape, c.dtype)
    if "return_lse" in options:
        assert extras[0].shape == (6, 39)
    if "return_stats" in options:
        assert {x.shape for of in extras for x in of.values()} == {()}


@pytest.mark.parametrize(("rows", "filtered"), [(8192, True), (1024, False)])
def test_a_gpu_that_is_not_here_filters_where_that_is_faster(rows, filtered):
    """The fake kernel's state: lists, or the exponentials of the exact loss."""
    states = []
    for preset in ("cce_filter", "cce_kahan"):
        with FakeTensorMode():
            e, c = (torch.empty(n, 2304, device="cuda", dtype=torch.bfloat16) for n in (rows, 128256))
            targets = torch.empty(rows, device="cuda", dtype=torch.int64)
            inputs, call, _ = checked(e, c, targets, None, None, None, {}, preset=preset)
            call = call._replace(needs=(True, True, False))
            *_, state = torch.ops.cce_kernels.cross_entropy(*inputs, call.handle())
        states.append([(x.shape, x.dtype) for x in state])
    assert (states[0] != states[1]) == filtered
