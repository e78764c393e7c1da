"""A line of `models`: overrides of train.py, as far as they have a meaning without data and without a run."""

from dataclasses import replace

from linrnn.config import load_config
from linrnn.config.schema import BenchStepsConfig, Config, MarkovDataConfig
from linrnn.core.errors import ConfigError

GROUPS = ("model", "size", "optimizer")
TRAINER = (
    *("batch_size", "seq_len", "precision"),
    *("activation_checkpointing", "compile", "cuda_graph", "float8", "kernel_choices"),
)
WITHOUT_EFFECT = ("parallel=none", "trainer.accumulation_steps=1")
# What to do about keys of a run that are something else here.
_REMEDIES = {
    "loss": "name the losses in losses=[…]",
    "seed": "use the benchmark's own seed=…",
    "device": "use the benchmark's own device=…",
    "data": "leave it out: the tokens are random",
    "experiment": "write the keys that the experiment sets",
    "parallel": "scripts/bench_parallel.py measures steps of several GPUs",
    "optimizer.lr": "leave it out: the rate is so small that all rounds have about the same weights",
}


def parse_line(text: str, config: BenchStepsConfig) -> Config:
    """The configuration of the run whose steps a line names. Its data are never read.

    Raises:
        ConfigError: a key is unknown or has no meaning here, a value is out of bounds, or the vocabulary is missing.
    """
    words = text.split()
    for word in words:
        if word not in WITHOUT_EFFECT:
            _check_word(word)
    own = [f"seed={config.seed}", f"device={config.device}", "logger.wandb.mode=disabled", "data=markov"]
    run: Config = load_config([*words, *own])
    vocabulary = run.size.vocab_size
    if vocabulary is None:
        raise ConfigError(
            f"models: {text!r} has no vocabulary, because size={run.size.name} takes the data's",
            "add size.vocab_size=128256, or another number",
        )
    assert isinstance(run.data, MarkovDataConfig)
    return replace(run, data=replace(run.data, vocab_size=vocabulary))  # the plan compares the two


def title_of(line: str, model: str, size: str, batch: int, seq: int, v: int) -> str:
    """A line as a heading."""
    of_label = ("model", "model.config", "model.shared_projection_rank")
    told = (*of_label, "size", "size.vocab_size", "trainer.batch_size", "trainer.seq_len")
    rest = [word for word in line.split() if word.split("=")[0] not in told and word not in WITHOUT_EFFECT]
    head = f"{model} {size}, {batch} x {seq:,} tokens, V = {v:,}"
    return ", ".join([head, *(word.removeprefix("trainer.") for word in rest)])


def _check_word(word: str) -> None:
    key = word.split("=")[0].lstrip("+~")
    group, _, rest = key.partition(".")
    known = group in GROUPS and key != "optimizer.lr"
    if "=" in word and (known or (group == "trainer" and rest in TRAINER)):
        return
    keys = f"{', '.join(GROUPS)}, and of trainer {', '.join(TRAINER)}"
    remedy = _REMEDIES.get(key, _REMEDIES.get(group, f"leave it out; a line's keys are those of {keys}"))
    raise ConfigError(f"models: {word!r} has no meaning in a benchmark of single steps", remedy)
