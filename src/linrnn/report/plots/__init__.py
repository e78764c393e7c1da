"""Plots of runs. Each has one message and axes with units. A loss has the same colour in all of them."""

from linrnn.report.plots.learning import dropped_mass, loss_curves
from linrnn.report.plots.memory import memory_parts
from linrnn.report.plots.scaling import AXES, SHARED_BY, loss_share, loss_time, pareto, scaling
from linrnn.report.plots.select import DEVICE_TIME, NO_SPEED, clock_of, measured, varies
from linrnn.report.plots.summary import overview

__all__ = [
    "AXES",
    "DEVICE_TIME",
    "NO_SPEED",
    "SHARED_BY",
    "clock_of",
    "dropped_mass",
    "loss_curves",
    "loss_share",
    "loss_time",
    "measured",
    "memory_parts",
    "overview",
    "pareto",
    "scaling",
    "varies",
]
