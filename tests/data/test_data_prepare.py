"""Preparation happens once, exactly, and never leaves half a result."""

import errno
import json
import lzma
import os
import signal
import subprocess
import threading
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import filelock
import numpy as np
import pytest
from data_helpers import directory_bytes, sentences, shared_data, text_config, write_jsonl, write_tokenizer
from forked import start

import linrnn.data.shards
from linrnn.config.schema import SourceConfig, StdlibDataConfig
from linrnn.core.errors import ConfigError, DataError, StorageError
from linrnn.data import BatchesOnce, BatchLoader, PreparedData, prepare
from linrnn.data.tokenizer import load_tokenizer

PREPARE = import_module("linrnn.data.prepare")  # the package has a function of this name


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "corpus.jsonl", sentences(400))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "tokenizer.json")


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many batches, so that an interruption can fall between them."""
    monkeypatch.setattr(PREPARE, "BATCH_CHARACTERS", 2000)


def texts_of(data: PreparedData) -> dict[str, list[str]]:
    """Decode both splits document by document, and check that each ends with the end token and has all its bytes."""
    result: dict[str, list[str]] = {}
    for name, split in {"train": data.train, "valid": data.valid}.items():
        parts = [split.read(part.start, part.start + part.n_tokens) for part in split.parts]
        documents = np.split(np.concatenate(parts), split.document_ends)[:-1]
        assert all(document[-1] == data.tokenizer.eos_id for document in documents)
        result[name] = [data.tokenizer.decode(d[:-1]) for d in documents]
        assert split.n_bytes == len("".join(result[name]).encode())
    return result


def split_texts(tmp_path: Path, path: Path | str | list[str], tokenizer: Path, **changes: Any) -> dict[str, list[str]]:
    return texts_of(prepare(text_config(tmp_path / "cache", path, tokenizer=tokenizer, **changes)))


# ------------------------------------------------------------------------------------------ what it holds
def test_validation_files_are_used_whole_and_nothing_is_held_out(tmp_path, corpus, tokenizer):
    valid_path = write_jsonl(tmp_path / "valid.jsonl", sentences(30, seed=5))
    texts = split_texts(tmp_path, corpus, tokenizer, valid_path=valid_path)
    assert texts == {"train": sentences(400), "valid": sentences(30, seed=5)}


def test_a_mixture_has_its_sources_own_shards_and_one_tokenizer_that_learns_from_all(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(PREPARE, "TOKENIZER_SAMPLE_BYTES", 4000)  # less than the first source has
    other = write_jsonl(tmp_path / "other.jsonl", [f"zyzyzy {i} xwxwxw" for i in range(50)])
    sources = [SourceConfig(str(corpus), 0.75), SourceConfig(str(other), 0.25)]
    config = replace(text_config(tmp_path / "cache", corpus), path=None, sources=sources)
    data = prepare(config)
    assert "zyzy" in data.tokenizer.json
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(data.tokenizer.json)
    alone = [texts_of(prepare(text_config(tmp_path / "alone", path, tokenizer=tokenizer))) for path in (corpus, other)]
    assert texts_of(data) == {split: alone[0][split] + alone[1][split] for split in ("train", "valid")}
    assert data.description.startswith(f"a mixture: 75.0% of {corpus} (1 file): ")

    even = prepare(replace(config, sources=[replace(source, weight=1) for source in sources]), pytest.fail)
    assert even.fingerprint != data.fingerprint, "another order of the same shards' sequences"
    valid_path = str(write_jsonl(tmp_path / "valid.jsonl", sentences(30, seed=5)))
    own = prepare(replace(config, valid_path=valid_path))
    assert texts_of(own) == {"train": sentences(400) + [f"zyzyzy {i} xwxwxw" for i in range(50)],
                             "valid": sentences(30, seed=5)}  # fmt: skip

    data.verify()
    shard = max((path for path in (tmp_path / "cache").glob("*/train-*.bin")), key=os.path.getmtime)
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(DataError, match=r"train-00000\.bin differs"):
        own.verify()
    missing = replace(config, sources=[sources[0], SourceConfig(str(tmp_path / "gone.txt"))])
    with pytest.raises(DataError, match=r"data\.sources=.*gone\.txt does not exist"):
        prepare(missing)


def test_reading_stops_with_the_document_that_reaches_max_tokens(tmp_path, corpus, tokenizer, small_pieces):
    whole = prepare(text_config(tmp_path / "whole", corpus, tokenizer=tokenizer))
    data = prepare(text_config(tmp_path / "cache", corpus, tokenizer=tokenizer, max_tokens=5000))
    ends = whole.train.document_ends
    n_documents = int(np.searchsorted(ends, 5000)) + 1
    assert data.train.n_tokens == ends[n_documents - 1] >= 5000
    np.testing.assert_array_equal(data.train.read(0, data.train.n_tokens), whole.train.read(0, data.train.n_tokens))
    assert data.valid.n_documents == -(-n_documents // 9)  # those held out among the documents read


def test_stdlib_holds_this_interpreter_s_own_files(tmp_path, monkeypatch):
    monkeypatch.setattr(PREPARE, "BATCH_CHARACTERS", 100_000)  # no more than it needs is tokenised
    common = {"cache_dir": str(tmp_path), "verify": True, "reset_at_document": False, "tokenizer_vocab_size": 300}
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    config = StdlibDataConfig("stdlib", **common, tokenizer=str(tokenizer), max_tokens=100_000, valid_fraction=0.1)
    data = prepare(config)
    first = data.train.read(0, int(data.train.document_ends[0]) - 1).tolist()
    files = sorted(Path(subprocess.__file__).parent.glob("*.py"))[:5]
    assert load_tokenizer(str(tokenizer)).decode(first) in [file.read_text() for file in files]
    assert data.train.n_tokens >= 100_000


# --------------------------------------------------------------------------------------- what is held out
@pytest.mark.parametrize("tokenizer_given", [True, False])
@pytest.mark.parametrize("empty", [lambda i: False, lambda i: i % 2 == 0, lambda i: i < 100])
def test_every_kth_row_that_holds_text_is_held_out(tmp_path, tokenizer, empty, tokenizer_given):
    rows = ["" if empty(i) else text for i, text in enumerate(sentences(500))]
    path, kept = write_jsonl(tmp_path / "a.jsonl", rows), [row for row in rows if row]
    said: list[str] = []
    config = text_config(
        tmp_path / "cache", path, valid_fraction=0.02, tokenizer=tokenizer if tokenizer_given else None
    )
    data = prepare(config, said.append)
    assert texts_of(data) == {"valid": kept[::50], "train": [text for i, text in enumerate(kept) if i % 50]}
    assert (f"{500 - len(kept)} documents hold no token, and are left out" in said) == (len(kept) < 500)


BOOK = "".join(f"Line {i} of the book.\n" + "\n" * (i % 5 == 0) for i in range(1000))
TEXTS = {
    "lines": BOOK,
    "line ends of Windows": BOOK.replace("\n", "\r\n"),
    "one long line": BOOK.replace("\n", " "),
    "no blank": "東" * 5000,
    "a heading and one line": "heading\n" + "word " * 3000,
    "two lines": "one\ntwo",
    "one line": "only one",
}


@pytest.mark.parametrize("fraction", [0.01, 0.5])
@pytest.mark.parametrize("text", TEXTS)
def test_a_single_text_holds_out_its_end(tmp_path, tokenizer, text, fraction):
    content = TEXTS[text]
    (tmp_path / "a.md").write_bytes(content.encode("utf-8-sig"))
    write_jsonl(tmp_path / "a.jsonl", [content])
    for name in ("a.md", "a.jsonl"):
        texts = split_texts(tmp_path, tmp_path / name, tokenizer, valid_fraction=fraction)
        [train], [valid] = texts["train"], texts["valid"]
        assert train + valid == content
        assert max(1, round(fraction * len(content))) <= len(valid) <= 1.5 * fraction * len(content) + 1
        if text == "lines" and fraction < 0.5:
            assert train.endswith("\n")


@pytest.mark.parametrize(("separator", "mark"), [("blank_line", ""), ("<|endoftext|>", "<|endoftext|>")])
def test_paragraphs_are_held_out_in_one_piece_at_the_end(tmp_path, tokenizer, separator, mark):
    paragraphs = [f"{text}\n" for text in sentences(400)]
    for i in range(2):
        (tmp_path / f"{i}.txt").write_text(mark.join(paragraphs[200 * i : 200 * i + 200]) + mark)
    texts = split_texts(tmp_path, str(tmp_path / "*.txt"), tokenizer, document_separator=separator)
    assert texts["train"] + texts["valid"] == paragraphs
    share = sum(map(len, texts["valid"])) / sum(map(len, paragraphs))
    assert 0.1 <= share <= 0.15


def test_one_long_text_among_short_ones_is_cut(tmp_path, tokenizer):
    paths = [tmp_path / f"{i}.txt" for i in range(3)]
    for path, content in zip(paths, ["short\n", BOOK, "last\n"], strict=True):
        path.write_text(content)
    texts = split_texts(tmp_path, [str(path) for path in paths], tokenizer)
    assert texts["train"][0] == "short\n"
    assert texts["train"][1] + texts["valid"][0] == BOOK
    assert texts["valid"][1:] == ["last\n"]


def test_many_files_hold_out_every_tenth(tmp_path, tokenizer):
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(sentences(30)):
        (tmp_path / "texts" / f"{i:02}.py").write_text(text)
    assert split_texts(tmp_path, tmp_path / "texts", tokenizer)["valid"] == sentences(30)[::10]


# ------------------------------------------------------------------------------- a tokenizer trained here
@pytest.mark.parametrize("rows", [True, False])
def test_a_tokenizer_trained_here_never_sees_held_out_text_and_is_kept(rows, tmp_path):
    zebras = "zebra\n" * 200
    if rows:
        texts = [f"{zebras} {i}" if i % 10 == 0 else text for i, text in enumerate(sentences(400))]
        config = text_config(tmp_path / "cache", write_jsonl(tmp_path / "a.jsonl", texts))
    else:
        (tmp_path / "a.txt").write_text(BOOK + zebras)
        config = text_config(tmp_path / "cache", tmp_path / "a.txt")
    data = prepare(config)
    assert zebras in texts_of(data)["valid"][0]
    vocabulary = json.loads((data.directory / "tokenizer.json").read_text())["model"]["vocab"]
    assert data.vocab_size == len(vocabulary) == 300
    assert not any("eb" in token for token in vocabulary)  # zebra's pairs were never seen
    assert prepare(config).fingerprint == data.fingerprint


# ------------------------------------------------------------------------------------- identity and cache
def test_finished_data_is_opened_also_where_nothing_may_be_written(tmp_path, corpus, monkeypatch):
    config = text_config(tmp_path / "cache", corpus)
    first = prepare(config)
    refuse = Mock(side_effect=PermissionError(errno.EACCES, "Permission denied"))
    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    for name in ("replace", "fsync", "rename", "mkdir"):
        monkeypatch.setattr(os, name, refuse)
    assert prepare(config, pytest.fail).fingerprint == first.fingerprint


def test_the_fingerprint_follows_content_tokenizer_and_options_but_not_place(tmp_path, corpus, tokenizer):
    def fingerprint(path: Path = corpus, cache: str = "cache", **changes: Any) -> str:
        return prepare(text_config(tmp_path / cache, path, **{"tokenizer": tokenizer, **changes})).fingerprint

    def copied(folder: str, content: bytes) -> Path:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / corpus.name).write_bytes(content)
        return tmp_path / folder / corpus.name

    moved = copied("elsewhere", corpus.read_bytes())
    assert fingerprint() == fingerprint(moved) == fingerprint(cache="other_cache")
    altered = copied("altered", corpus.read_bytes().replace(b"cat", b"cut", 1))
    others = [
        fingerprint(altered),
        fingerprint(tokenizer=write_tokenizer(tmp_path / "other.json", vocab_size=310)),
        fingerprint(valid_fraction=0.2),
        fingerprint(max_tokens=1000),
    ]
    assert len({fingerprint(), *others}) == 5
    stat = corpus.stat()
    corpus.write_bytes(altered.read_bytes())  # same name and size, a byte changed a moment later
    os.utime(corpus, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert fingerprint() == others[0]


def test_the_end_that_is_held_out_is_the_same_with_max_tokens_and_another_fraction_is_other_data(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text(BOOK)
    config = text_config(tmp_path / "cache", tmp_path / "a.txt", tokenizer=tokenizer, document_separator="\n")
    whole, part = prepare(config), prepare(replace(config, max_tokens=100))
    assert whole.valid.n_tokens == part.valid.n_tokens
    assert 100 <= part.train.n_tokens < 130
    others = [prepare(replace(config, valid_fraction=0.2)), prepare(replace(config, document_separator=None))]
    assert len({data.fingerprint for data in (whole, part, *others)}) == 4


def test_two_at_once_prepare_it_once(tmp_path, corpus, tokenizer, small_pieces, monkeypatch):
    config = text_config(tmp_path / "cache", corpus, tokenizer=tokenizer)
    results: list[str] = []
    tokenise, times = PREPARE._tokenise, []
    monkeypatch.setattr(PREPARE, "_tokenise", lambda *a: times.append(1) or tokenise(*a))
    threads = [threading.Thread(target=lambda: results.append(prepare(config).fingerprint)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [results[0]] * 2
    assert len(times) == 1


def test_the_command_prepares_says_what_lies_where_and_checks_it_the_next_time(
    tmp_path, corpus, tokenizer, command_here
):
    cache = f"data.cache_dir={tmp_path}/cache"
    arguments = ("scripts/prepare_data.py", "data=text", f"data.path={corpus}", f"data.tokenizer={tokenizer}", cache)
    done = command_here(*arguments)
    assert done.returncode == 0, done.stderr
    assert "training: 396 documents" in done.stdout
    assert "validation: 4 documents" in done.stdout
    assert "end token <|endoftext|> = 0" in done.stdout
    (shard,) = (tmp_path / "cache").glob("text-*/train-00000.bin")
    alter(shard)
    damaged = command_here(*arguments)
    assert damaged.returncode == 3
    assert f"{shard} differs from its sha256" in damaged.stderr
    assert "Traceback" not in damaged.stderr


# ------------------------------------------------------------------------------------------ interruptions
def _killed_at_the_tenth_document(cache: Path, corpus: Path, tokenizer: Path) -> None:
    calls = iter(range(10))
    append = linrnn.data.shards.SplitWriter.append

    def deadly(writer: Any, *arguments: Any) -> None:
        append(writer, *arguments)
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    linrnn.data.shards.SplitWriter.append = deadly  # type: ignore[method-assign]
    prepare(text_config(cache, corpus, tokenizer=tokenizer))


def test_after_a_kill_the_same_command_gives_the_same_bytes(tmp_path, corpus, tokenizer):
    uninterrupted = prepare(text_config(tmp_path / "whole", corpus, tokenizer=tokenizer))
    process = start(_killed_at_the_tenth_document, tmp_path / "killed", corpus, tokenizer)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    [partial] = (tmp_path / "killed").glob("*.partial")
    assert len(list(partial.glob("*.bin"))) == 2
    data = prepare(text_config(tmp_path / "killed", corpus, tokenizer=tokenizer))
    assert directory_bytes(data.directory) == directory_bytes(uninterrupted.directory)
    assert not partial.exists()


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path, corpus, tokenizer, monkeypatch):
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    config = text_config(tmp_path / "cache", corpus, tokenizer=tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr(linrnn.data.shards.SplitWriter, "finish", full)
        with pytest.raises(StorageError, match="No space left on device"):
            prepare(config)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert prepare(config).train.n_documents == 360


# ---------------------------------------------------------------------------------------------- bad input
def test_bad_text_leaves_nothing_behind_and_works_once_mended(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    good = write_jsonl(path, sentences(50)).read_text()
    path.write_text(good + "{broken\n")
    config = text_config(tmp_path / "cache", path, tokenizer=tokenizer)
    with pytest.raises(DataError, match=r"a\.jsonl, line 51"):
        prepare(config)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    path.write_text(good)
    assert prepare(config).train.n_documents == 45


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["train-00000.bin", "train-00000.ends.npy", "valid-00000.bin", "meta.json"])
@pytest.mark.parametrize("damage", [cut, alter, Path.unlink])
def test_damaged_shards_are_found_and_named(tmp_path, corpus, tokenizer, file, damage):
    config = text_config(tmp_path / "cache", corpus, tokenizer=tokenizer)
    directory = prepare(config).directory
    damage(directory / file)
    with pytest.raises(DataError, match=file) as raised:
        prepare(config).verify()  # a cut or missing file is found on opening, an altered byte by its hash
    assert f"delete {directory}" in raised.value.remedy


def test_a_split_of_several_files_is_refused_and_never_read_in_part(tmp_path, corpus, tokenizer):
    config = text_config(tmp_path / "cache", corpus, tokenizer=tokenizer)
    directory = prepare(config).directory
    meta = linrnn.data.shards.read_meta(directory)
    del meta["fingerprint"]
    meta["splits"]["train"] *= 2
    linrnn.data.shards.write_meta(directory, meta)
    with pytest.raises(DataError, match="lists several files of the split train") as raised:
        prepare(config)
    assert f"delete {directory}" in raised.value.remedy


@pytest.mark.parametrize(
    ("texts", "changes", "error", "cause"),
    [
        (["", ""], {}, DataError, "0 train tokens"),
        (["x"], {}, DataError, "0 train tokens"),
        (["a", "b"], {"valid_path": "none.jsonl"}, DataError, "0 valid tokens"),
        (["a", "b"], {"document_separator": "blank_line"}, ConfigError, "holds rows, each a document"),
        (["a", "b"], {"valid_fraction": 0.0}, ConfigError, "data.valid_fraction is 0"),
        (["a", "b"], {"text_field": "body"}, DataError, "no field 'body'"),
        (["a", "b"], {"tokenizer": "missing.json"}, DataError, "missing.json does not exist"),
        (["a", "b"], {"valid_path": "missing.txt"}, DataError, "data.valid_path=missing.txt does not exist"),
        (["a", "b"], {"cache_dir": "a.jsonl/cache"}, StorageError, "a.jsonl"),
    ],
)
def test_unusable_text_or_options_are_refused(tmp_path, tokenizer, texts, changes, error, cause, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", texts)
    write_jsonl(tmp_path / "none.jsonl", [""])
    with pytest.raises(error, match=cause):
        prepare(replace(text_config(Path("cache"), "a.jsonl", tokenizer=tokenizer), **changes))


# ----------------------------------------------------------------------------------------- the real thing
def test_the_wikipedia_slice_comes_back_word_for_word(tmp_path):
    shared = shared_data()
    tokenizer_path = shared / "tokenizers" / "mistral-v1-32000.tokenizer.json.xz"
    valid, train = (shared / f"wikipedia-en-slice.{split}.jsonl.xz" for split in ("valid", "train"))
    data = prepare(text_config(tmp_path, train, valid_path=valid, tokenizer=tokenizer_path, max_tokens=200_000))
    with lzma.open(valid, "rt") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    assert texts_of(data)["valid"] == texts
    assert (data.vocab_size, data.tokenizer.eos_id, data.train.dtype) == (32_000, 2, np.dtype("<u2"))
    batches = BatchesOnce(data.valid, 2048, 8, tokenizer=data.tokenizer)
    assert batches.n_bytes == pytest.approx(data.valid.n_bytes, rel=1e-4)
    assert next(BatchLoader(data.train, seq_len=2048, batch_size=8, seed=0)).n_tokens == 8 * 2048
