"""Local files: every format gives the same documents. The error for a bad file names the line and a remedy."""

import gzip
import io
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from data_helpers import sentences, write_jsonl

from linrnn.core.errors import DataError
from linrnn.data import readers
from linrnn.data.readers import BLANK_LINE, find_files, read_documents


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


PACKERS: dict[str, Callable[[bytes], bytes]] = {".xz": lzma.compress, ".gz": gzip.compress, ".zst": zstd}


def texts_of(*paths: Path, field: str = "text", separator: str | None = None) -> list[str]:
    return [document.text for document in read_documents(list(paths), field, separator)]


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


PARTS = ["\n \n one\ntwo\n\n\n", "three\r\n\t\r\n", "four\n\n", "five"]


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_bytes("".join(PARTS).encode())
    assert texts_of(path) == ["".join(PARTS)]


def test_a_blank_line_ends_a_document_on_request_and_no_byte_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("".join(PARTS).encode())
    assert texts_of(path, separator=BLANK_LINE) == PARTS


@pytest.mark.parametrize(
    ("text", "separator", "documents"),
    [
        ("one<|endoftext|>two<|endoftext|>", "<|endoftext|>", ["one", "two"]),
        ("<|endoftext|>\n<|endoftext|> \none", "<|endoftext|>", [" \none"]),
        ("one\n---\ntwo\n---\n\n---\nthree", "\n---\n", ["one", "two", "three"]),
        ("one\n\ntwo\n\n\nthree", "\n\n", ["one", "two", "\nthree"]),
        ("one.*two", ".*", ["one", "two"]),
        ("a" * 50 + "aab" + "aaab", "aab", ["a" * 50, "a"]),
        ("no separator\nat all", "\x00", ["no separator\nat all"]),
        ("one\r\ntwo", "\r\n", ["one", "two"]),
    ],
)
def test_a_string_ends_a_document_and_is_no_part_of_it(
    text: str, separator: str, documents: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    assert texts_of(path, separator=separator) == documents == [d for d in text.split(separator) if d.strip()]


@pytest.mark.parametrize("text", ["line\n" * 50, "word " * 60, "x" * 333, "short\n" + "y" * 400 + "\n"])
@pytest.mark.parametrize("separator", [None, BLANK_LINE, "|"])
def test_a_long_document_is_cut_and_no_character_is_lost(
    text: str, separator: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "LONGEST", 100)
    (tmp_path / "a.txt").write_text(text)
    found = texts_of(tmp_path / "a.txt", separator=separator)
    assert "".join(found).rstrip() == text.rstrip()
    assert all(len(document) <= 100 for document in found)
    if "\n" in text[:100] and "y" not in text:
        assert all(document.endswith("\n") for document in found)


def test_a_txt_file_of_blank_lines_holds_no_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n \n\t\n")
    assert texts_of(tmp_path / "a.txt") == []


def test_zst_of_several_frames_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.zst"
    path.write_bytes(zstd(b"one\n\n") + zstd(b"") + zstd(b"two\n\n" * 300_000))
    assert b"".join(text.encode() for text in texts_of(path, separator=BLANK_LINE)) == b"one\n\n" + b"two\n\n" * 300_000


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("keep", [0.5, 0.98])
def test_a_compressed_file_cut_short_is_never_taken_for_whole(tmp_path: Path, suffix: str, keep: float) -> None:
    data = PACKERS[suffix](b"".join(json.dumps({"text": text}).encode() + b"\n" for text in sentences(3000)))
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(DataError, match=rf"a\.jsonl{suffix} is corrupt or cut short"):
        texts_of(path)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ('{"text": "open', "line 2: not JSON"),
        ('["text"]', "line 2: not a JSON object"),
        ('{"body": "x"}', "line 2 has no field 'text'"),
        ('{"text": 5}', "line 2: text is a number, not text"),
        ('{"text": null}', "line 2: text is null, not text"),
        ('{"text": ["x"]}', "line 2: text is a list, not text"),
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


@pytest.mark.parametrize("number", ["9" * 5000, "-" + "9" * 5000, "9" * 5000 + ".5", "1e99999", "[" + "7" * 4301 + "]"])
def test_a_number_of_any_length_beside_the_text_ends_no_file(tmp_path: Path, number: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": ' + number + ', "text": "one"}\n{"text": "two"}\n')
    assert texts_of(tmp_path / "a.jsonl") == ["one", "two"]


@pytest.mark.parametrize("start", ["[\n", "{\n", '[{"text": "one"}]\n'])
def test_json_that_is_not_in_lines_is_refused_with_the_way_out(tmp_path: Path, start: str) -> None:
    (tmp_path / "a.json").write_text(start)
    with pytest.raises(DataError, match=r"a\.json, line 1: not") as error:
        texts_of(tmp_path / "a.json")
    assert "jq" in error.value.remedy


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


def make(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f'{{"text": "{name}"}}\n')


def found_in(root: Path, *paths: str) -> tuple[list[str], list[str]]:
    said: list[str] = []
    files = find_files([f"{root}/{path}" for path in paths], "data.path", said.append)
    return [file.relative_to(root).as_posix() for file in files], [line.partition(": ")[2] for line in said]


def test_a_directory_gives_its_data_files_sorted_and_counts_what_it_leaves_out(tmp_path: Path) -> None:
    make(tmp_path, "b.txt", "a.jsonl", "sub/c.txt.xz", ".hidden/d.txt", "sub/.e.jsonl", "README.md", "x.json")
    make(tmp_path, "p.parquet.gz", "F.JSONL", "sub/g.Parquet", "h.jsonl.bz2", "i.ndjson", "j.jsonl.GZ", "k.TXT")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "gone.jsonl").symlink_to("nowhere")
    files, [said] = found_in(tmp_path, "")
    rows = [
        "F.JSONL",
        "a.jsonl",
        "b.txt",
        "h.jsonl.bz2",
        "i.ndjson",
        "j.jsonl.GZ",
        "k.TXT",
        "sub/c.txt.xz",
        "sub/g.Parquet",
    ]
    assert files == rows
    counted = ["1 hidden", "1 hidden folders", "1 .md", "1 .json", "1 .parquet.gz", "1 empty", "1 broken links"]
    assert sum(part in said.split(", ") for part in counted) == 6
    assert said.endswith(", 1 of other kinds")
    assert found_in(tmp_path, "**/*.txt*")[0] == ["b.txt", "sub/c.txt.xz"]


def test_a_directory_of_text_files_gives_all_of_them(tmp_path: Path) -> None:
    make(tmp_path, "a.md", "b.py", "sub/c.rst", "LICENSE", "d.md.gz")
    (tmp_path / "d.md.gz").write_bytes(gzip.compress(b"text"))
    (tmp_path / "e.tar.gz").write_bytes(gzip.compress(b"a\0b"))
    (tmp_path / "f.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "g.dat").write_bytes(b"a\0b")
    (tmp_path / "h.md").write_bytes(
        b"x" * 4095 + "é".encode() * 9
    )  # a character lies across the end of what is looked at
    (tmp_path / "sub/__init__.py").touch()
    files, [said] = found_in(tmp_path, "")
    assert files == ["LICENSE", "a.md", "b.py", "d.md.gz", "h.md", "sub/c.rst"]
    assert sorted(said.split(", ")) == ["1 .dat", "1 .png", "1 .tar.gz", "1 empty"]


def test_folders_and_files_behind_links_are_read_once(tmp_path: Path) -> None:
    make(tmp_path, "data/a.jsonl", "data/deep/b.jsonl", "disk2/c.jsonl", "disk3/d.jsonl")
    links = {"part2": "../disk2", "again": "../disk2", "loop": ".", "deep/up": "..", "deep/self": "self"}
    links |= {"e.jsonl": "../disk3/d.jsonl", "f.jsonl": "a.jsonl", "deep/other": "../loop"}
    for name, target in links.items():
        (tmp_path / "data" / name).symlink_to(target)
    files, [said] = found_in(tmp_path, "data")
    assert files == ["data/a.jsonl", "data/again/c.jsonl", "data/deep/b.jsonl", "data/e.jsonl"]
    assert sorted(said.split(", ")) == [
        "1 broken links", "1 named twice", "4 linked folders that are read already",
    ]  # fmt: skip
    (tmp_path / "link").symlink_to("data")
    assert len(found_in(tmp_path, "link")[0]) == 4
    assert len(found_in(tmp_path, "data/**/*.jsonl")[0]) == 4


@pytest.mark.parametrize(
    ("paths", "files", "left_out"),
    [
        (["part*"], ["part1/a.jsonl", "part2/b.jsonl", "part2/sub/c.jsonl"], []),
        (["*"], ["d.jsonl", "part1/a.jsonl", "part2/b.jsonl", "part2/sub/c.jsonl"], ["1 .png"]),
        (["part2/"], ["part2/b.jsonl", "part2/sub/c.jsonl"], []),
        (["part2", "d.jsonl"], ["part2/b.jsonl", "part2/sub/c.jsonl", "d.jsonl"], []),
        (["d.jsonl", "d.jsonl", "*.jsonl"], ["d.jsonl"], ["2 named twice"]),
        (["part1/../d.jsonl"], ["part1/../d.jsonl"], []),
        (["notes/*.json"], None, ["1 .json"]),
        (["notes/x.json"], ["notes/x.json"], []),
    ],
)
def test_several_paths_globs_of_folders_and_slashes(
    paths: list[str], files: list[str] | None, left_out: list[str], tmp_path: Path
) -> None:
    make(tmp_path, "part1/a.jsonl", "part2/b.jsonl", "part2/sub/c.jsonl", "d.jsonl", "notes/x.json")
    (tmp_path / "z.png").write_bytes(b"\x89PNG")
    if files is None:
        with pytest.raises(DataError, match=rf"holds no data files \({left_out[0]} left out\)"):
            found_in(tmp_path, *paths)
        return
    if "*" in paths:
        (tmp_path / "notes/x.json").unlink()
        (tmp_path / "notes").rmdir()
    found, said = found_in(tmp_path, *paths)
    assert (found, said) == (files, left_out)


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make(tmp_path, "a.jsonl")
    assert find_files("~/*.jsonl", "data.path") == find_files(["~"], "data.path") == [tmp_path / "a.jsonl"]


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("missing.txt", None, "does not exist"),
        ("empty.txt", "", "is empty"),
        ("table.parquet.gz", "x", "unknown type"),
        ("folder", None, "does not exist"),
        ("x" * 300, None, "does not exist"),
    ],
)
def test_a_file_that_cannot_be_data_is_refused(tmp_path: Path, name: str, content: str | None, cause: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=cause):
        find_files(str(tmp_path / name), "data.path")


def test_what_cannot_be_read_twice_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match="no file that can be read twice"):
        find_files(str(tmp_path / "pipe.txt"), "data.path")


def test_a_directory_without_data_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.bin").write_bytes(b"\0")
    with pytest.raises(DataError, match=r"holds no data files \(1 \.bin left out\)"):
        find_files(str(tmp_path), "data.path")
