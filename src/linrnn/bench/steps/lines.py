"""A line of `models`: overrides of train.py, as far as they have a meaning without a run."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from linrnn.bench.steps.rows import Row
from linrnn.config import load_config
from linrnn.config.schema import BenchStepsConfig, Config, MarkovDataConfig
from linrnn.core.errors import ConfigError

GROUPS = ("model", "size", "optimizer", "data")
START = "init_from"  # the weights of another run
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
    "experiment": "write the keys that the experiment sets",
    "parallel": "scripts/bench_parallel.py measures steps of several GPUs",
    "optimizer.lr": "leave it out: the rate is so small that all rounds have about the same weights",
}


def parse_line(text: str, config: BenchStepsConfig) -> Config:
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
    own = [f"seed={config.seed}", f"device={config.device}", "logger.wandb.mode=disabled"]
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
    return any(_key(word).split(".")[0] == "data" for word in line.split())


def title_of(line: str, model: str, size: str, batch: int, seq: int, v: int) -> str:
    """A line as a heading. Of the starting weights it has the last folder's name, of the data nothing."""
    of_label = ("model", "model.config", "model.shared_projection_rank")
    told = (*of_label, "size", "size.vocab_size", "trainer.batch_size", "trainer.seq_len")
    rest = [
        f"{START}={Path(word.split('=', 1)[1]).name}" if _key(word) == START else word
        for word in line.split()
        if _key(word) not in told and _key(word).split(".")[0] != "data" and word not in WITHOUT_EFFECT
    ]
    head = f"{model} {size}, {batch} x {seq:,} tokens, V = {v:,}"
    return ", ".join([head, *(word.removeprefix("trainer.") for word in rest)])


def titles_of(rows: Sequence[Row]) -> dict[str, str]:
    """The lines of these rows as headings. Lines that would share a heading also have the words that tell them apart.

    Such lines differ in their data, say.
    """
    first = {row.line: row for row in reversed(rows)}  # later rows of a line may have batches of their own
    titles = {
        line: title_of(line, row.model, row.size, row.batch, row.seq, row.v) for line, row in reversed(first.items())
    }
    alike: dict[str, list[list[str]]] = {}
    for line, title in titles.items():
        alike.setdefault(title, []).append(line.split())
    return {
        line: ", ".join([title, *(word for word in line.split() if not all(word in words for words in alike[title]))])
        for line, title in titles.items()
    }


def _check_word(word: str) -> None:
    key = _key(word)
    group, _, rest = key.partition(".")
    known = key == START or (group in GROUPS and key != "optimizer.lr")
    if "=" in word and (known or (group == "trainer" and rest in TRAINER)):
        return
    keys = f"{START}, those of {', '.join(GROUPS)}, and of trainer {', '.join(TRAINER)}"
    remedy = _REMEDIES.get(key, _REMEDIES.get(group, f"leave it out; a line's keys are {keys}"))
    raise ConfigError(f"models: {word!r} has no meaning in a benchmark of single steps", remedy)


def _key(word: str) -> str:
    return word.split("=")[0].lstrip("+~")
