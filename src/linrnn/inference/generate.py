"""Generate samples from a trained model, with transformers' `generate` and FLA's recurrent state."""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import torch
from transformers import GenerationConfig, TextStreamer

from linrnn.config.schema import GenerateConfig
from linrnn.core.errors import ConfigError
from linrnn.core.output import say
from linrnn.inference.load import Trained
from linrnn.models import tuning


def prompts(config: GenerateConfig) -> Iterator[GenerateConfig]:
    """The configuration; with `prompt=-` one for each line at the keyboard, up to an empty one."""
    if config.prompt != "-":
        yield config
        return
    with contextlib.suppress(EOFError):
        while line := input("prompt> " if sys.stdin.isatty() else ""):
            yield dataclasses.replace(config, prompt=line)


class Printer(TextStreamer):
    """Prints samples word by word while they grow."""

    def __init__(self, trained: Trained) -> None:
        super().__init__(trained)  # type: ignore[arg-type]  # of a tokenizer it needs `decode` alone

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print through :func:`say`, which a closed pipe does not stop."""
        say(text, end="\n" if stream_end else "")


def samples(
    trained: Trained, config: GenerateConfig, streamer: TextStreamer | None = None
) -> Iterator[tuple[list[int], list[int]]]:
    """For each sample, the token ids of the prompt and of its continuation.

    Args:
        streamer: gets the prompt and each token (:class:`Printer`).

    Raises:
        ConfigError: text without a tokenizer, text that is not UTF-8, two prompts, or token ids outside the vocabulary.
        DataError: the tokenizer cannot encode the prompt.
    """
    prompt = prompt_of(trained, config)
    model, eos_id = trained.model, trained.eos_id
    choice: dict[str, Any] = {"do_sample": config.temperature > 0}
    if config.temperature > 0:
        choice |= {"temperature": config.temperature, "top_k": config.top_k or 0}
        choice |= {"top_p": 1.0 if config.top_p is None else config.top_p}
    settings = GenerationConfig(
        **choice,
        max_new_tokens=config.max_new_tokens,
        use_cache=True,
        eos_token_id=eos_id,
        pad_token_id=eos_id or 0,
    )
    ids_1T = torch.tensor([prompt], device=next(model.parameters()).device)
    given = {"attention_mask": torch.ones_like(ids_1T), "generation_config": settings, "streamer": streamer}
    torch.manual_seed(config.seed)
    for number in range(1, config.n_samples + 1):
        with torch.no_grad(), tuning.during(f"sample {number} of {config.n_samples}"):
            output = model.generate(ids_1T, **given)
        yield prompt, output[0, len(prompt) :].tolist()


def prompt_of(trained: Trained, config: GenerateConfig) -> list[int]:
    """The token ids of the prompt; at least one."""
    vocab_size = trained.model.config.vocab_size
    if config.prompt is not None and config.prompt_tokens is not None:
        raise ConfigError("prompt and prompt_tokens are given", "give one of them")
    if config.prompt is None:
        tokens = list(config.prompt_tokens or [])
    elif trained.tokenizer is None:
        remedy = "give token ids instead: prompt_tokens=[1,2,3]"
        raise ConfigError(f"prompt: {trained.source} has no tokenizer", remedy)
    else:
        try:
            config.prompt.encode()  # Python keeps a wrong byte of a command line as half of a surrogate pair
        except UnicodeEncodeError as error:
            raise ConfigError("prompt is not UTF-8 text", "convert it to UTF-8") from error
        tokens = trained.tokenizer.encode(config.prompt)
    if not tokens and trained.eos_id is None:
        raise ConfigError("the prompt is empty, and this model has no end-of-document token", "give a prompt")
    if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
        raise ConfigError(f"prompt_tokens: {wrong[0]} is no token of {vocab_size:,}", f"use 0 to {vocab_size - 1}")
    return tokens or [trained.eos_id or 0]
