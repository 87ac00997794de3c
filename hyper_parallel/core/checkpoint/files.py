"""Data files: exact values in text, and safetensors."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.common.torch_compat import flat_bytes

# Values as JSON and back, exactly: what comes out equals what went in, with the same types ----------------------------

_MARK = "$"  # starts the one key of an object that stands for something JSON does not have


def to_json(value: Any) -> str:
    """Return a value as one line of JSON that `from_json` reads back exactly.

    >>> to_json({"lr": 0.1, "best": float("inf"), "betas": (0.9, 0.95)})
    '{"lr": 0.1, "best": {"$float": "inf"}, "betas": {"$tuple": [0.9, 0.95]}}'

    Args:
        value: None, bools, ints, floats, strings, and lists, tuples and dicts with string keys of such.

    Raises:
        ValueError: something else is in it; the message says where.
    """
    return json.dumps(_encode(value, "extra"), allow_nan=False)


def from_json(text: str) -> Any:
    """Return the value that `to_json` was given.

    >>> from_json('{"best": {"$float": "-inf"}, "betas": {"$tuple": [0.9, 0.95]}}')
    {'best': -inf, 'betas': (0.9, 0.95)}
    """
    return decoded(json.loads(text))


def _encode(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):  # numpy's float64 is one, too
        value = float(value)
        return value if math.isfinite(value) else {f"{_MARK}float": repr(value)}
    if type(value) is list:
        return [_encode(entry, f"{where}[{index}]") for index, entry in enumerate(value)]
    if type(value) is tuple:
        return {f"{_MARK}tuple": [_encode(entry, f"{where}[{index}]") for index, entry in enumerate(value)]}
    if isinstance(value, dict):
        wrong = next((key for key in value if type(key) is not str), None)
        if wrong is not None:
            blame = f"the key {wrong!r} of {where} is a {type(wrong).__name__}, and JSON has keys that are strings"
            raise InvalidValue("cannot write extra values", blame, f"{where}: {value!r}", f"{str(wrong)!r}")
        encoded = {key: _encode(entry, f"{where}[{key!r}]") for key, entry in value.items()}
        marked = any(key.startswith(_MARK) for key in encoded)
        return {f"{_MARK}dict": list(map(list, encoded.items()))} if marked else encoded
    blame = f"{where} is a {type(value).__name__}, which JSON does not have"
    hint = "numbers, strings, lists and dicts here; tensors among the tensors, or as per_rank"
    raise InvalidValue("cannot write extra values", blame, f"got: {value!r}", hint)


def decoded(value: Any) -> Any:
    """Return what parsed JSON stands for."""
    if isinstance(value, list):
        return [decoded(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, content),) = value.items()
        if kind == f"{_MARK}float":
            return float(content)
        if kind == f"{_MARK}tuple":
            return tuple(map(decoded, content))
        if kind == f"{_MARK}dict":
            return {key: decoded(entry) for key, entry in content}
    return {key: decoded(entry) for key, entry in value.items()}


# Data files: safetensors, written and read in ranges, with a checksum for every block of bytes ------------------------
#
# The format (https://huggingface.co/docs/safetensors): eight bytes with the length of a header, little-endian; the
# header, JSON, name -> dtype, shape and place of the bytes after it; the bytes of all tensors, without gaps. The
# library writes whole files at once and neither fsyncs nor counts checksums while it does; it reads what this writes.

BLOCK = 4 * 2**20
"""Bytes under one checksum."""

_READ = 2**18  # bytes that are read at once: they stay in a core's cache until they are counted

DTYPES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
        torch.float8_e5m2: "F8_E5M2",
        torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
        torch.complex64: "C64",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint64: "U64",
        torch.uint32: "U32",
        torch.uint16: "U16",
        torch.uint8: "U8",
        torch.bool: "BOOL",
    }
)
"""What safetensors calls the dtypes that it has."""

HEADER = "__metadata__"
"""The name in a file's header under which it tells of itself."""


