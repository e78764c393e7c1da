"""Write documents as token shards. The work may be interrupted at any moment.

After every batch of documents `progress.json` records the valid length of each file and the number of documents read.
The next attempt cuts off anything longer, skips that many documents (reading is far faster than tokenising) and goes
on. The bytes are the same however often the work was interrupted.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from linrnn.core.errors import DataError
from linrnn.data.progress import Meter, ProgressCallback
from linrnn.data.readers import Document
from linrnn.data.shards import SPLITS, SplitWriter, storage_errors, token_dtype, write_json
from linrnn.data.sources import Source
from linrnn.data.tokenizer import Tokenizer

BATCH_CHARACTERS = 4 << 20  # characters that are tokenised and committed together
BATCH_DOCUMENTS = 8192
CHARACTERS_OF_TOKEN = 16  # more than a token holds on average: a small max_tokens needs no whole batch
RECORD = "progress.json"


def split_of(phase: str, document: int, period: int | None) -> str:
    """The split of the `document`-th document (from 0) among those of `phase` that have tokens."""
    if period is None:
        return phase
    return "valid" if document % period == 0 else "train"


class Tokenisation:
    """One attempt at writing the shards of both splits.

    Args:
        directory: where the shards and the progress record are.
        source: the text.
        tokenizer: its end token, if it has one, follows every document.
        period: every period-th document is held out for validation; None if the source has validation text.
        max_tokens: reading ends with the document that brings the training split to this many tokens.
        report: called after every batch.
    """

    def __init__(
        self,
        directory: Path,
        source: Source,
        tokenizer: Tokenizer,
        *,
        period: int | None,
        max_tokens: int | None,
        report: ProgressCallback | None,
    ) -> None:
        self._directory, self._source, self._tokenizer = directory, source, tokenizer
        self._period, self._max_tokens = period, max_tokens
        self._record = directory / RECORD
        state: dict[str, Any] = {"phase": 0, "documents": 0, "empty": 0, "dropped": {}, "splits": {}}
        if self._record.is_file():
            state = json.loads(self._record.read_text(encoding="utf-8"))
        self._phase, self._seen = state["phase"], state["documents"]
        self._empty, self._dropped = state["empty"], Counter(state["dropped"])
        dtype = token_dtype(tokenizer.vocab_size)
        with storage_errors(directory):
            self._writers = {s: SplitWriter(directory, s, dtype, state["splits"].get(s)) for s in SPLITS}
        self._meter = Meter("tokenising", report, self._count("tokens"))

    def run(self) -> dict[str, Any]:
        """Do the remaining work. Returns the shards' entries for meta.json, by split."""
        phases = ["train"] if self._period is not None else ["valid", "train"]
        try:
            while True:
                self._run_phase(phases[self._phase])
                if self._phase == len(phases) - 1:
                    break
                self._phase, self._seen = self._phase + 1, 0
            with storage_errors(self._directory):
                for writer in self._writers.values():
                    writer.finish()
        finally:
            for writer in self._writers.values():
                writer.close()
        self._meter.update(self._count("documents"), self._count("tokens"), 1.0, finished=True)
        self._check_not_empty()
        self._say_what_is_lost()
        return {split: [asdict(shard) for shard in writer.finished] for split, writer in self._writers.items()}

    def _run_phase(self, phase: str) -> None:
        unread = itertools.islice(self._source.documents(phase), self._seen, None)
        characters = BATCH_CHARACTERS
        if phase == "train" and self._max_tokens is not None:
            characters = min(characters, CHARACTERS_OF_TOKEN * self._max_tokens)
        for batch in _batches(unread, characters):
            room = None
            if phase == "train" and self._max_tokens is not None:
                room = self._max_tokens - self._writers["train"].tokens
                if room <= 0:
                    return
            self._write(self._encode([document.text for document in batch], phase, room), len(batch))
            fraction = batch[-1].fraction if phase == "train" else None
            if room is not None and self._max_tokens:
                fraction = max(fraction or 0.0, min(1.0, self._writers["train"].tokens / self._max_tokens))
            self._meter.update(self._count("documents"), self._count("tokens"), fraction)

    def _encode(self, texts: list[str], phase: str, room: int | None) -> Iterator[tuple[str, list[np.ndarray], int]]:
        """For each split: the tokens of each document, and the UTF-8 bytes of all. Stops when `room` is used up."""
        end = [] if self._tokenizer.eos_id is None else [self._tokenizer.eos_id]
        documents: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
        n_bytes = dict.fromkeys(SPLITS, 0)
        number = self._count("documents")
        self._dropped += self._tokenizer.dropped(texts)
        for text, ids in zip(texts, self._tokenizer.encode_batch(texts), strict=True):
            if room is not None and room <= 0:
                break
            if not ids:
                self._empty += 1
                continue
            split = split_of(phase, number, self._period)
            number += 1
            documents[split].append(np.array(ids + end, dtype=np.uint32))
            n_bytes[split] += len(text.encode())
            if room is not None and split == "train":
                room -= len(documents[split][-1])
        return ((split, documents[split], n_bytes[split]) for split in SPLITS)

    def _write(self, encoded: Iterable[tuple[str, list[np.ndarray], int]], read: int) -> None:
        with storage_errors(self._directory):
            for split, documents, n_bytes in encoded:
                if documents:
                    ends = np.cumsum([len(document) for document in documents])
                    self._writers[split].append(np.concatenate(documents), ends, n_bytes)
            splits_state = {split: writer.commit() for split, writer in self._writers.items()}
            self._seen += read
            lost = {"empty": self._empty, "dropped": self._dropped}
            write_json(self._record, {"phase": self._phase, "documents": self._seen, **lost, "splits": splits_state})

    def _count(self, what: str) -> int:
        return sum(getattr(writer, what) for writer in self._writers.values())

    def _check_not_empty(self) -> None:
        for split, writer in self._writers.items():
            if writer.tokens < 2:
                raise DataError(f"{self._source.description} gives {writer.tokens} {split} tokens", "give more text")

    def _say_what_is_lost(self) -> None:
        if self._empty:
            self._meter.remark(f"{self._empty:,} documents hold no token, and are left out")
        if self._dropped:
            most = ", ".join(f"{character!r}" for character, _ in self._dropped.most_common(5))
            n, kinds = self._dropped.total(), len(self._dropped)
            what = f"drops {n:,} characters of the text, of {kinds:,} kinds: {most}{', …' if kinds > 5 else ''}"
            self._meter.remark(f"tokenizer {self._tokenizer.name} {what}")


def _batches(documents: Iterable[Document], characters: int) -> Iterator[list[Document]]:
    """Batches that end with the document which brings them to so many characters."""
    batch: list[Document] = []
    held = 0
    for document in documents:
        batch.append(document)
        held += len(document.text)
        if held >= characters or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch
