"""`trainer.float8=blocks`: the blocks' linear layers multiply in float8, by torchao. Embedding, head and loss do not.

Each tensor has one scale, found anew in every step (torchao's recipe `tensorwise`, arXiv:2209.05433): inputs and
weights are rounded to e4m3, gradients of results to e5m2. Parameters and the optimizer keep their precision. On a CPU
torchao emulates the rounding.
"""

import logging

import torch
from torch import nn

from linrnn.config.schema import Config, FlaModelConfig
from linrnn.core.errors import ConfigError, UnsupportedError
from linrnn.core.requirements import require_package
from linrnn.models.language_model import LanguageModel

TORCHAO = "torchao>=0.17"
CAPABILITY = (8, 9)  # the first GPUs with float8 products: Ada, then Hopper
MULTIPLE = 16  # torch._scaled_mm takes matrices of such sizes only
SMALLEST = 128  # inputs and outputs of a layer that is converted: a choice, not measured
# torchao's own extensions, which linrnn does not call, each print a line where they do not load.
logging.getLogger("torchao").addFilter(lambda record: not record.getMessage().startswith("Failed to load"))
# torch ≥ 2.13 asks torchao to register its constants in another way.
logging.getLogger("torch.utils._pytree").addFilter(lambda record: "register_constant()" not in record.getMessage())


def check_float8(config: Config, device: torch.device, precision: str, tokens: int) -> None:
    """Reject what cannot train with `trainer.float8=blocks`.

    Args:
        precision: `trainer.precision` without `auto`.
        tokens: of one micro-step on one rank.

    Raises:
        ConfigError: the model, the precision or the number of tokens does not fit.
        UnsupportedError: the GPU has no float8 products, or torchao is missing.
    """
    what = f"trainer.float8={config.trainer.float8}"
    if isinstance(config.model, FlaModelConfig):
        cause = f"{what}: a model=fla may read the weights of its linear layers without calling them"
        raise ConfigError(cause, "use one of the matched models, or trainer.float8=none")
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) < CAPABILITY:
            cause = f"{what} needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or more, such as an H100"
            raise UnsupportedError(cause, "use trainer.float8=none")
        if precision == "fp32":
            cause = f"{what} rounds bf16 products, and trainer.precision is fp32"
            raise ConfigError(cause, "use trainer.precision=auto")
    if tokens % MULTIPLE:
        raise ConfigError(
            f"{what}: {tokens} tokens of a micro-step are no multiple of {MULTIPLE}, which float8 products need",
            "change trainer.batch_size or trainer.seq_len",
        )
    require_package("torchao.float8", "torchao", what, TORCHAO)


def use_float8(model: LanguageModel, device: torch.device) -> str:
    """Convert the linear layers of the model's mixers and MLPs in place. Names of parameters stay.

    FLA's fused SwiGLU reads the weight of its linear layer directly. It is replaced by SwiGLU and that layer.

    Returns:
        A line that says how many layers were converted.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=device.type == "cpu")
    parts = [*model.mixers, *model.mlps]
    for part in parts:
        convert_to_float8_training(part, config=config, module_filter_fn=_converts)
    for mlp in model.mlps:
        mlp.fuse_swiglu = False  # type: ignore[assignment]
    layers = [module for part in parts for module in part.modules() if isinstance(module, nn.Linear)]
    converted = sum(type(layer) is not nn.Linear for layer in layers)
    emulated = ", emulated on the CPU" if config.emulate else ""
    return (
        f"float8: {converted} of the blocks' {len(layers)} linear layers multiply in float8{emulated}; the others are "
        f"below {SMALLEST} inputs or outputs, or no multiple of {MULTIPLE}"
    )


def _converts(layer: nn.Module, name: str) -> bool:
    """Whether a layer becomes a float8 layer (the form of torchao's filters)."""
    if type(layer) is not nn.Linear:
        return False
    sizes = layer.in_features, layer.out_features
    return min(sizes) >= SMALLEST and not any(size % MULTIPLE for size in sizes)