def header_of(entries: Sequence[tuple[str, torch.dtype, Sequence[int], int]], about: Mapping[str, str]) -> bytes:
    """Return the beginning of a file, up to the first tensor's bytes; those lie at a multiple of 64.

    >>> header = header_of([("w", torch.float32, (2, 3), 24)], {"attempt": "1f"})
    >>> len(header), header[8:70]
    (128, b'{"__metadata__": {"attempt": "1f"}, "w": {"dtype": "F32", "sha')

    Args:
        entries: name, dtype, shape and number of bytes of each tensor, in the order of their bytes; wider dtypes first,
            so that each begins at a multiple of its own element.
        about: what else the header says.
    """
    described: dict[str, object] = {HEADER: dict(about)}
    at = 0
    for name, dtype, shape, size in entries:
        described[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(described).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor in row order; a copy only if they do not lie like that on the host.

    >>> bytes_of(torch.tensor([[1, 2], [3, 4]], dtype=torch.int8).t()).tolist()
    [1, 3, 2, 4]
    """
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return flat_bytes(tensor).numpy().data


class BlockWriter:
    """A new file that is written from begin to end, while the checksums of its blocks are counted."""

    def __init__(self, path: Path, block: int = BLOCK) -> None:
        self.path = path
        self.block = block
        self.crcs: list[int] = []
        self.size = 0
        self._crc = 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o644)

    def write(self, data: memoryview) -> int:
        """Write all of some bytes, and return their checksum, which copies on other ranks are compared with."""
        whole = 0
        for piece in self._cut(data):
            crc = zlib.crc32(piece)  # once, for both
            whole, self._crc = joined(whole, crc, len(piece)), joined(self._crc, crc, len(piece))
            left = piece
            while left:
                left = left[os.write(self._file, left) :]
            self.size += len(piece)
            if self.size % self.block == 0:
                self._end_block()
        return whole

    def finish(self) -> None:
        """Bring everything to the disk and close the file."""
        if self.size % self.block:
            self._end_block()
        os.fsync(self._file)
        self.close()

    def close(self) -> None:
        """Close the file, as it is."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _cut(self, data: memoryview) -> Iterator[memoryview]:
        """Cut at the ends of blocks."""
        begin = 0
        while begin < len(data):
            end = min(len(data), begin + self.block - (self.size % self.block))
            yield data[begin:end]
            begin = end

    def _end_block(self) -> None:
        self.crcs.append(self._crc)
        self._crc = 0


def joined(first: int, second: int, size: int) -> int:
    """Return the CRC-32 of bytes from the checksums of their first part and of their second, which has `size` bytes.

    >>> joined(zlib.crc32(b"check"), zlib.crc32(b"point"), 5) == zlib.crc32(b"checkpoint")
    True

    As zlib's crc32_combine, which Python does not have: a polynomial over GF(2) is shifted by so many zeros.
    """
    return _times(_shift(size), first) ^ second if first else second


def _times(a: int, b: int) -> int:
    """Multiply two polynomials modulo that of CRC-32; the highest bit of each is the coefficient of x ** 0."""
    product = 0
    while a:
        if a & 0x80000000:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (0xEDB88320 if b & 1 else 0)
    return product


@lru_cache(maxsize=1024)  # tensors have few sizes
def _shift(size: int) -> int:
    """Return x ** (8 * size) modulo the polynomial of CRC-32."""
    power, square = 0x80000000, 0x00800000
    while size:
        if size & 1:
            power = _times(power, square)
        square, size = _times(square, square), size >> 1
    return power


def open_plain(path: Path) -> int:
    """Open a file to read it: neither a link, which may lead anywhere, nor a pipe, which may never answer.

    Raises:
        OSError: it cannot be read, or is no such file.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "It is a symbolic link, and none is followed") from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is no regular file")
    return file


def checksums(file: int, first: int, last: int, block: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, length and checksum of the blocks of an open file from `first` up to `last`, without it."""
    view = memoryview(bytearray(min(block, _READ)))
    for number in range(first, last):
        have, crc = 0, 0
        while have < block and (got := os.preadv(file, [view[: block - have]], number * block + have)):
            crc = zlib.crc32(view[:got], crc)
            have += got
        yield number, have, crc
