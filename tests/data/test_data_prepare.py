"""Preparation happens once, exactly, can be resumed after anything, and never leaves half a result."""

import errno
import json
import lzma
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import directory_bytes, sentences, shared_data, text_config, write_jsonl, write_tokenizer
from forked import start
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import models

import linrnn.data.cache
import linrnn.data.shards
import linrnn.data.tokenise
from linrnn.config.schema import StdlibDataConfig
from linrnn.core.errors import ConfigError, DataError, StorageError
from linrnn.data import BatchesOnce, BatchLoader, PreparedData, Progress, prepare, vocabulary_size
from linrnn.data.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "corpus.jsonl", sentences(400))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many batches and shards, so that an interruption can fall between them."""
    monkeypatch.setattr(linrnn.data.tokenise, "BATCH_CHARACTERS", 2000)
    monkeypatch.setattr(linrnn.data.shards, "SHARD_TOKENS", 3000)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "tokenizer.json")


def texts_of(data: PreparedData, tokenizer: Tokenizer) -> dict[str, list[str]]:
    """Decode both splits document by document, and check that each ends with the end token."""
    result: dict[str, list[str]] = {}
    for split in (data.train, data.valid):
        documents = np.split(split.read(0, split.n_tokens), split.document_ends)[:-1]
        assert all(document[-1] == tokenizer.eos_id for document in documents)
        result["train" if split is data.train else "valid"] = [tokenizer.decode(d[:-1]) for d in documents]
    return result


# ------------------------------------------------------------------------------------------ what it holds
def test_every_text_comes_back_and_every_tenth_is_held_out(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    data = prepare(text_config(tmp_path / "cache", corpus, tokenizer=tokenizer, valid_fraction=0.1))
    texts = sentences(400)
    assert texts_of(data, load_tokenizer(str(tokenizer))) == {
        "train": [text for i, text in enumerate(texts) if i % 10],
        "valid": texts[::10],
    }
    data.verify()


def test_bytes_are_counted_exactly(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    data = prepare(text_config(tmp_path / "cache", corpus, tokenizer=tokenizer, valid_fraction=0.1))
    held_out = "".join(sentences(400)[::10]).encode()
    assert data.valid.n_bytes == len(held_out)
    assert data.train.n_bytes == len("".join(sentences(400)).encode()) - len(held_out)


def test_validation_files_are_used_whole_and_nothing_is_held_out(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    valid = sentences(30, seed=5)
    valid_path = write_jsonl(tmp_path / "valid.jsonl", valid)
    data = prepare(text_config(tmp_path / "cache", corpus, valid_path=valid_path, tokenizer=tokenizer))
    assert texts_of(data, load_tokenizer(str(tokenizer))) == {"train": sentences(400), "valid": valid}


def test_reading_stops_with_the_document_that_reaches_max_tokens(
    tmp_path: Path, corpus: Path, tokenizer: Path, small_pieces: None
) -> None:
    whole = prepare(text_config(tmp_path / "whole", corpus, tokenizer=tokenizer))
    data = prepare(text_config(tmp_path / "cache", corpus, tokenizer=tokenizer, max_tokens=5000))
    ends = whole.train.document_ends
    n_documents = int(np.searchsorted(ends, 5000)) + 1
    assert data.train.n_tokens == ends[n_documents - 1] >= 5000
    np.testing.assert_array_equal(data.train.read(0, data.train.n_tokens), whole.train.read(0, data.train.n_tokens))
    assert data.valid.n_documents == -(-n_documents // 9)  # those held out among the documents read


def test_empty_documents_are_passed_over(tmp_path: Path, tokenizer: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["one one", "three", "two two", "", "", ""])
    data = prepare(text_config(tmp_path / "cache", path, tokenizer=tokenizer, valid_fraction=0.5))
    texts = texts_of(data, load_tokenizer(str(tokenizer)))
    assert texts == {"train": ["three"], "valid": ["one one", "two two"]}


def test_an_end_token_written_in_the_text_ends_no_document(tmp_path: Path, tokenizer: Path) -> None:
    texts = ["start", "one <|endoftext|> two"] * 20
    data = prepare(text_config(tmp_path / "cache", write_jsonl(tmp_path / "a.jsonl", texts), tokenizer=tokenizer))
    tokens = data.train.read(0, data.train.n_tokens)
    np.testing.assert_array_equal(np.flatnonzero(tokens == data.eos_id), data.train.document_ends - 1)


def test_a_tokenizer_trained_here_is_trained_on_the_training_text_alone_and_kept(tmp_path: Path) -> None:
    texts = [f"held out zebra zebra zebra {i}" if i % 10 == 0 else text for i, text in enumerate(sentences(400))]
    config = text_config(tmp_path / "cache", write_jsonl(tmp_path / "a.jsonl", texts))
    data = prepare(config)
    vocabulary = json.loads((data.directory / "tokenizer.json").read_text())["model"]["vocab"]
    assert data.vocab_size == len(vocabulary) == 300
    assert "cat" in "".join(vocabulary)
    assert not any("eb" in token for token in vocabulary)  # zebra's pairs were never seen
    assert prepare(config).fingerprint == data.fingerprint


def test_stdlib_holds_this_interpreter_s_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linrnn.data.tokenise, "BATCH_CHARACTERS", 100_000)  # no more than it needs is tokenised
    config = StdlibDataConfig(
        name="stdlib",
        cache_dir=str(tmp_path),
        verify=True,
        reset_at_document=False,
        tokenizer=str(write_tokenizer(tmp_path / "tokenizer.json")),
        tokenizer_vocab_size=300,
        max_tokens=100_000,
        valid_fraction=0.1,
    )
    data = prepare(config)
    decode = load_tokenizer(str(tmp_path / "tokenizer.json")).decode
    first = data.train.read(0, int(data.train.document_ends[0]) - 1).tolist()
    files = sorted(Path(subprocess.__file__).parent.glob("*.py"))[:5]
    assert decode(first) in [file.read_text() for file in files]
    assert data.train.n_tokens >= 100_000


# ------------------------------------------------------------------------------------- identity and cache
def test_finished_data_is_opened_not_made_again(tmp_path: Path, corpus: Path) -> None:
    config = text_config(tmp_path / "cache", corpus)
    first = prepare(config)
    before = {path: path.stat().st_mtime_ns for path in first.directory.iterdir()}
    reports: list[Progress] = []
    assert prepare(config, progress=reports.append).fingerprint == first.fingerprint
    assert reports == []
    assert {path: path.stat().st_mtime_ns for path in first.directory.iterdir()} == before


@pytest.mark.parametrize("its_own", [False, True])
def test_finished_data_can_be_read_where_nothing_may_be_written(
    its_own: bool, tmp_path: Path, corpus: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a tokenizer that was trained on the data (`its_own`)."""
    config = text_config(tmp_path / "cache", corpus, tokenizer=None if its_own else tokenizer)
    fingerprint = prepare(config).fingerprint

    def refuse(*arguments: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(linrnn.data.cache, "_open", refuse)  # a lock's file
    for name in ("replace", "fsync", "rename"):
        monkeypatch.setattr(os, name, refuse)
    assert prepare(config).fingerprint == fingerprint


def test_the_fingerprint_follows_content_tokenizer_and_options_but_not_place(
    tmp_path: Path, corpus: Path, tokenizer: Path
) -> None:
    def fingerprint(path: Path = corpus, cache: str = "cache", **changes: Any) -> str:
        changes = {"tokenizer": tokenizer, **changes}
        return prepare(text_config(tmp_path / cache, path, **changes)).fingerprint

    moved = tmp_path / "elsewhere" / corpus.name
    moved.parent.mkdir()
    moved.write_bytes(corpus.read_bytes())
    assert fingerprint() == fingerprint(moved) == fingerprint(cache="other_cache")

    altered = tmp_path / "altered" / corpus.name
    altered.parent.mkdir()
    altered.write_bytes(corpus.read_bytes().replace(b"cat", b"cut", 1))
    other_tokenizer = write_tokenizer(tmp_path / "other.json", vocab_size=310)
    others = [
        fingerprint(altered),
        fingerprint(tokenizer=other_tokenizer),
        fingerprint(valid_fraction=0.2),
        fingerprint(max_tokens=1000),
    ]
    assert len({fingerprint(), *others}) == 5
    stat = corpus.stat()
    corpus.write_bytes(altered.read_bytes())  # same name and size, a byte changed a moment later
    os.utime(corpus, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert fingerprint() == others[0]


def test_two_at_once_prepare_it_once(tmp_path: Path, corpus: Path, tokenizer: Path, small_pieces: None) -> None:
    config = text_config(tmp_path / "cache", corpus, tokenizer=tokenizer)
    reports: list[list[Progress]] = [[], []]
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda mine=mine: results.append(prepare(config, progress=mine.append).fingerprint))
        for mine in reports
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [results[0]] * 2
    assert sum(any(report.stage == "tokenising" for report in mine) for mine in reports) == 1


def test_progress_counts_up_and_ends(tmp_path: Path, corpus: Path, tokenizer: Path, small_pieces: None) -> None:
    reports: list[Progress] = []
    data = prepare(text_config(tmp_path / "cache", corpus, tokenizer=tokenizer), progress=reports.append)
    assert len(reports) > 5
    assert [report.tokens for report in reports] == sorted(report.tokens for report in reports)
    assert reports[-1].finished
    assert reports[-1].tokens == data.train.n_tokens + data.valid.n_tokens
    assert reports[-1].documents == 400
    assert all(report.seconds_left is not None for report in reports[1:])


# ------------------------------------------------------------------------------------------ interruptions
def _killed_again_and_again(cache: Path, corpus: Path, valid: Path | None, tokenizer: Path, result: Path) -> None:
    """In another process: prepare data in children that are killed ever later. `result`: how many died."""
    linrnn.data.tokenise.BATCH_CHARACTERS, linrnn.data.shards.SHARD_TOKENS = 2000, 3000
    config = text_config(cache, corpus, tokenizer=tokenizer, valid_path=valid)
    deaths, calls_allowed = 0, 1
    while True:
        pid = os.fork()
        if pid == 0:
            _die_at_call(calls_allowed, before=bool(deaths % 2))
            prepare(config)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        deaths += 1
        calls_allowed = deaths + 1
    result.write_text(str(deaths))


def _die_at_call(number: int, before: bool) -> None:
    """Die at the n-th call that makes something durable, before or after it takes effect."""
    calls = [0]

    def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == number and before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*arguments, **options)
            if calls[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for name in ("fsync", "replace", "rename", "truncate", "unlink"):
        setattr(os, name, deadly(getattr(os, name)))


@pytest.mark.parametrize("own_validation", [False, True])
def test_killed_at_every_kind_of_moment_the_bytes_come_out_the_same(
    tmp_path: Path, corpus: Path, tokenizer: Path, small_pieces: None, own_validation: bool
) -> None:
    valid = write_jsonl(tmp_path / "valid.jsonl", sentences(100, seed=3)) if own_validation else None
    uninterrupted = prepare(text_config(tmp_path / "whole", corpus, tokenizer=tokenizer, valid_path=valid))
    assert len(uninterrupted.train.shards) > 3
    result = tmp_path / "deaths"
    process = start(_killed_again_and_again, tmp_path / "killed", corpus, valid, tokenizer, result)
    process.join()
    assert process.exitcode == 0
    assert int(result.read_text()) > 20
    killed = tmp_path / "killed" / uninterrupted.directory.name
    expected = directory_bytes(uninterrupted.directory)
    assert directory_bytes(killed) == expected
    assert not list((tmp_path / "killed").glob("*.partial"))


@pytest.mark.parametrize("moment", [1, 4, 9, 20])
def test_a_full_disk_is_named_and_the_next_attempt_continues(
    tmp_path: Path,
    corpus: Path,
    tokenizer: Path,
    small_pieces: None,
    monkeypatch: pytest.MonkeyPatch,
    moment: int,
) -> None:
    config = text_config(tmp_path / "cache", corpus, tokenizer=tokenizer)
    expected = directory_bytes(prepare(text_config(tmp_path / "whole", corpus, tokenizer=tokenizer)).directory)
    left = [moment]
    real = linrnn.data.shards.SplitWriter.append

    def full(writer: Any, *arguments: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(writer, *arguments)

    monkeypatch.setattr(linrnn.data.shards.SplitWriter, "append", full)
    with pytest.raises(StorageError, match="No space left on device"):
        prepare(config)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir() and path.suffix != ".partial"]
    reports: list[Progress] = []
    data = prepare(config, progress=reports.append)
    assert directory_bytes(data.directory) == expected
    if moment > 4:
        assert reports[0].tokens > 1000  # it went on, it did not start anew


def test_a_cache_directory_that_cannot_be_made_is_a_storage_error(
    tmp_path: Path, corpus: Path, tokenizer: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="file"):
        prepare(text_config(tmp_path / "file" / "cache", corpus, tokenizer=tokenizer))


# ---------------------------------------------------------------------------------------------- bad input
def test_bad_text_leaves_nothing_behind_and_works_once_mended(tmp_path: Path, tokenizer: Path) -> None:
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
def test_damaged_shards_are_found_and_named(
    tmp_path: Path, corpus: Path, tokenizer: Path, file: str, damage: Callable[[Path], None]
) -> None:
    config = text_config(tmp_path / "cache", corpus, tokenizer=tokenizer)
    directory = prepare(config).directory
    damage(directory / file)
    with pytest.raises(DataError, match=file) as raised:
        prepare(config).verify()  # a cut or missing file is found on opening, an altered byte by its hash
    assert f"delete {directory}" in raised.value.remedy


@pytest.mark.parametrize(
    ("texts", "changes", "error", "cause"),
    [
        (["", ""], {}, DataError, "0 train tokens"),
        (["x"], {}, DataError, "0 train tokens"),
        (["a", "b"], {"document_separator": "blank_line"}, ConfigError, "holds rows, each a document"),
        (["a", "b"], {"valid_fraction": 0.0}, ConfigError, "data.valid_fraction is 0"),
        (["a", "b"], {"text_field": "body"}, DataError, "no field 'body'"),
        (["a", "b"], {"tokenizer": "missing.json"}, DataError, "missing.json does not exist"),
        (["a", "b"], {"valid_path": "missing.txt"}, DataError, "data.valid_path=missing.txt does not exist"),
    ],
)
def test_unusable_text_or_options_are_refused(
    tmp_path: Path,
    tokenizer: Path,
    texts: list[str],
    changes: dict[str, Any],
    error: type[Exception],
    cause: str,
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    with pytest.raises(error, match=cause):
        prepare(text_config(tmp_path / "cache", path, **{"tokenizer": tokenizer, **changes}))


# --------------------------------------------------------------------------------------- what is held out
def split_texts(tmp_path: Path, path: Path | str | list[str], tokenizer: Path, **changes: Any) -> dict[str, list[str]]:
    data = prepare(text_config(tmp_path / "cache", path, tokenizer=tokenizer, **changes))
    return texts_of(data, load_tokenizer(str(tokenizer)))


@pytest.mark.parametrize("empty", ["every second", "every hundredth", "the first hundred"])
@pytest.mark.parametrize("tokenizer_given", [True, False])
def test_empty_rows_do_not_count_in_the_held_out_split(
    tmp_path: Path, tokenizer: Path, empty: str, tokenizer_given: bool
) -> None:
    is_empty = {"every second": lambda i: i % 2 == 0, "every hundredth": lambda i: i % 100 == 0}.get(
        empty, lambda i: i < 100
    )
    rows = ["" if is_empty(i) else text for i, text in enumerate(sentences(500))]
    path, kept = write_jsonl(tmp_path / "a.jsonl", rows), [row for row in rows if row]
    if tokenizer_given:
        texts = split_texts(tmp_path, path, tokenizer, valid_fraction=0.01)
        assert texts == {"valid": kept[::100], "train": [text for i, text in enumerate(kept) if i % 100]}
    else:
        data = prepare(text_config(tmp_path / "cache", path, valid_fraction=0.01))
        assert (data.valid.n_documents, data.train.n_documents) == (len(kept[::100]), len(kept) - len(kept[::100]))


def test_documents_without_tokens_are_counted_in_a_line(tmp_path: Path, tokenizer: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["", *sentences(30), ""])
    said: list[str] = []
    prepare(text_config(tmp_path / "cache", path, tokenizer=tokenizer), progress=lambda p: said.append(p.stage))
    assert said[-1] == "2 documents hold no token, and are left out"


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


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("form", ["txt", "md", "jsonl"])
def test_a_single_text_holds_out_its_end(
    tmp_path: Path, tokenizer: Path, text: str, form: str, fraction: float
) -> None:
    path, content = tmp_path / f"a.{form}", TEXTS[text]
    path.write_bytes((json.dumps({"text": content}) if form == "jsonl" else content).encode())
    texts = split_texts(tmp_path, path, tokenizer, valid_fraction=fraction)
    assert [len(documents) for documents in texts.values()] == [1, 1]
    [train], [valid] = texts["train"], texts["valid"]
    assert train + valid == content
    assert max(1, round(fraction * len(content))) <= len(valid) <= 1.5 * fraction * len(content) + 1
    if text == "lines" and fraction < 0.5:
        assert train.endswith("\n")


def test_a_byte_order_mark_is_in_neither_split(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_bytes(BOOK.encode("utf-8-sig"))
    texts = split_texts(tmp_path, tmp_path / "a.txt", tokenizer)
    assert texts["train"][0] + texts["valid"][0] == BOOK


@pytest.mark.parametrize(("separator", "mark"), [("blank_line", ""), ("<|endoftext|>", "<|endoftext|>")])
def test_paragraphs_are_held_out_in_one_piece_at_the_end(
    tmp_path: Path, tokenizer: Path, separator: str, mark: str
) -> None:
    paragraphs = [f"{text}\n" for text in sentences(400)]
    for i in range(2):
        (tmp_path / f"{i}.txt").write_text(mark.join(paragraphs[200 * i : 200 * i + 200]) + mark)
    texts = split_texts(tmp_path, str(tmp_path / "*.txt"), tokenizer, document_separator=separator)
    assert texts["train"] + texts["valid"] == paragraphs
    share = sum(map(len, texts["valid"])) / sum(map(len, paragraphs))
    assert 0.1 <= share <= 0.15


def test_one_long_text_among_short_ones_is_cut(tmp_path: Path, tokenizer: Path) -> None:
    contents = ["short\n", BOOK, "last\n"]
    paths = [tmp_path / f"{i}.txt" for i in range(3)]
    for path, content in zip(paths, contents, strict=True):
        path.write_text(content)
    texts = split_texts(tmp_path, [str(path) for path in paths], tokenizer)
    assert texts["train"][0] == "short\n"
    assert texts["train"][1] + texts["valid"][0] == BOOK
    assert texts["valid"][1:] == ["last\n"]


def test_many_files_hold_out_every_tenth(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(sentences(30)):
        (tmp_path / "texts" / f"{i:02}.py").write_text(text)
    texts = split_texts(tmp_path, tmp_path / "texts", tokenizer)
    assert texts["valid"] == sentences(30)[::10]


def test_the_end_that_is_held_out_is_the_same_with_max_tokens_and_another_fraction_is_other_data(
    tmp_path: Path, tokenizer: Path
) -> None:
    (tmp_path / "a.txt").write_text(BOOK)
    config = text_config(tmp_path / "cache", tmp_path / "a.txt", tokenizer=tokenizer, document_separator="\n")
    whole, part = prepare(config), prepare(replace(config, max_tokens=100))
    assert whole.valid.n_tokens == part.valid.n_tokens
    assert 100 <= part.train.n_tokens < 130
    others = [prepare(replace(config, valid_fraction=0.2)), prepare(replace(config, document_separator=None))]
    assert len({data.fingerprint for data in (whole, part, *others)}) == 4


def test_a_tokenizer_trained_here_never_sees_the_end_that_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(BOOK + "zebra\n" * 200)
    data = prepare(text_config(tmp_path / "cache", tmp_path / "a.txt", valid_fraction=0.1))
    assert data.tokenizer is not None
    assert data.tokenizer.decode(data.valid.read(0, data.valid.n_tokens - 1).tolist()).endswith("zebra\n" * 200)
    assert not any("eb" in token for token in json.loads(data.tokenizer.json)["model"]["vocab"])


def test_text_too_small_for_its_tokenizer_gives_the_entries_it_has_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A small text, a very small text.\n" * 20)
    said: list[str] = []
    config = text_config(tmp_path / "cache", tmp_path / "a.txt", tokenizer_vocab_size=4096)
    data = prepare(config, progress=lambda p: said.append(p.stage))
    assert 257 < data.vocab_size < 350
    assert f"the text is too small for more than {data.vocab_size:,} of them" in said
    assert f"{data.vocab_size:,} entries trained on it" in data.description
    assert data.vocab_size <= vocabulary_size(config) == 4096


def test_what_is_left_out_of_a_folder_and_what_a_tokenizer_drops_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    write_jsonl(folder / "texts.jsonl", [*sentences(30), "a tea 🙂🙂 東"])
    (folder / "notes.md").write_text("x")
    bpe = HfTokenizer(models.BPE({c: i for i, c in enumerate(map(chr, range(32, 127)))}, []))
    bpe.save(str(tmp_path / "ascii.json"))
    said: list[str] = []
    config = text_config(tmp_path / "cache", folder, tokenizer=tmp_path / "ascii.json")
    prepare(config, progress=lambda p: said.append(p.stage))
    assert said[0] == f"left out of {folder}: 1 .md"
    n = sum(ord(c) > 126 for text in sentences(30) for c in text) + 3
    assert said[-1].startswith(f"tokenizer {tmp_path}/ascii.json drops {n} characters of the text, of 5 kinds: ")
    said.clear()
    prepare(config, progress=lambda p: said.append(p.stage))
    assert said == [f"left out of {folder}: 1 .md"], "it is not prepared again"


# ----------------------------------------------------------------------------------------- the real thing
def test_the_wikipedia_slice_comes_back_word_for_word(tmp_path: Path) -> None:
    shared = shared_data()
    tokenizer_path = shared / "tokenizers" / "mistral-v1-32000.tokenizer.json.xz"
    valid = shared / "wikipedia-en-slice.valid.jsonl.xz"
    train = shared / "wikipedia-en-slice.train.jsonl.xz"
    config = text_config(tmp_path, train, valid_path=valid, tokenizer=tokenizer_path, max_tokens=200_000)
    data = prepare(config)
    with lzma.open(valid, "rt") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    assert texts_of(data, load_tokenizer(str(tokenizer_path)))["valid"] == texts
    assert data.valid.n_bytes == len("".join(texts).encode())
    assert (data.vocab_size, data.eos_id, data.train.dtype) == (32_000, 2, np.dtype("<u2"))
    for split in (data.train, data.valid):  # a space is put before every text
        token_bytes = data.token_bytes(split, None, pytest.fail)
    batches = BatchesOnce(data.valid, 2048, 8, token_bytes=token_bytes)
    first = load_tokenizer(str(tokenizer_path)).decode(data.valid.read(0, 1))
    assert sum(batch.n_bytes or 0 for batch in batches) == data.valid.n_bytes - len(first.encode())
    batch = next(BatchLoader(data.train, seq_len=2048, batch_size=8, seed=0))
    assert batch.n_tokens == 8 * 2048
