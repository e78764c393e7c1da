"""A line of `models=[…]`: overrides of train.py that have a meaning without a run, and what its steps start from."""

from dataclasses import dataclass, replace

from benchmarks.steps_rows import START, WITHOUT_EFFECT, key_of
from benchmarks.training_step import random_batch
from linrnn.config import load_config
from linrnn.config.schema import Config, MarkovDataConfig
from linrnn.core.errors import ConfigError
from linrnn.data import Batch, BatchLoader, PreparedData, prepare
from linrnn.training.starting import Weights, find_weights

GROUPS = ("model", "size", "optimizer", "data")
TRAINER = (
    *("batch_size", "seq_len", "precision"),
    *("activation_checkpointing", "compile", "cuda_graph", "float8", "kernel_choices"),
)
# What to do about keys of a run that are something else here.
_REMEDIES = {
    "loss": "name the losses in losses=[…]",
    "seed": "use the benchmark's own seed=…",
    "device": "use the benchmark's own device=…",
    "experiment": "write the keys that the experiment sets",
    "parallel": "benchmarks/parallel.py measures steps of several GPUs",
    "optimizer.lr": "leave it out: the rate is so small that all rounds have about the same weights",
}


def parse_line(text: str, seed: int, device: str) -> Config:
    """The configuration of the run whose steps a line names. Its data have no meaning unless :func:`names_data`.

    `size.vocab_size` may be null where data are named: it is theirs then.

    Raises:
        ConfigError: a key is unknown or has no meaning here, a value is out of bounds, the vocabulary is missing, or
            trained weights would meet random tokens.
    """
    words = text.split()
    for word in words:
        if word not in WITHOUT_EFFECT:
            _check_word(word)
    own = [f"seed={seed}", f"device={device}", "logger.wandb.mode=disabled"]
    run: Config = load_config([*words, *own, *([] if names_data(text) else ["data=markov"])])
    vocabulary = run.size.vocab_size
    if names_data(text):
        return run
    if run.init_from:
        raise ConfigError(
            f"models: {text!r} has trained weights and random tokens, which are no text that the weights know",
            "add the data that they were trained with, as data=text data.path=… data.tokenizer=…",
        )
    if vocabulary is None:
        raise ConfigError(
            f"models: {text!r} has no vocabulary, because size={run.size.name} takes the data's",
            "add size.vocab_size=128256, or another number",
        )
    assert isinstance(run.data, MarkovDataConfig)
    return replace(run, data=replace(run.data, vocab_size=vocabulary))  # the plan compares the two


def names_data(line: str) -> bool:
    """Whether a line's batch comes from data. Otherwise its tokens are random."""
    return any(key_of(word).split(".")[0] == "data" for word in line.split())


def _check_word(word: str) -> None:
    key = key_of(word)
    group, _, rest = key.partition(".")
    known = key == START or (group in GROUPS and key != "optimizer.lr")
    if "=" in word and (known or (group == "trainer" and rest in TRAINER)):
        return
    keys = f"{START}, those of {', '.join(GROUPS)}, and of trainer {', '.join(TRAINER)}"
    remedy = _REMEDIES.get(key, _REMEDIES.get(group, f"leave it out; a line's keys are {keys}"))
    raise ConfigError(f"models: {word!r} has no meaning in a benchmark of single steps", remedy)


@dataclass(frozen=True)
class Start:
    """A line's configuration and what it names.

    Attributes:
        run: `size.vocab_size` is a number.
        data: None: tokens are random.
        weights: None: weights are random.
    """

    run: Config
    data: PreparedData | None = None
    weights: Weights | None = None

    @property
    def vocab_size(self) -> int:
        """V, entries of the model's vocabulary."""
        assert self.run.size.vocab_size is not None
        return self.run.size.vocab_size

    def batch(self, sequences: int) -> Batch:
        """The first training batch of the data, in the order of `run.seed`, or random tokens. On the CPU."""
        trainer = self.run.trainer
        if self.data is None:
            return random_batch(sequences, trainer.seq_len, self.vocab_size, self.run.seed)
        loader = BatchLoader(
            self.data.train,
            seq_len=trainer.seq_len,
            batch_size=sequences,
            seed=self.run.seed,
            reset_at_document=self.run.data.reset_at_document,
        )
        return next(loader)


def find_start(line: str, run: Config) -> Start:
    """What `line` names. Its data are prepared, unless they were before.

    Args:
        run: from :func:`parse_line`.

    Raises:
        DataError: text or weights are missing or damaged.
        ConfigError: the weights were trained with another tokenizer.
    """
    if not names_data(line):
        return Start(run)
    data = prepare(run.data)
    weights = find_weights(run.init_from, data) if run.init_from else None
    return Start(replace(run, size=replace(run.size, vocab_size=run.size.vocab_size or data.vocab_size)), data, weights)
