"""Importing this module does what commands of the repository do at their start: see forked.py."""

import gc
from importlib import import_module

import torch
from forked import freeze
from tqdm import tqdm

from linrnn.config import load_config
from linrnn.models.architecture import MODELS
from linrnn.models.fla_import import import_fla

LIBRARIES = ["torch._dynamo", "torch._inductor.lowering", "torch.distributed.fsdp", "hydra", "pytest", "transformers"]
LIBRARIES += ["torch.distributed.checkpoint.state_dict", "matplotlib.pyplot", "wandb"]
OURS = ["cce_kernels", "linrnn.training.trainer", "linrnn.inference.generate", "linrnn.inference.export"]
OURS += ["linrnn.commands", "benchmarks.loss", "benchmarks.parallel"]
OURS += ["linrnn.experiments.sweep", "linrnn.experiments.dry_run", "linrnn.report.write"]

gc.disable()
for module in (*LIBRARIES, *OURS):
    import_module(module)
for fla in ("layers.delta_net", *(f"models.{model}" for model in MODELS)):
    import_fla(f"fla.{fla}")
for parallel in ("none", "ddp", "fsdp", "vocab"):
    load_config([f"parallel={parallel}"])
tqdm.monitor_interval = 0  # the compiler's progress bar must not start a thread here
# The first use of the compiler takes a second. No gradients: with a CUDA build of torch, also without a GPU, tracing a
# backward pass starts threads. No process forked from this one could then run a backward pass.
torch.compile(torch.sin, backend="aot_eager")(torch.ones(2))
freeze()  # a collection in a fork would also copy its pages
gc.enable()
