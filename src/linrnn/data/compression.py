"""Read files that may be compressed (.xz, .gz, .bz2, .zst), with all their streams.

Such a file may hold several streams, and zero bytes between them where its format allows that. Whatever else follows a
stream is an error: the documents behind it would be lost.
"""

import bz2
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import zstandard

from linrnn.core.errors import DataError, first_line

CHUNK = 1 << 16
LONGEST_WINDOW = 1 << 31  # of zstd --long=31
HEADER = 18  # bytes; a zstd frame's header has at most so many, and the first bytes of the others fewer


class _Format(NamedTuple):
    name: str
    begins: tuple[bytes, ...]
    padding: int | None  # zero bytes that may follow a stream: a multiple of this; None: there may be none
    decompressor: Callable[[], Any]


FORMATS = {
    ".xz": _Format("xz", (b"\xfd7zXZ\0",), 4, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ)),
    ".gz": _Format("gzip", (b"\x1f\x8b",), 1, lambda: zlib.decompressobj(16 + zlib.MAX_WBITS)),
    ".bz2": _Format("bzip2", (b"BZh",), 1, bz2.BZ2Decompressor),
    ".zst": _Format(
        "zstd",
        (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + i]) + b"\x2a\x4d\x18" for i in range(16))),  # also frames to be skipped
        None,
        lambda: zstandard.ZstdDecompressor(max_window_size=LONGEST_WINDOW).decompressobj(),
    ),
}
_BEGINNINGS = {begin: form.name for form in FORMATS.values() for begin in form.begins}
_BEGINNINGS |= {b"PAR1": "parquet", b"PK\x03\x04": "zip", b"\x5d\0\0": "lzma", b"\x04\x22\x4d\x18": "lz4"}
UNREAD = {"zip", "lzma", "lz4"}


@contextmanager
def open_file(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """A file's content, decompressed if its name says that it is compressed, and the file itself.

    Raises:
        DataError: the content is not of the format that the name says, or needs a dictionary. Damage found while
            reading is one of `DAMAGE`.
    """
    with open(path, "rb") as raw:
        if (form := FORMATS.get(path.suffix.lower())) is None:
            yield raw, raw
        else:
            yield io.BufferedReader(_Reader(_decompressed(raw, form, path)), 1 << 20), raw


DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError)


def read_bytes(path: Path) -> bytes:
    """All of a file's content, decompressed if its name says that it is compressed.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with open_file(path) as (content, _):
            return content.read()
    except DAMAGE as error:
        raise DataError(f"{path} cannot be read: {first_line(error)}", "fetch the file again") from None


def other_format(path: Path) -> str | None:
    """The binary format with whose first bytes a file begins; None if it is none that is known here."""
    with open(path, "rb") as file:
        return _named(file.read(HEADER))


def remedy_for(held: str | None) -> str:
    """What to do with a file whose ending does not say that it holds this format."""
    if held in UNREAD:
        return f"unpack it: {held} is not read"
    return (
        f"give it the ending of {held}, or unpack it"
        if held
        else "give it the ending of what it holds, or fetch it again"
    )


def _named(head: bytes) -> str | None:
    return next((name for begin, name in _BEGINNINGS.items() if head.startswith(begin)), None)


def _decompressed(raw: BinaryIO, form: _Format, path: Path) -> Iterator[bytes]:
    streams, data = 0, raw.read(CHUNK)
    while data:
        if not data.startswith(form.begins):
            if streams:
                raise EOFError(f"what follows its {form.name} stream {streams} is no {form.name} stream")
            held = _named(data)
            raise DataError(
                f"{path} is no {form.name} file" + (f": it holds {held}" if held else ""),
                remedy_for(held),
            )
        if form.name == "zstd" and (dictionary := _dictionary(data)):
            raise DataError(
                f"{path} was compressed with a dictionary (id {dictionary}), which it does not hold",
                "decompress it first: zstd -d -D DICTIONARY",
            )
        stream = form.decompressor()
        while not stream.eof:
            if not data and not (data := raw.read(CHUNK)):
                raise EOFError(f"its {form.name} stream {streams + 1} is cut short")
            yield stream.decompress(data)
            data = b""
        streams += 1
        data = _after_padding(stream.unused_data, raw, form)


def _after_padding(data: bytes, raw: BinaryIO, form: _Format) -> bytes:
    """What follows a stream and its padding: nothing, or at least the header of the next stream."""
    zeros = 0
    while form.padding and (data or (data := raw.read(CHUNK))):
        rest = data.lstrip(b"\0")
        zeros, data = zeros + len(data) - len(rest), rest
        if rest:
            break
    if zeros % (form.padding or 1):
        raise EOFError(f"{zeros} zero bytes follow a stream, and {form.name} pads with multiples of {form.padding}")
    return data if len(data) >= HEADER else data + raw.read(CHUNK)


def _dictionary(data: bytes) -> int:
    """The id of the dictionary that a zstd frame needs; 0 if it needs none."""
    return 0 if data[1:4] == b"\x2a\x4d\x18" else zstandard.get_frame_parameters(data).dict_id


class _Reader(io.RawIOBase):
    """Pieces of bytes as a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._ready = pieces, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if (piece := next(self._pieces, None)) is None:
                return 0
            self._ready = memoryview(piece)
        n = min(len(buffer), len(self._ready))
        buffer[:n] = self._ready[:n]
        self._ready = self._ready[n:]
        return n
