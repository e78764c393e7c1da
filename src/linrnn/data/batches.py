"""Cut a long text of tokens into sequences, and put these into batches. Labels are shifted here and nowhere else.

Sequence k holds tokens [kT, kT + T]. Its inputs are the first T tokens, its labels the last T. So an epoch predicts
every token once, except the very first (and, in training, a tail shorter than T).

An epoch visits every sequence once, in an order that depends only on the seed and the epoch's number. All epochs form
one endless list of rows, a sequence each. With B rows on each of W ranks, step i takes rows [i·W·B, (i + 1)·W·B). Of
these, rank r takes those at r, r + W, r + 2W and so on. A run is therefore continued from one number, on any number of
ranks.

In a mixture each row belongs to a source, which only the row's number and the shares decide: the source whose rows lag
its share most. Each source has its own epochs, so a small one begins again while a large one goes on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from itertools import chain, groupby
from math import lcm
from typing import Any

import numpy as np
import torch

from linrnn.core.errors import DataError
from linrnn.data.shards import ShardSet
from linrnn.data.tokenizer import Tokenizer

IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """The inputs and labels of a step.

    Attributes:
        input_ids: (B, T) int64, or (1, B·T) when state is reset at document ends.
        labels: same shape, int64: the next token, or -100 where nothing is predicted.
        cu_seqlens: int32 (sequences + 1,), boundaries in the flattened inputs from 0 to B·T. State and attention start
            anew at each: every row and every document. None if state and attention cross document ends.
        n_tokens: number of labels that are not -100.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    cu_seqlens: torch.Tensor | None
    n_tokens: int


