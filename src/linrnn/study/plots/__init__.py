"""Plots of runs. Each has one message and axes with units. A loss has the same colour in all of them."""

from linrnn.core.plot_style import save
from linrnn.study.plots.changes import changed_losses
from linrnn.study.plots.filter_speed import filter_speed_up
from linrnn.study.plots.fine_tuning import distances_from_compiled
from linrnn.study.plots.forest import (
    Row,
    batch_rows,
    difference_rows,
    forest,
    loss_rows,
    peak_rows,
    speed_rows,
    study_rows,
)
from linrnn.study.plots.learning import distances, dropped_mass, loss_curves
from linrnn.study.plots.memory import largest_batches, memory_parts
from linrnn.study.plots.overview import overview
from linrnn.study.plots.scaling import (
    AXES,
    batch_scaling,
    chunk_sizes,
    length_scaling,
    loss_share,
    loss_time,
    pareto,
    vocabulary_crossover,
)
from linrnn.study.plots.select import (
    DEVICE_TIME,
    NO_SPEED,
    baseline_of,
    clock_of,
    crossover_lines,
    speeds_rank,
    varies,
)
from linrnn.study.plots.step_parts import step_parts

__all__ = [
    "AXES",
    "DEVICE_TIME",
    "NO_SPEED",
    "Row",
    "baseline_of",
    "batch_rows",
    "batch_scaling",
    "changed_losses",
    "chunk_sizes",
    "clock_of",
    "crossover_lines",
    "difference_rows",
    "distances",
    "distances_from_compiled",
    "dropped_mass",
    "filter_speed_up",
    "forest",
    "largest_batches",
    "length_scaling",
    "loss_curves",
    "loss_rows",
    "loss_share",
    "loss_time",
    "memory_parts",
    "overview",
    "pareto",
    "peak_rows",
    "save",
    "speed_rows",
    "speeds_rank",
    "step_parts",
    "study_rows",
    "varies",
    "vocabulary_crossover",
]
