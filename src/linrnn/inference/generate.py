"""Generate samples from a trained model, with transformers' `generate` and FLA's recurrent state."""

import dataclasses
import inspect
import io
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from linrnn.config.schema import GenerateConfig
from linrnn.core.errors import ConfigError, DataError, UnsupportedError
from linrnn.core.output import say
from linrnn.inference.load import Trained
from linrnn.models import tuning


def prompts(config: GenerateConfig) -> Iterator[GenerateConfig]:
    """The configuration; with `prompt=-` one for each line at the keyboard, up to an empty one."""
    if config.prompt != "-":
        yield config
        return
    while True:
        if sys.stdin.isatty():
            say("prompt> ", end="")
        if not (line := sys.stdin.readline().rstrip("\n")):
            return
        yield dataclasses.replace(config, prompt=line)


class Stream:
    """Prints samples while they grow, each after its prompt. A character of several tokens waits for its last."""

    def __init__(self, trained: Trained) -> None:
        self._trained, self._shown = trained, ""

    def show(self, prompt: list[int], tokens: list[int]) -> None:
        """Print what is new of a sample."""
        text = self._text(prompt, tokens)
        if not text.endswith("\ufffd"):
            say(text[len(self._shown) :], end="")
            self._shown = text

    def end(self, prompt: list[int], tokens: list[int]) -> None:
        """Print the rest of a sample, and end its line."""
        say(self._text(prompt, tokens)[len(self._shown) :])
        self._shown = ""

    def _text(self, prompt: list[int], tokens: list[int]) -> str:
        return readable(self._trained, tokens if prompt == [self._trained.eos_id] else prompt + tokens)


def samples(
    trained: Trained, config: GenerateConfig, show: Callable[[list[int], list[int]], None] = lambda prompt, tokens: None
) -> Iterator[tuple[list[int], list[int]]]:
    """For each sample, the token ids of the prompt and of its continuation.

    Args:
        show: called with the prompt and the continuation so far, after each token.

    Raises:
        ConfigError: text without a tokenizer, text that is not UTF-8, two prompts, or token ids outside the vocabulary.
        DataError: `prompt_file` cannot be read.
        UnsupportedError: the state is asked for, and this version of transformers does not hand it to FLA's models.
    """
    from transformers import GenerationConfig

    prompt = prompt_of(trained, config)
    if config.use_state:
        _refuse_unknown_state()
    model, eos_id = trained.model, trained.eos_id
    greedy = config.temperature == 0
    choice = {"do_sample": False} if greedy else {"do_sample": True, "temperature": config.temperature}
    if not greedy:
        choice |= {"top_k": config.top_k or 0, "top_p": 1.0 if config.top_p is None else config.top_p}
    settings = GenerationConfig(
        **choice,
        max_new_tokens=config.max_new_tokens,
        use_cache=config.use_state,
        eos_token_id=eos_id,
        pad_token_id=eos_id or 0,
    )
    ids_1T = torch.tensor([prompt], device=next(model.parameters()).device)
    torch.manual_seed(config.seed)
    for number in range(1, config.n_samples + 1):
        counter = _Counter(number, config, partial(show, prompt))
        with torch.no_grad(), tuning.during(counter.text):
            output = model.generate(
                ids_1T, attention_mask=torch.ones_like(ids_1T), generation_config=settings, streamer=counter
            )
        yield prompt, output[0, len(prompt) :].tolist()


def _refuse_unknown_state() -> None:
    """Refuse versions of transformers that hand the state over under a name that FLA's models do not read.

    5.24 renamed `past_key_values` to `cache`. FLA 0.6.0 would then forget all but the last token.
    """
    from transformers import GenerationMixin, __version__

    if "past_key_values" not in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters:
        raise UnsupportedError(
            f"transformers {__version__} does not hand the state to flash-linear-attention's models",
            "pip install 'transformers<5.24', or set use_state=false",
        )


class _Counter:
    """Takes the place of transformers' streamers: shows a sample's tokens, and counts them for the progress lines."""

    def __init__(self, sample: int, config: GenerateConfig, show: Callable[[list[int]], None]) -> None:
        self._sample, self._config, self._show = sample, config, show
        self._tokens: list[int] | None = None  # None before the prompt

    def put(self, ids: torch.Tensor) -> None:
        """The prompt comes first, then each token."""
        if self._tokens is None:
            self._tokens = []
        else:
            self._tokens += ids.tolist()
            self._show(self._tokens)

    def end(self) -> None:
        """Nothing is left to do."""

    def text(self) -> str:
        """`sample 1 of 3, 20 of 64 tokens`."""
        done, config = len(self._tokens or ()), self._config
        return f"sample {self._sample} of {config.n_samples}, {done:,} of {config.max_new_tokens:,} tokens"


def prompt_of(trained: Trained, config: GenerateConfig) -> list[int]:
    """The token ids of the prompt; at least one."""
    vocab_size = trained.model.config.vocab_size
    given = [name for name in ("prompt", "prompt_file", "prompt_tokens") if getattr(config, name) is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are given", "give one of them")
    text = config.prompt if config.prompt_file is None else _read(config.prompt_file)
    if text is None:
        tokens = list(config.prompt_tokens or [])
    elif trained.tokenizer is None:
        raise ConfigError(
            f"{given[0]}: {trained.source} has no tokenizer", "give token ids instead: prompt_tokens=[1,2,3]"
        )
    elif not _is_unicode(text):
        raise ConfigError(f"{given[0]} is not UTF-8 text", "convert it to UTF-8, or give a UTF-8 file: prompt_file=…")
    else:
        tokens = trained.tokenizer.encode(text)
    if not tokens and trained.eos_id is None:
        raise ConfigError("the prompt is empty, and this model has no end-of-document token", "give a prompt")
    if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
        raise ConfigError(f"prompt_tokens: {wrong[0]} is no token of {vocab_size:,}", f"use 0 to {vocab_size - 1}")
    return tokens or [trained.eos_id or 0]


def _is_unicode(text: str) -> bool:
    """Whether UTF-8 can encode `text`. Python keeps a wrong byte of a command line as half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read(path: str) -> str:
    if path == "-" and isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # whatever the terminal's encoding
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"prompt_file={path} cannot be read as text ({error})", "name a UTF-8 file, or -") from error


def readable(trained: Trained, tokens: list[int]) -> str:
    """Text without the end token; token ids if there is no tokenizer."""
    kept = tokens[:-1] if tokens and tokens[-1] == trained.eos_id else tokens
    return trained.tokenizer.decode(kept) if trained.tokenizer else " ".join(map(str, kept))
