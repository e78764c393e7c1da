"""Write documents as token shards. The work may be interrupted at any moment.

After every batch of documents `progress.json` records the valid length of each file and the number of documents read.
The next attempt cuts off anything longer, skips that many documents (reading is far faster than tokenising) and goes
on. The bytes are the same however often the work was interrupted.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import islice
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


def tokenise(
    directory: Path, source: Source, tokenizer: Tokenizer, period: int | None, max_tokens: int | None, report: Report
) -> dict[str, Any]:
    """Write the shards of both splits, or what an earlier attempt left to do. Returns their entries for meta.json.

    Args:
        directory: where the shards and the progress record are.
        tokenizer: its end token, if it has one, follows every document.
        period: every period-th document is held out for validation; None if the source has validation text.
        max_tokens: reading ends with the document that brings the training split to this many tokens.
        report: called after every batch.

    Raises:
        DataError: the text cannot be read, or a split has no two tokens.
    """
    record = directory / RECORD
    state: dict[str, Any] = {"phase": 0, "documents": 0, "empty": 0, "splits": {}}
    if record.is_file():
        state = json.loads(record.read_text(encoding="utf-8"))
    dtype, splits = token_dtype(tokenizer.vocab_size), state["splits"]
    writers = {split: SplitWriter(directory, split, dtype, splits.get(split)) for split in SPLITS}

    def done() -> tuple[int, int]:
        return sum(w.documents for w in writers.values()), sum(w.tokens for w in writers.values())

    meter = Meter("tokenising", report, done()[1])
    phases = ["train"] if period is not None else ["valid", "train"]
    try:
        for phase in phases[state["phase"] :]:
            limit = max_tokens if phase == "train" else None
            for batch in _batches(islice(source.documents(phase), state["documents"], None)):
                room = None if limit is None else limit - writers["train"].tokens
                if room is not None and room <= 0:
                    break
                state["empty"] += _append([d.text for d in batch], tokenizer, writers, phase, period, room)
                state["splits"] = {split: writer.commit() for split, writer in writers.items()}
                state["documents"] += len(batch)
                write_json(record, state)
                fraction = batch[-1].fraction if phase == "train" else None
                if limit is not None:
                    fraction = max(fraction or 0.0, min(1.0, writers["train"].tokens / limit))
                meter.update(*done(), fraction)
            state |= {"phase": state["phase"] + 1, "documents": 0}
        shards = {split: writer.finish() for split, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.close()
    meter.update(*done(), 1.0, finished=True)
    for split, writer in writers.items():
        if writer.tokens < 2:
            raise DataError(f"{source.description} gives {writer.tokens} {split} tokens", "give more text")
    if state["empty"]:
        report(Progress(f"{state['empty']:,} documents hold no token, and are left out", finished=True))
    return shards


def _append(
    texts: list[str],
    tokenizer: Tokenizer,
    writers: dict[str, SplitWriter],
    phase: str,
    period: int | None,
    room: int | None,
) -> int:
    """Append the texts' tokens, until the training split has `room` more. Returns how many texts have none."""
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    documents: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    n_bytes = dict.fromkeys(SPLITS, 0)
    number, empty = sum(writer.documents for writer in writers.values()), 0
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        if room is not None and room <= 0:
            break
        if not ids:
            empty += 1
            continue
        split = split_of(phase, number, period)
        number += 1
        documents[split].append(np.array(ids + end, dtype=np.uint32))
        n_bytes[split] += len(text.encode())
        if room is not None and split == "train":
            room -= len(ids + end)
    for split, writer in writers.items():
        if documents[split]:
            ends = np.cumsum([len(document) for document in documents[split]])
            writer.append(np.concatenate(documents[split]), ends, n_bytes[split])
    return empty


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
