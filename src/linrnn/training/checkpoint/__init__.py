"""Checkpoints without pickle, written aside and renamed. `format` says what they hold."""

from linrnn.training.checkpoint.format import (
    STATE,
    TENSORS,
    Progress,
    found,
    newest,
    read_progress,
    read_state,
    required,
    resolve,
    shapes,
)
from linrnn.training.checkpoint.read import load, load_model, load_optimizer
from linrnn.training.checkpoint.write import Checkpointer, check_room, foreseen_bytes

__all__ = [
    "STATE",
    "TENSORS",
    "Checkpointer",
    "Progress",
    "check_room",
    "foreseen_bytes",
    "found",
    "load",
    "load_model",
    "load_optimizer",
    "newest",
    "read_progress",
    "read_state",
    "required",
    "resolve",
    "shapes",
]