class BatchLoader:
    """An endless iterator over training batches that can be resumed exactly.

    Args:
        shards: the tokens.
        seq_len: T, tokens predicted per row.
        batch_size: B, rows per rank and batch.
        seed: decides the order.
        rank, world_size: this rank's share of every step.
        reset_at_document: flatten the rows and mark document borders (see `Batch`). A document's first token is then
            never predicted from the document before it.

    Attributes:
        n_sequences: sequences of an epoch; of a mixture, of all sources together.

    Raises:
        DataError: the text, or one source's, is shorter than one sequence.
    """

    def __init__(
        self,
        shards: ShardSet,
        *,
        seq_len: int,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        reset_at_document: bool = False,
    ) -> None:
        self._sequences_of = [(part.n_tokens - 1) // seq_len for part in shards.parts]
        self.n_sequences = sum(self._sequences_of)
        for part, n_sequences in zip(shards.parts, self._sequences_of, strict=True):
            if n_sequences < 1:
                raise DataError(
                    f"{part.name} has {part.n_tokens:,} tokens, one sequence needs {seq_len + 1:,}",
                    f"give more text, or lower trainer.seq_len below {part.n_tokens:,}",
                )
        self._cycle = cycle_of([part.weight for part in shards.parts])
        self._rows_in_cycle = np.bincount(self._cycle)  # of each source
        self._before = np.empty_like(self._cycle)  # rows of the same source before each row of the cycle
        for number, rows in enumerate(self._rows_in_cycle):
            self._before[self._cycle == number] = np.arange(rows)
        self._shards, self._seq_len, self._batch_size, self._seed = shards, seq_len, batch_size, seed
        self._rank, self._world_size = rank, world_size
        self._reset = reset_at_document
        self._rows_done = 0  # in the global order, over all ranks
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # the latest epoch of each source, and its order

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        rows_of_step = self._batch_size * self._world_size
        rows = self._rows_done + np.arange(self._rank, rows_of_step, self._world_size)
        self._rows_done += rows_of_step
        starts = self._starts(rows)
        return make_batch(self._shards, starts, self._seq_len, reset_at_document=self._reset)

    def labels_ahead(self, n_batches: int) -> int:
        """Number of labels in the next `n_batches` batches of all ranks.

        Every rank computes the same number from the order of the rows, so no rank asks another.
        """
        rows = self._rows_done + np.arange(n_batches * self._batch_size * self._world_size)
        n_labels = len(rows) * self._seq_len
        if not self._reset:
            return n_labels
        starts = self._starts(rows)
        ended, ends = _document_ends(self._shards.document_ends, starts, starts + self._seq_len + 1)
        places = np.unique(ended * (self._seq_len + 1) + ends)  # an empty document ends where another does
        return n_labels - len(places)

    def remark(self, n_rows: int) -> str | None:
        """How often `n_rows` sequences, over all ranks, pass over each source of a mixture; None for one text."""
        shares = self._rows_in_cycle / len(self._cycle)
        of_sources = zip(self._shards.parts, self._sequences_of, shares, strict=True)
        epochs = [f"{n_rows * share / length:.2f} epochs of {part.name}" for part, length, share in of_sources]
        return f"{n_rows:,} sequences are {', '.join(epochs)}" if len(epochs) > 1 else None

    def state_dict(self) -> dict[str, Any]:
        """The position: the epoch, the rows taken so far over all ranks, and the identity of these rows."""
        return {"epoch": self._rows_done // self.n_sequences, "rows": self._rows_done, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly after the batch at which `state` was taken, with any world size.

        Raises:
            DataError: the state belongs to other data, another sequence length or another seed.
        """
        for key, here in self._identity().items():
            if state.get(key) != here:
                raise DataError(
                    f"the checkpoint's data position has {key}={state.get(key)}, this run has {key}={here}",
                    "continue with the same data and settings, or start a new run (trainer.resume=never)",
                )
        self._rows_done = state["rows"]

    def go_on_after(self, state: dict[str, Any]) -> bool:
        """Start after the rows that another run has taken, if its order is the same. Return whether it is."""
        same = state.items() >= self._identity().items()
        self._rows_done = state["rows"] if same else self._rows_done
        return same

    def _identity(self) -> dict[str, Any]:
        return {"fingerprint": self._shards.fingerprint, "seq_len": self._seq_len, "seed": self._seed}

    def _starts(self, rows: np.ndarray) -> np.ndarray:
        """The first token of each row, of ascending numbers."""
        cycles, places = np.divmod(rows, len(self._cycle))
        starts = np.empty_like(rows)
        for number, part in enumerate(self._shards.parts):
            mine = self._cycle[places] == number
            taken = cycles[mine] * self._rows_in_cycle[number] + self._before[places[mine]]
            epochs, positions = np.divmod(taken, self._sequences_of[number])
            for epoch in np.unique(epochs):
                here = epochs == epoch
                positions[here] = self._epoch_order(number, int(epoch))[positions[here]]
            starts[mine] = part.start + positions * self._seq_len
        return starts

    def _epoch_order(self, part: int, epoch: int) -> np.ndarray:
        if part not in self._orders or self._orders[part][0] != epoch:
            # NumPy never changes RandomState's stream. A Generator's may change between versions.
            seeds = [self._seed, epoch, *([part] if part else [])]
            source = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seeds)))
            self._orders[part] = (epoch, source.permutation(self._sequences_of[part]))
        return self._orders[part][1]


def cycle_of(weights: Sequence[float]) -> np.ndarray:
    """The sources of successive rows, until their order repeats: always the one whose rows lag its share most."""
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    length = lcm(*((weight / total).denominator for weight in exact))
    rows_of = [int(weight / total * length) for weight in exact]
    order, lags = np.empty(length, np.int64), [0] * len(rows_of)
    for row in range(length):
        lags = [lag + rows for lag, rows in zip(lags, rows_of, strict=True)]
        order[row] = source = lags.index(max(lags))
        lags[source] -= length
    return order


def make_batch(
    shards: ShardSet,
    starts: np.ndarray,
    seq_len: int,
    *,
    reset_at_document: bool,
    stop: np.ndarray | None = None,
) -> Batch:
    """The batch of the sequences that begin at tokens `starts`.

    Args:
        starts: (B,) first input token of each row. A row that begins at or beyond `stop` - 1 predicts nothing.
        stop: (B,) end of the tokens that a row may use (exclusive); None: of all. What lies beyond is padded with 0 and
            has label -100.
    """
    n_rows = len(starts)
    tokens = np.zeros((n_rows, seq_len + 1), np.int64)
    lengths = np.clip((shards.n_tokens if stop is None else stop) - starts, 0, seq_len + 1)
    for row, start, length in zip(tokens, starts.tolist(), lengths.tolist(), strict=True):
        if length:
            row[:length] = shards.read(start, start + length)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    labels = np.where(np.arange(1, seq_len + 1) < lengths[:, None], labels, IGNORED)
    cu_seqlens = None
    if reset_at_document:
        rows, ends = _document_ends(shards.document_ends, starts, starts + lengths)
        labels[rows, ends - 1] = IGNORED  # the label here is the next document's first token
        boundaries = np.concatenate([np.arange(n_rows + 1) * seq_len, rows * seq_len + ends])
        cu_seqlens = torch.from_numpy(np.unique(boundaries).astype(np.int32))
        inputs, labels = inputs.reshape(1, -1), labels.reshape(1, -1)
    n_tokens = int(np.count_nonzero(labels != IGNORED))
    return Batch(torch.from_numpy(np.ascontiguousarray(inputs)), torch.from_numpy(labels), cu_seqlens, n_tokens)


def _document_ends(ends: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Document ends strictly between starts and stops: the row of each, and its distance from the row's start."""
    first = np.searchsorted(ends, starts, side="right")
    counts = np.maximum(np.searchsorted(ends, stops, side="left") - first, 0)
    rows = np.repeat(np.arange(len(starts)), counts)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows, ends[first[rows] + within] - starts[rows]


class BatchesOnce(Sequence[Batch]):
    """The batches of a validation pass: each token but the first is predicted exactly once, in order.

    A batch is built when it is asked for. All batches have the full shape; padding of the last one has label -100. A
    mixture is read source by source.

    Args:
        max_tokens: upper bound on the number of labels, of which each source has its share, but at least one; None for
            all.
        tokenizer: of the text; None for generated tokens.
    """

    def __init__(
        self,
        shards: ShardSet,
        seq_len: int,
        batch_size: int,
        max_tokens: int | None = None,
        *,
        reset_at_document: bool = False,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        total = sum(part.weight for part in shards.parts)
        starts, stops = [], []  # of all rows
        for part in shards.parts:
            most = part.n_tokens if max_tokens is None else max(1, int(max_tokens * (part.weight / total))) + 1
            stop = part.start + min(part.n_tokens, most)
            starts.append(np.arange(part.start, stop - 1, seq_len))
            stops.append(np.full(len(starts[-1]), stop))
        padding = (0, -sum(map(len, starts)) % batch_size)
        self._starts = np.pad(np.concatenate(starts), padding, constant_values=shards.n_tokens)
        self._stops = np.pad(np.concatenate(stops), padding)
        self._batch_size, self._tokenizer = batch_size, tokenizer
        self._batch = partial(make_batch, shards, seq_len=seq_len, reset_at_document=reset_at_document)

    @cached_property
    def n_bytes(self) -> int:
        """UTF-8 bytes of the text to which the tokenizer decodes all labels; 0 for generated tokens."""
        if (tokenizer := self._tokenizer) is None:
            return 0
        labels = chain.from_iterable(batch.labels.flatten().tolist() for batch in self)
        documents = groupby(labels, lambda label: label not in (IGNORED, tokenizer.eos_id))
        return sum(len(tokenizer.decode(list(ids)).encode()) for is_text, ids in documents if is_text)

    def __len__(self) -> int:
        return len(self._starts) // self._batch_size

    def __getitem__(self, index: Any) -> Any:
        rows = slice((first := range(len(self))[index] * self._batch_size), first + self._batch_size)
        return self._batch(self._starts[rows], stop=self._stops[rows])
