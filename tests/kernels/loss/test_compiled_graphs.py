"""The graphs that torch.compile makes of the operators write only to what the operators write to.

Kernels are neither compiled nor run here; the graphs only have shapes.
"""

import os
import subprocess
import sys

import pytest
import torch
from cases import BF16, Case, draw
from cce_kernels import linear_cross_entropy
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

pytest.importorskip("triton")

from cce_kernels import backends, operators
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


def test_each_backend_of_a_cpu_has_operators_of_its_own():
    """torch.compile keeps graphs on disk by the operators' names. A graph holds the plan of one backend."""
    code = "from cce_kernels import operators; print(operators._forward_op._qualname)"
    interpreted = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert interpreted.stdout.strip() == "cce_kernels_interpreted::cross_entropy"
    assert operators._forward_op._qualname == "cce_kernels::cross_entropy"
