"""Generated text: a perfect predictor reaches its entropy floor, and the text's statistics show the same floor."""

import numpy as np
import pytest
from data_helpers import markov_config

from linrnn.core.errors import ConfigError
from linrnn.data import BatchLoader, prepare
from linrnn.data.markov import END, END_PROBABILITY, MarkovChain


def transitions(tokens: np.ndarray, ends: np.ndarray, *, reset: bool) -> tuple[np.ndarray, np.ndarray]:
    previous, following = tokens[:-1], tokens[1:]
    if reset:
        inside = ~np.isin(np.arange(1, len(tokens)), ends)
        return previous[inside], following[inside]
    return previous, following


def log_probabilities(chain: MarkovChain, previous: np.ndarray, following: np.ndarray) -> np.ndarray:
    """ln P(following | previous), elementwise: the prediction of a perfect model."""
    matches = chain.successors[previous] == following[:, None]
    inside = (1 - END_PROBABILITY) * (matches @ chain.successor_probabilities)
    inside = np.where(following == END, END_PROBABILITY, inside)
    with np.errstate(divide="ignore"):
        return np.log(np.where(previous == END, chain.start_probabilities[following], inside))


@pytest.mark.parametrize("reset", [False, True])
def test_a_perfect_predictor_reaches_the_floor(tmp_path, reset):
    config = markov_config(tmp_path, n_tokens=1_000_000, reset_at_document=reset)
    data = prepare(config)
    tokens = data.train.read(0, data.train.n_tokens)
    losses = -log_probabilities(MarkovChain(config), *transitions(tokens, data.train.document_ends, reset=reset))
    standard_error = losses.std() / np.sqrt(len(losses))
    assert abs(losses.mean() - data.entropy_floor_nats) < 4 * standard_error
    assert standard_error < 0.002


def test_probabilities_of_the_chain_sum_to_one(tmp_path):
    chain = MarkovChain(markov_config(tmp_path, vocab_size=20, branching=7))
    every = np.arange(20)
    for token in every:
        assert np.exp(log_probabilities(chain, np.full(20, token), every)).sum() == pytest.approx(1)
    assert all(len(set(row)) == 7 for row in chain.successors.tolist())
    assert END not in chain.successors
    other = MarkovChain(markov_config(tmp_path, vocab_size=20, branching=7, data_seed=1))
    assert (other.successors != chain.successors).any()


def test_the_text_never_changes_between_versions(tmp_path):
    """Recorded figures: results on generated text stay comparable."""
    tokens = prepare(markov_config(tmp_path)).train.read(0, 12)
    assert tokens.tolist() == [8, 43, 40, 62, 58, 40, 14, 43, 15, 61, 44, 44]


def test_training_and_validation_are_different_text_of_the_same_chain(tmp_path):
    data, chain = prepare(markov_config(tmp_path)), MarkovChain(markov_config(tmp_path))
    train, valid = data.train.read(0, 20_000), data.valid.read(0, 20_000)
    assert (train != valid).mean() > 0.5
    for tokens in (train, valid):
        assert np.isfinite(log_probabilities(chain, tokens[:-1], tokens[1:])).all()  # every step is possible


def test_a_large_vocabulary_is_made_in_seconds_and_stored_in_four_bytes(tmp_path):
    data = prepare(markov_config(tmp_path, vocab_size=65_537, branching=8, n_tokens=20_000, n_valid_tokens=2_000))
    assert data.train.dtype.itemsize == 4
    assert next(BatchLoader(data.train, seq_len=64, batch_size=4, seed=0)).input_ids.max() < 65_537


@pytest.mark.parametrize("branching", [63, 64, 1000])
def test_more_successors_than_tokens_are_refused(tmp_path, branching):
    with pytest.raises(ConfigError, match="branching"):
        prepare(markov_config(tmp_path, branching=branching))
