"""Local files: every format gives the same documents. The error for a bad file names the line and a remedy."""

import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from data_helpers import sentences, write_jsonl

from linrnn.core.errors import DataError
from linrnn.data.readers import find_files, read_documents


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


PACKERS: dict[str, Callable[[bytes], bytes]] = {".xz": lzma.compress, ".gz": gzip.compress, ".zst": zstd}


def texts_of(*paths: Path, field: str = "text") -> list[str]:
    return [document.text for document in read_documents(list(paths), field)]


@pytest.mark.parametrize("suffix", ["", *PACKERS])
def test_jsonl_gives_every_text_in_order(tmp_path: Path, suffix: str) -> None:
    expected = sentences(100)
    plain = write_jsonl(tmp_path / "a.jsonl", expected)
    path = tmp_path / f"a.jsonl{suffix}"
    if suffix:
        path.write_bytes(PACKERS[suffix](plain.read_bytes()))
    documents = list(read_documents([path], "text"))
    assert [document.text for document in documents] == expected
    fractions = [document.fraction for document in documents]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    expected = sentences(100)
    pyarrow.parquet.write_table(pyarrow.table({"text": expected, "n": list(range(100))}), tmp_path / "a.parquet")
    assert texts_of(tmp_path / "a.parquet") == expected


def test_a_blank_line_ends_a_txt_document_and_no_byte_is_lost(tmp_path: Path) -> None:
    parts = ["\n \n one\ntwo\n\n\n", "three\r\n\t\r\n", "four\n\n", "five"]
    path = tmp_path / "a.txt"
    path.write_bytes("".join(parts).encode())
    assert texts_of(path) == parts


def test_a_txt_file_of_blank_lines_holds_no_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n \n\t\n")
    assert texts_of(tmp_path / "a.txt") == []


def test_zst_of_several_frames_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.zst"
    path.write_bytes(zstd(b"one\n\n") + zstd(b"") + zstd(b"two\n\n" * 300_000))
    assert b"".join(text.encode() for text in texts_of(path)) == b"one\n\n" + b"two\n\n" * 300_000


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("keep", [0.5, 0.98])
def test_a_compressed_file_cut_short_is_never_taken_for_whole(tmp_path: Path, suffix: str, keep: float) -> None:
    data = PACKERS[suffix](b"".join(json.dumps({"text": text}).encode() + b"\n" for text in sentences(3000)))
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(DataError, match=rf"a\.jsonl{suffix} is corrupt or cut short"):
        texts_of(path)


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_file_that_is_not_what_its_name_says_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(b"plain text, not compressed\n" * 10)
    with pytest.raises(DataError, match=rf"a\.jsonl{suffix} is corrupt"):
        texts_of(path)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ('{"text": "open', "line 2: not JSON"),
        ('["text"]', "line 2: not a JSON object"),
        ('{"body": "x"}', "line 2 has no field 'text'"),
        ('{"text": 5}', "line 2: text is int, not text"),
        ('{"text": null}', "line 2: text is null, not text"),
        ('{"text": "\\ud800"}', "line 2: text has half of a surrogate pair"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path: Path, line: str, cause: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl") as raised:
        texts_of(path)
    assert cause in raised.value.cause
    if "body" in line:
        assert "body" in raised.value.remedy


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("first\nnaïve\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"a\.txt, line 2: not UTF-8"):
        texts_of(path)


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("text".encode("utf-8-sig"))
    assert texts_of(path) == ["text"]


def test_a_parquet_without_the_column_names_those_it_has(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="no field 'text'") as raised:
        texts_of(tmp_path / "a.parquet")
    assert "body" in raised.value.remedy


def test_a_truncated_parquet_is_named(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": sentences(100)}), buffer)
    (tmp_path / "a.parquet").write_bytes(buffer.getvalue()[:-50])
    with pytest.raises(DataError, match=r"a\.parquet is not an intact parquet file"):
        texts_of(tmp_path / "a.parquet")


def test_a_directory_gives_its_data_files_sorted(tmp_path: Path) -> None:
    for name in ("b.txt", "a.jsonl", "sub/c.txt.xz", ".hidden/d.txt", "README.md", "x.json", "p.parquet.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = [path.relative_to(tmp_path).as_posix() for path in find_files(str(tmp_path), "data.path")]
    assert found == ["a.jsonl", "b.txt", "sub/c.txt.xz"]
    assert find_files(f"{tmp_path}/**/*.txt*", "data.path") == [tmp_path / "b.txt", tmp_path / "sub/c.txt.xz"]


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("missing.txt", None, "does not exist"),
        ("empty.txt", "", "is empty"),
        ("notes.md", "x", "unknown type"),
        ("table.parquet.gz", "x", "unknown type"),
        ("folder", None, "does not exist"),
    ],
)
def test_a_file_that_cannot_be_data_is_refused(tmp_path: Path, name: str, content: str | None, cause: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=cause):
        find_files(str(tmp_path / name), "data.path")


def test_a_directory_without_data_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("x")
    with pytest.raises(DataError, match="holds no data files"):
        find_files(str(tmp_path), "data.path")
