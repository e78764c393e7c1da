"""What torch.compile makes of a model: its graphs, and where it breaks them."""

from collections import Counter
from typing import Any


class GraphCounter:
    """Counts graphs and graph breaks of this process from its construction on.

    A graph break splits a function: torch.compile leaves an operation out that it cannot trace, and starts another
    graph behind it. FLA's Triton kernels are such operations.

    A function that would need more graphs than torch allows (`torch._dynamo.config.recompile_limit`) runs uncompiled
    where none of its graphs fits.
    """

    def __init__(self) -> None:
        from torch._dynamo.utils import counters  # imports torch's compiler, a second: only here

        self._counters = counters
        self._before = self._now()

    def report(self) -> dict[str, Any]:
        """`graphs` made, `graph_breaks`, the number of breaks by `reasons`, most frequent first, and how many functions
        reached the limit of recompilations (`over_limit`)."""
        (graphs, breaks, over), before = self._now(), self._before
        reasons: Counter[str] = Counter()
        for reason, count in (breaks - before[1]).items():
            reasons[reason.strip().splitlines()[0]] += count
        return {
            "graphs": graphs - before[0],
            "graph_breaks": reasons.total(),
            "reasons": dict(reasons.most_common()),
            "over_limit": over - before[2],
        }

    def _now(self) -> tuple[int, Counter[str], int]:
        refused = self._counters["unimplemented"].items()
        over = sum(count for reason, count in refused if "recompile limit" in reason.splitlines()[0])
        return self._counters["stats"]["unique_graphs"], Counter(self._counters["graph_break"]), over


def in_words(report: dict[str, Any]) -> str:
    """A line for the console."""
    line = f"torch.compile: {report['graphs']} graphs, {report['graph_breaks']} graph breaks"
    if report["reasons"]:
        line += f" ({'; '.join(f'{count} x {reason}' for reason, count in report['reasons'].items())})"
    if report["over_limit"]:
        line += f"; functions over torch's limit of graphs, partly uncompiled: {report['over_limit']}"
    return line
