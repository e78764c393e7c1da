"""A compressed file gives all its documents, or an error that says why not. It never gives some of them."""

import bz2
import gzip
import io
import json
import lzma
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from data_helpers import write_tokenizer

from linrnn.core.errors import DataError
from linrnn.data.readers import read_documents
from linrnn.data.tokenizer import load_tokenizer


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".xz": lzma.compress,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": zstd,
}
SUFFIXES = pytest.mark.parametrize("suffix", PACKERS)


def lines(name: str, count: int = 5) -> bytes:
    return "".join(json.dumps({"text": f"{name}{i}"}) + "\n" for i in range(count)).encode()


def texts_in(path: Path) -> list[str]:
    return [document.text for document in read_documents([path], "text")]


def written(tmp_path: Path, suffix: str, content: bytes) -> Path:
    path = tmp_path / f"d.jsonl{suffix}"
    path.write_bytes(content)
    return path


BOTH = [f"{name}{i}" for name in "ab" for i in range(5)]
SKIPPED = b"\x53\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"notes"


@SUFFIXES
@pytest.mark.parametrize("empty", ["", "first", "between", "last"])
def test_every_stream_is_read(suffix: str, empty: str, tmp_path: Path) -> None:
    pack = PACKERS[suffix]
    nothing = {place: pack(b"") if place == empty else b"" for place in ("first", "between", "last")}
    content = nothing["first"] + pack(lines("a")) + nothing["between"] + pack(lines("b")) + nothing["last"]
    assert texts_in(written(tmp_path, suffix, content)) == BOTH


@SUFFIXES
def test_a_document_may_begin_in_one_stream_and_end_in_the_next(suffix: str, tmp_path: Path) -> None:
    whole = lines("a") + lines("b")
    content = b"".join(PACKERS[suffix](whole[i : i + 7]) for i in range(0, len(whole), 7))
    assert texts_in(written(tmp_path, suffix, content)) == BOTH


