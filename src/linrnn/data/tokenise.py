"""Write documents as token shards. The work may be interrupted at any moment.

After every batch of documents `progress.json` records the valid length of each file and the number of documents read.
The next attempt cuts off anything longer, skips that many documents (reading is far faster than tokenising) and goes
on. The bytes are the same however often the work was interrupted.
"""

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from linrnn.core.errors import DataError
from linrnn.data.progress import Meter, Progress, Report
from linrnn.data.readers import Document
from linrnn.data.shards import SPLITS, SplitWriter, token_dtype, write_json
from linrnn.data.sources import Source
from linrnn.data.tokenizer import Tokenizer

BATCH_CHARACTERS = 4 << 20  # characters that are tokenised and committed together
BATCH_DOCUMENTS = 8192
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
        period: int | None,
        max_tokens: int | None,
        report: Report,
    ) -> None:
        self._source, self._tokenizer, self._report = source, tokenizer, report
        self._period, self._max_tokens = period, max_tokens
        self._record = directory / RECORD
        self._state: dict[str, Any] = {"phase": 0, "documents": 0, "empty": 0, "splits": {}}
        if self._record.is_file():
            self._state = json.loads(self._record.read_text(encoding="utf-8"))
        dtype, states = token_dtype(tokenizer.vocab_size), self._state["splits"]
        self._writers = {split: SplitWriter(directory, split, dtype, states.get(split)) for split in SPLITS}
        self._meter = Meter("tokenising", report, self._count("tokens"))

    def run(self) -> dict[str, Any]:
        """Do the remaining work. Returns the shards' entries for meta.json, by split.

        Raises:
            DataError: the text cannot be read, or a split has no two tokens.
        """
        phases = ["train"] if self._period is not None else ["valid", "train"]
        try:
            for number in range(self._state["phase"], len(phases)):
                if number > self._state["phase"]:
                    self._state |= {"phase": number, "documents": 0}
                self._run_phase(phases[number])
            splits = {split: writer.finish() for split, writer in self._writers.items()}
        finally:
            for writer in self._writers.values():
                writer.close()
        self._meter.update(self._count("documents"), self._count("tokens"), 1.0, finished=True)
        for split, writer in self._writers.items():
            if writer.tokens < 2:
                raise DataError(f"{self._source.description} gives {writer.tokens} {split} tokens", "give more text")
        if empty := self._state["empty"]:
            self._report(Progress(f"{empty:,} documents hold no token, and are left out", finished=True))
        return splits

    def _run_phase(self, phase: str) -> None:
        limit = self._max_tokens if phase == "train" else None
        for batch in _batches(itertools.islice(self._source.documents(phase), self._state["documents"], None)):
            room = None if limit is None else limit - self._writers["train"].tokens
            if room is not None and room <= 0:
                return
            self._write(phase, [document.text for document in batch], room)
            fraction = batch[-1].fraction if phase == "train" else None
            if limit is not None:
                fraction = max(fraction or 0.0, min(1.0, self._writers["train"].tokens / limit))
            self._meter.update(self._count("documents"), self._count("tokens"), fraction)

    def _write(self, phase: str, texts: list[str], room: int | None) -> None:
        """Append the texts' tokens to their splits and record it. Stops when the training split's `room` is used up."""
        end = [] if self._tokenizer.eos_id is None else [self._tokenizer.eos_id]
        documents: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
        n_bytes = dict.fromkeys(SPLITS, 0)
        number = self._count("documents")
        for text, ids in zip(texts, self._tokenizer.encode_batch(texts), strict=True):
            if room is not None and room <= 0:
                break
            if not ids:
                self._state["empty"] += 1
                continue
            split = split_of(phase, number, self._period)
            number += 1
            documents[split].append(np.array(ids + end, dtype=np.uint32))
            n_bytes[split] += len(text.encode())
            if room is not None and split == "train":
                room -= len(ids + end)
        for split, writer in self._writers.items():
            if documents[split]:
                ends = np.cumsum([len(document) for document in documents[split]])
                writer.append(np.concatenate(documents[split]), ends, n_bytes[split])
        self._state["splits"] = {split: writer.commit() for split, writer in self._writers.items()}
        self._state["documents"] += len(texts)
        write_json(self._record, self._state)

    def _count(self, what: str) -> int:
        return sum(getattr(writer, what) for writer in self._writers.values())


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Batches that end with the document which brings them to so many characters."""
    batch: list[Document] = []
    held = 0
    for document in documents:
        batch.append(document)
        held += len(document.text)
        if held >= BATCH_CHARACTERS or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch
