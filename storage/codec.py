"""Codecs for planes of bf16 hidden states (DESIGN, section 4.3). bf16 travels as its uint16 bits.

raw       the bits themselves.
lossless  bits rotated left by one, so that the high byte is the whole exponent and the low byte mantissa and sign. Exponents of hidden
          states have about 3 bits of entropy: the exponent plane goes through zstd's Huffman stage, the low plane is stored as it is.
fp8       e4m3 with one power-of-two scale per 64 channels, the e4m3 plane through the same Huffman stage.

All work is numpy and zstd over chunks that fit the CPU's cache; both release the GIL, so reader threads run side by side.
"""

import threading
from typing import Literal

import numpy as np
import zstandard
from numpy.typing import NDArray

from storage.errors import CorruptShard, StorageError

Bits = NDArray[np.uint16]
CODECS = ("raw", "lossless", "fp8")
GROUP = 64
"""Channels that share one scale in fp8."""

_CHUNK = 262144  # elements worked on at a time: they stay in the CPU's cache, and threads seldom hand each other the GIL
_INFINITY = 0x7F80
_SCALE_BIAS = 128
_SMALLEST_NORMAL = 0x80  # an e4m3 code in bf16's place (<< 4) below this is subnormal or zero
_SUBNORMAL = (np.arange(8, dtype=np.float32) / 512).view(np.uint32).astype(np.int64) >> 16  # bf16 bits of e4m3's subnormals
_SCALE_MIN, _SCALE_MAX = -117, 119  # every e4m3 value times 2**scale is then a finite bf16 value, exactly

# Huffman only, in effect: exponents of neighbours hold no matches worth looking for (three times faster than level 1, and smaller).
_HUFFMAN = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    target_length=0,
    min_match=7,
    hash_log=6,
    chain_log=6,
    search_log=1,
    window_log=17,
    write_content_size=True,
)
_per_thread = threading.local()  # zstd contexts are not thread-safe, and costly to make for small planes


def plane_codec(codec: str, plane: Literal["context", "last_hidden"]) -> str:
    """The codec of one plane: under fp8 the last hidden state stays lossless, since it is the teacher of the loss."""
    if codec not in CODECS:
        raise StorageError(f"unknown codec {codec!r}: choose one of {', '.join(CODECS)}")
    return "lossless" if codec == "fp8" and plane == "last_hidden" else codec


def encode_plane(plane: Bits, codec: str) -> bytes:
    """Encode one plane.

    Args:
        plane: [N, H] uint16, the bits of bf16 values.
        codec: one of CODECS.

    Raises:
        StorageError: a value is NaN or infinite (the row must be reported, not stored), or the codec is unknown.
    """
    if plane.dtype != np.uint16 or plane.ndim != 2:
        raise StorageError(f"a plane must be uint16 [N, H], not {plane.dtype} {list(plane.shape)}")
    plane = np.ascontiguousarray(plane)
    if codec not in CODECS:
        raise StorageError(f"unknown codec {codec!r}: choose one of {', '.join(CODECS)}")
    _refuse_non_finite(plane)
    if codec == "raw":
        return plane.tobytes()
    return _encode_lossless(plane) if codec == "lossless" else _encode_fp8(plane)


def decode_plane(data: bytes | memoryview, codec: str, out: Bits) -> None:
    """Decode one plane into `out`, [N, H] uint16, contiguous.

    Raises:
        CorruptShard: `data` does not hold exactly N * H values.
    """
    if not out.flags.c_contiguous:
        raise StorageError("the output of decode_plane must be contiguous")
    view = memoryview(data)
    try:
        if codec == "raw":
            _check_size(len(view), out.nbytes)
            out.reshape(-1)[:] = np.frombuffer(view, np.uint16)
        elif codec == "lossless":
            _decode_lossless(view, out)
        elif codec == "fp8":
            _decode_fp8(view, out)
        else:
            raise StorageError(f"unknown codec {codec!r}: choose one of {', '.join(CODECS)}")
    except zstandard.ZstdError as error:
        raise CorruptShard(f"{codec} plane does not decompress: {error}") from error


def _refuse_non_finite(plane: Bits) -> None:
    flat = plane.reshape(-1)
    scratch = np.empty(min(_CHUNK, flat.size), np.uint16)
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK]
        magnitude = np.bitwise_and(part, 0x7FFF, out=scratch[: part.size])
        if magnitude.max() >= _INFINITY:
            position = start + int((magnitude >= _INFINITY).argmax())
            row, channel = divmod(position, plane.shape[1])
            raise StorageError(f"hidden state at position {row}, channel {channel} is NaN or infinite: the row is refused")


def _encode_lossless(plane: Bits) -> bytes:
    flat = plane.reshape(-1)
    low, high = np.empty(flat.size, np.uint8), np.empty(flat.size, np.uint8)
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK]
        rotated = (part << 1) | (part >> 15)
        pairs = rotated.view(np.uint8)
        low[start : start + _CHUNK] = pairs[::2]
        high[start : start + _CHUNK] = pairs[1::2]
    return low.tobytes() + _compressor().compress(high.data)


def _decode_lossless(data: memoryview, out: Bits) -> None:
    flat = out.reshape(-1)
    low = np.frombuffer(data[: flat.size], np.uint8)
    _check_size(low.size, flat.size)
    high = _decompress(data[flat.size :], flat.size)
    scratch = np.empty(min(_CHUNK, flat.size), np.uint16)
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK]
        sign = scratch[: part.size]
        part[:] = high[start : start + _CHUNK]
        part <<= 8
        part |= low[start : start + _CHUNK]
        np.left_shift(part, 15, out=sign)
        part >>= 1
        part |= sign


def _encode_fp8(plane: Bits) -> bytes:
    """[scale exponents uint8 [N, G]] [zstd frame of the e4m3 codes [N, H]], rounded to nearest, ties to even.

    |error| <= |x| / 16 + 2**-10 * scale, and scale <= largest magnitude of the group / 224. All but tiny values go by integer
    arithmetic on the bf16 bits: taking the scale off is a subtraction in the exponent field, which also gives e4m3's bias.
    """
    rows, channels = plane.shape
    groups = -(-channels // GROUP)
    scales = np.empty((rows, groups), np.uint8)
    codes = np.empty((rows, channels), np.uint8)
    step = max(1, _CHUNK // max(channels, 1))
    for start in range(0, rows, step):
        part = _grouped(plane[start : start + step], groups)  # [n, G, 64]
        magnitude = (part & 0x7FFF).view(np.int16)
        # The smallest power of two with maximum / scale <= 448 = 1.75 * 2**8; adding 0x1F carries where the mantissa exceeds 1.75.
        exponent = ((magnitude.max(axis=2).astype(np.int32) + 0x1F) >> 7) - 127 - 8
        np.clip(exponent, _SCALE_MIN, _SCALE_MAX, out=exponent)
        scales[start : start + step] = exponent + _SCALE_BIAS
        magnitude -= _exponent_field(exponent)
        small = np.flatnonzero(magnitude < _SMALLEST_NORMAL)
        odd = (magnitude >> 4) & 1
        magnitude += odd
        magnitude += 7
        magnitude >>= 4
        if (exponent == _SCALE_MAX).any():
            np.minimum(magnitude, 0x7E, out=magnitude)  # within 2x of bf16's largest value: saturate below e4m3's NaN
        if len(small):
            value = ((part.reshape(-1)[small] & 0x7FFF).astype(np.uint32) << 16).view(np.float32)
            magnitude.reshape(-1)[small] = np.rint(np.ldexp(value, 9 - exponent.reshape(-1)[small // GROUP]))
        sign = part >> 8
        sign &= 0x80
        magnitude |= sign.view(np.int16)
        codes[start : start + step] = magnitude.reshape(len(part), -1)[:, :channels]
    return scales.tobytes() + _compressor().compress(codes.reshape(-1).data)


def _decode_fp8(data: memoryview, out: Bits) -> None:
    rows, channels = out.shape
    groups = -(-channels // GROUP)
    _check_size(len(data[: rows * groups]), rows * groups)
    exponent = np.frombuffer(data[: rows * groups], np.uint8).reshape(rows, groups).astype(np.int32) - _SCALE_BIAS
    if exponent.size and (exponent.min() < _SCALE_MIN or exponent.max() > _SCALE_MAX):
        raise CorruptShard("an fp8 scale lies outside of its range")
    codes = _decompress(data[rows * groups :], rows * channels).reshape(rows, channels)
    field = _exponent_field(exponent).view(np.uint16)
    step = max(1, _CHUNK // max(channels, 1))
    for start in range(0, rows, step):
        part = _grouped(codes[start : start + step], groups)
        bits = part.astype(np.uint16)
        sign = bits & 0x80
        sign <<= 8
        bits &= 0x7F
        bits <<= 4
        small = np.flatnonzero(bits < _SMALLEST_NORMAL)
        bits += field[start : start + step]
        if len(small):
            shift = exponent[start : start + step].reshape(-1)[small // GROUP] << 7
            mantissa = part.reshape(-1)[small] & 7
            bits.reshape(-1)[small] = np.where(mantissa == 0, 0, _SUBNORMAL[mantissa] + shift)
        bits |= sign
        out[start : start + step] = bits.reshape(len(part), -1)[:, :channels]


def _exponent_field(exponent: NDArray[np.int32]) -> NDArray[np.int16]:
    """[n, G] scale exponents -> [n, G, 1]: what to add to an e4m3 code, moved to bf16's place, for its bf16 bits (biases 7 and 127)."""
    return ((exponent + 120) << 7).astype(np.int16)[:, :, None]


def _grouped(part: NDArray, groups: int) -> NDArray:
    """[n, H] -> [n, G, 64], the last group filled up with zeros."""
    missing = groups * GROUP - part.shape[1]
    if missing:
        part = np.pad(part, ((0, 0), (0, missing)))
    return part.reshape(len(part), groups, GROUP)


def _compressor() -> zstandard.ZstdCompressor:
    if not hasattr(_per_thread, "compressor"):
        _per_thread.compressor = zstandard.ZstdCompressor(compression_params=_HUFFMAN)
    return _per_thread.compressor


def _decompress(frame: memoryview, size: int) -> NDArray[np.uint8]:
    if size == 0:
        return np.empty(0, np.uint8)
    declared = zstandard.frame_content_size(frame)
    if declared != size:  # before decompressing: a damaged header must not allocate what it likes
        raise CorruptShard(f"plane holds {declared} bytes where {size} belong")
    if not hasattr(_per_thread, "decompressor"):
        _per_thread.decompressor = zstandard.ZstdDecompressor()
    data = np.frombuffer(_per_thread.decompressor.decompress(frame, max_output_size=size), np.uint8)
    _check_size(data.size, size)
    return data


def _check_size(found: int, expected: int) -> None:
    if found != expected:
        raise CorruptShard(f"plane holds {found} bytes where {expected} belong")
