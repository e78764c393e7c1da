"""Generated text of known entropy: a Markov chain over tokens, cut into documents.

Token 0 ends a document. A document's first token comes from a Zipf distribution. Every further token is 0 with
probability p. Otherwise it is one of the `branching` successors of the previous token: the k-th with probability q_k ∝
1/k. Successors are drawn by Zipf weight too, so token frequencies are skewed as in text. Zipf ranks are shuffled over
the ids, so an id says nothing about its frequency.

The entropy rate is exact. Let h(p) be the entropy of a coin. After any token but 0, the next token has entropy h(p) +
(1 - p) H(q). After 0 it has H(Zipf). A share p / (1 + p) of all tokens is 0, because each 0 follows another token and a
share p of those is followed by 0. Hence, in nats per token,

    H = [H(Zipf) · p + h(p) + (1 - p) H(q)] / (1 + p),

and h(p) + (1 - p) H(q) if documents' first tokens are not predicted (`reset_at_document`).
"""

from collections.abc import Iterator

import numpy as np

from linrnn.config.schema import MarkovDataConfig
from linrnn.core.errors import ConfigError

END = 0
END_PROBABILITY = 1 / 128  # a document has 128 tokens on average, and its end token
_DOCUMENTS_AT_A_TIME = 8192


class MarkovChain:
    """The Markov chain of a configuration. The same `data_seed` gives the same chain and the same text.

    Attributes:
        vocab_size: V.
        successors: (V, branching) int64; row 0 is unused.
        successor_probabilities: (branching,) q, the same for every token.
        start_probabilities: (V,), for a document's first token.
    """

    def __init__(self, config: MarkovDataConfig) -> None:
        self.vocab_size, branching = config.vocab_size, config.branching
        if branching >= self.vocab_size - 1:
            raise ConfigError(
                f"data.branching={branching} successors need more than {self.vocab_size} tokens",
                f"set data.branching below {self.vocab_size - 1} or raise data.vocab_size",
            )
        self._seed = config.data_seed
        # NumPy never changes RandomState's stream, so every NumPy version generates the same text.
        random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([self._seed, 0])))
        self.start_probabilities = np.zeros(self.vocab_size)
        self.start_probabilities[1 + random.permutation(self.vocab_size - 1)] = _zipf(self.vocab_size - 1)
        self._start_cumulative = np.cumsum(self.start_probabilities)
        self.successor_probabilities = _zipf(branching)
        self._successor_cumulative = np.cumsum(self.successor_probabilities)
        self.successors = np.empty((self.vocab_size, branching), np.int64)
        for k in range(branching):
            self.successors[:, k] = self._draw_starts(random, self.vocab_size)
            while len(again := np.flatnonzero((self.successors[:, :k] == self.successors[:, k : k + 1]).any(1))):
                self.successors[again, k] = self._draw_starts(random, len(again))

    def entropy_rate(self, *, reset_at_document: bool) -> float:
        """The lowest mean loss that any model can reach, in nats per predicted token."""
        p = END_PROBABILITY
        coin = _entropy(np.array([p, 1 - p]))
        after_token = coin + (1 - p) * _entropy(self.successor_probabilities)
        if reset_at_document:
            return after_token
        return (p * _entropy(self.start_probabilities[1:]) + after_token) / (1 + p)

    def documents(self, stream: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Endless documents, many at a time: their concatenated tokens, and the end of each document (exclusive).

        Args:
            stream: which of the independent texts (train, validation).
        """
        random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([self._seed, 1, stream])))
        while True:
            # Longest first: the documents still running at position t are always the first ones.
            lengths = 1 + np.sort(random.geometric(END_PROBABILITY, _DOCUMENTS_AT_A_TIME))[::-1]
            place = random.permutation(_DOCUMENTS_AT_A_TIME)  # each document's position in the text
            in_place = np.empty_like(lengths)
            in_place[place] = lengths
            ends = np.cumsum(in_place)
            starts = (ends - in_place)[place]
            tokens = np.zeros(ends[-1], np.int64)
            now = self._draw_starts(random, _DOCUMENTS_AT_A_TIME)
            still_running = np.searchsorted(-lengths, -np.arange(1, lengths[0]), side="left")
            for t, running in enumerate(still_running.tolist()):
                now = now[:running]
                tokens[starts[:running] + t] = now
                choice = np.searchsorted(self._successor_cumulative[:-1], random.random_sample(running), "right")
                now = self.successors[now, choice]
            yield tokens, ends

    def _draw_starts(self, random: np.random.RandomState, n: int) -> np.ndarray:
        drawn = np.searchsorted(self._start_cumulative, random.random_sample(n), side="right")
        return np.minimum(drawn, self.vocab_size - 1)  # the last sum may fall short of 1 by a rounding error


def _zipf(n: int) -> np.ndarray:
    weights = 1 / np.arange(1, n + 1)
    return weights / weights.sum()


def _entropy(probabilities: np.ndarray) -> float:
    return float(-(probabilities * np.log(probabilities)).sum())