@SUFFIXES
def test_a_stream_that_ends_at_the_end_of_a_chunk_is_followed_by_the_next(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (PACKERS[suffix](lines(name)) for name in "ab")
    path = written(tmp_path, suffix, a + b)
    for chunk in (1, 2, 3, 5, len(a) - 1, len(a), len(a) + 1, len(a) + 3, len(a) + 17):
        monkeypatch.setattr("linrnn.data.compression.CHUNK", max(chunk, 18))
        assert texts_in(path) == BOTH, chunk


@pytest.mark.parametrize(
    ("suffix", "between", "after"),
    [
        (".xz", 4, 0), (".xz", 0, 4), (".xz", 8, 100_000), (".xz", 200_000, 0),
        (".gz", 0, 1), (".gz", 512, 512), (".bz2", 0, 3),
    ],
)  # fmt: skip
def test_padding_with_zeros_is_read_over(suffix: str, between: int, after: int, tmp_path: Path) -> None:
    a, b = (PACKERS[suffix](lines(name)) for name in "ab")
    assert texts_in(written(tmp_path, suffix, a + bytes(between) + b + bytes(after))) == BOTH


def test_frames_of_zstd_that_are_to_be_skipped_are_skipped(tmp_path: Path) -> None:
    content = SKIPPED + zstd(lines("a")) + SKIPPED + zstd(lines("b")) + SKIPPED
    assert texts_in(written(tmp_path, ".zst", content)) == BOTH


@SUFFIXES
@pytest.mark.parametrize(
    "damage",
    [
        lambda a, b: a + b"X" + b[1:],
        lambda a, b: a + b"rubbish, no stream",
        lambda a, b: a + b"\n",
        lambda a, b: a + b"\x00\x00\x00\x00rubbish",
        lambda a, b: a + b[:3],
        lambda a, b: a + b[:-1],
        lambda a, b: a + b[: len(b) // 2],
        lambda a, b: a + b + a[:1],
        lambda a, b: a[:-1],
        lambda a, b: a + b[:-6] + bytes([b[-6] ^ 1]) + b[-5:],
        lambda a, b: a + b[: len(b) // 2] + bytes([b[len(b) // 2] ^ 1]) + b[len(b) // 2 + 1 :],
        lambda a, b: a + lines("b"),
    ],
)
def test_what_is_damaged_is_never_read_in_part(
    suffix: str, damage: Callable[[bytes, bytes], bytes], tmp_path: Path
) -> None:
    a, b = (PACKERS[suffix](lines(name, 200)) for name in "ab")
    with pytest.raises(DataError, match=rf"d\.jsonl{suffix} is corrupt or cut short"):
        texts_in(written(tmp_path, suffix, damage(a, b)))


@pytest.mark.parametrize("zeros", [1, 2, 3, 5])
def test_padding_that_xz_refuses_is_refused(zeros: int, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="multiples of 4"):
        texts_in(written(tmp_path, ".xz", lzma.compress(lines("a")) + bytes(zeros)))


def test_padding_of_zstd_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is corrupt or cut short"):
        texts_in(written(tmp_path, ".zst", zstd(lines("a")) + bytes(4)))


@pytest.mark.parametrize("window", [27, 28, 31])
def test_a_long_window_of_zstd_is_read(window: int, tmp_path: Path) -> None:
    long = zstandard.ZstdCompressionParameters(window_log=window, write_content_size=False, enable_ldm=True)
    out = io.BytesIO()
    with zstandard.ZstdCompressor(compression_params=long).stream_writer(out, closefd=False) as writer:
        writer.write(lines("a") + lines("b"))
    assert texts_in(written(tmp_path, ".zst", out.getvalue())) == BOTH


def test_a_dictionary_that_is_missing_is_named(tmp_path: Path) -> None:
    dictionary = zstandard.train_dictionary(1000, [b"sample %d of %d" % (i, i * i) for i in range(1000)])
    packed = zstandard.ZstdCompressor(dict_data=dictionary).compress(lines("b"))
    for content in (packed, zstd(lines("a")) + packed):
        with pytest.raises(DataError, match=rf"dictionary \(id {dictionary.dict_id()}\)") as error:
            texts_in(written(tmp_path, ".zst", content))
        assert "zstd -d -D" in error.value.remedy


@pytest.mark.parametrize("held", ["", *PACKERS])
@pytest.mark.parametrize("suffix", ["", *PACKERS])
def test_content_of_another_format_is_named(suffix: str, held: str, tmp_path: Path) -> None:
    if suffix == held:
        pytest.skip("the right name")
    names = {".xz": "xz", ".gz": "gzip", ".bz2": "bzip2", ".zst": "zstd"}
    path = written(tmp_path, suffix, PACKERS.get(held, bytes)(lines("a")))
    with pytest.raises(DataError, match=f"holds {names[held]}" if held else f"is no {names[suffix]} file"):
        texts_in(path)


@SUFFIXES
def test_the_format_s_own_program_writes_what_is_read(suffix: str, tmp_path: Path) -> None:
    program = {".xz": "xz", ".gz": "gzip", ".bz2": "bzip2", ".zst": "zstd"}[suffix]
    if shutil.which(program) is None:
        pytest.skip(f"no {program}")
    packed = [subprocess.run([program, "-c"], input=lines(n), capture_output=True, check=True).stdout for n in "ab"]
    assert texts_in(written(tmp_path, suffix, b"".join(packed))) == BOTH


@SUFFIXES
def test_a_name_in_capitals_is_understood(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"D.JSONL{suffix.upper()}"
    path.write_bytes(PACKERS[suffix](lines("a") + lines("b")))
    assert texts_in(path) == BOTH


@SUFFIXES
def test_a_tokenizer_s_file_is_read_whole_or_refused(suffix: str, tmp_path: Path) -> None:
    content = write_tokenizer(tmp_path / "plain.json").read_bytes()
    halves = [PACKERS[suffix](half) for half in (content[:1000], content[1000:])]
    path = tmp_path / f"tokenizer.json{suffix}"
    path.write_bytes(b"".join(halves))
    assert load_tokenizer(str(path)).hash == load_tokenizer(str(tmp_path / "plain.json")).hash
    for damaged in (halves[0] + halves[1][:-5], b"".join(halves) + b"rubbish", PACKERS[suffix](content) + b"X"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"tokenizer\.json{suffix} cannot be read"):
            load_tokenizer(str(path))


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.xz"])
@pytest.mark.parametrize(
    ("held", "content"),
    [
        ("lzma", lzma.compress(lines("a"), format=lzma.FORMAT_ALONE)),
        ("zip", b"PK\x03\x04\x14\0\0\0\x08\0\xff\xfe" + bytes(range(200, 250))),
        ("lz4", b"\x04\x22\x4d\x18\x64\x40\xa7" + bytes(range(200, 250))),
    ],
    ids=["lzma", "zip", "lz4"],
)
def test_the_remedy_for_a_format_that_no_ending_makes_readable_is_to_unpack(
    name: str, held: str, content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        texts_in(path)
    assert held in error.value.cause
    assert error.value.remedy == f"unpack it: {held} is not read"
