"""In place of CUDA graphs on a CPU: a capture computes, and a replay computes again into the same tensors."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from linrnn.data import Batch
from linrnn.training import plan as training_plan
from linrnn.training.execution.cuda_graph import GraphedPasses


class Graphs:
    """Counts captures and replays. A CPU is no longer refused.

    Attributes:
        captures: how often passes were captured.
        replays: how often a graph was replayed, the replay after each capture among them.
        most_alive: graphs that existed at once. On a GPU each keeps the memory of its activations and gradients.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.captures = self.replays = self.most_alive = 0
        self._alive = weakref.WeakSet[GraphedPasses]()
        self._fresh = False
        patch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        patch.setattr(torch.cuda, "graph", self._capture)
        patch.setattr(training_plan, "check_cuda_graph", lambda *_: None)
        call = GraphedPasses.__call__

        def remember(graphed: GraphedPasses, batch: Batch) -> Any:
            self._called = weakref.ref(graphed)
            self._alive.add(graphed)
            return call(graphed, batch)

        patch.setattr(GraphedPasses, "__call__", remember)

    @contextlib.contextmanager
    def _capture(self, graph: object, **_: object) -> Iterator[None]:
        self.captures += 1
        self.most_alive = max(self.most_alive, len(self._alive))
        self._fresh = True
        yield

    def replay(self) -> None:
        self.replays += 1
        if self._fresh:  # the capture has computed already
            self._fresh = False
            return
        graphed: Any = self._called()
        for parameter in graphed._parameters:
            assert parameter.grad is None, "the optimizer's step forgets gradients"
        nats, stats = graphed._passes(Batch(graphed._ids, graphed._labels, None, graphed._ids.numel()))
        graphed._results[0].copy_(nats)
        for name, value in stats.items():
            graphed._results[1][name].copy_(value)
        for parameter, gradient in zip(graphed._parameters, graphed._gradients, strict=True):
            if gradient is not None:
                gradient.copy_(parameter.grad)
