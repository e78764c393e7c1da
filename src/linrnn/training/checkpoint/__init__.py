"""Checkpoints without pickle: safetensors for tensors, JSON for the rest, with checksums, written aside and renamed.

`checkpoints/step_00000200/` holds

    tensors/*.safetensors  parameters under the Hugging Face names of FLA's model; the optimizer's state as
                           `<parameter>/exp_avg` …; each rank's part in torch.distributed.checkpoint's Hugging Face
                           format (names, offsets and values, no pickled .metadata)
    rng.safetensors        states of torch's generators
    state.json             run, step, tokens, data position, schedule, tokenizer's fingerprint, latest losses, Python's
                           and numpy's generators, sha256 of all files above
    config.yaml            the run's configuration, so that a checkpoint explains itself

`Saver` writes checkpoints in the background. Any number of ranks can read them, with any sharding.
"""

from linrnn.training.checkpoint.disk_space import check_room
from linrnn.training.checkpoint.files import (
    STATE,
    TENSORS,
    found,
    newest,
    read_state,
    remove_partial,
    required,
    resolve,
)
from linrnn.training.checkpoint.loading import Progress, load, load_model, load_optimizer, read_progress
from linrnn.training.checkpoint.saving import Saver
from linrnn.training.checkpoint.tensors import foreseen_bytes, shapes

__all__ = [
    "STATE",
    "TENSORS",
    "Progress",
    "Saver",
    "check_room",
    "foreseen_bytes",
    "found",
    "load",
    "load_model",
    "load_optimizer",
    "newest",
    "read_progress",
    "read_state",
    "remove_partial",
    "required",
    "resolve",
    "shapes",
]
