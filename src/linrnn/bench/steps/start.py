"""Where the steps of a line start: the weights of a run and a batch of text, or random weights and random tokens."""

from dataclasses import dataclass, replace

from linrnn.bench.steps.lines import names_data
from linrnn.bench.training_step import random_batch
from linrnn.config.schema import Config
from linrnn.data import Batch, BatchLoader, PreparedData, prepare
from linrnn.training.starting import Weights, find_weights


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
        run: from :func:`linrnn.bench.steps.lines.parse_line`.

    Raises:
        DataError: text or weights are missing or damaged.
        ConfigError: the weights were trained with another tokenizer.
    """
    if not names_data(line):
        return Start(run)
    data = prepare(run.data)
    weights = find_weights(run.init_from, data) if run.init_from else None
    return Start(replace(run, size=replace(run.size, vocab_size=run.size.vocab_size or data.vocab_size)), data, weights)
