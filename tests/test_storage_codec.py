"""Codecs: bit-exact where they promise it, bounded where not, and they refuse what is not a number."""

import numpy as np
import pytest
from storage_cases import hidden_states, to_bf16, to_float

from storage.codec import CODECS, decode_plane, encode_plane, plane_codec
from storage.errors import CorruptShard, StorageError


def finite_bits() -> np.ndarray:
    """Every finite bf16 value there is, as [255, 256]."""
    bits = np.arange(2**16, dtype=np.uint16)
    return np.ascontiguousarray(bits[(bits & 0x7F80) != 0x7F80].reshape(-1, 256))


def round_trip(plane: np.ndarray, codec: str) -> np.ndarray:
    out = np.empty_like(plane)
    decode_plane(encode_plane(plane, codec), codec, out)
    return out


@pytest.mark.parametrize("codec", ["raw", "lossless"])
@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (1, 70), (3, 64), (701, 192)])
def test_raw_and_lossless_return_every_bit(codec, shape):
    plane = hidden_states(np.random.default_rng(0), *shape)
    assert np.array_equal(round_trip(plane, codec), plane)


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_every_finite_value_survives(codec):
    assert np.array_equal(round_trip(finite_bits(), codec), finite_bits())


def e4m3_values() -> np.ndarray:
    """All 127 non-negative e4m3 (fn) values, from the definition."""
    return np.array([(m / 8) * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127])


def naive_fp8(row: np.ndarray) -> np.ndarray:
    """One row of floats, group by group, value by value: nearest e4m3 value times the group's scale, ties to the even code."""
    table, result = e4m3_values(), []
    for start in range(0, len(row), 64):
        group = row[start : start + 64]
        largest = max(abs(group))
        scale = next(2.0**k for k in range(-117, 120) if largest <= 448 * 2.0**k)
        for value in group:
            distance = np.abs(table - abs(value) / scale)
            nearest = np.flatnonzero(distance == distance.min())
            code = next((c for c in nearest if c % 2 == 0), nearest[0])
            result.append(np.copysign(table[code] * scale, value))
    return np.array(result)


@pytest.mark.parametrize("channels", [1, 64, 65, 150])
def test_fp8_is_e4m3_with_a_scale_per_64_channels(channels):
    rng = np.random.default_rng(1)
    values = to_float(hidden_states(rng, 6, channels)) * 10.0 ** rng.integers(-5, 5, (6, 1))
    values[2] *= 2.0 ** rng.integers(-18, 1, channels)  # reaches e4m3's subnormals
    values[3, :] = 0
    plane = to_bf16(values)
    got = to_float(round_trip(plane, "fp8")).astype(np.float64)
    want = np.stack([naive_fp8(row) for row in to_float(plane).astype(np.float64)])
    np.testing.assert_array_equal(got, want)


def test_fp8_error_is_bounded():
    plane = hidden_states(np.random.default_rng(2), 300, 640)
    exact, got = to_float(plane), to_float(round_trip(plane, "fp8"))
    largest = np.abs(exact).reshape(300, 10, 64).max(axis=2).repeat(64, axis=1)
    assert (np.abs(got - exact) <= np.abs(exact) / 16 + largest / 224 * 2.0**-10).all()
    assert np.sqrt(((got - exact) ** 2).sum() / (exact**2).sum()) < 0.03


def test_fp8_keeps_extreme_magnitudes_finite():
    for value in (3.3e38, 1e-37, 1e-40):
        plane = to_bf16(np.full((2, 64), value, np.float32))
        assert np.isfinite(to_float(round_trip(plane, "fp8"))).all()


def test_fp8_of_a_decoded_plane_changes_nothing():
    once = round_trip(hidden_states(np.random.default_rng(3), 40, 128), "fp8")
    assert np.array_equal(round_trip(once, "fp8"), once)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [0x7F80, 0xFF80, 0x7FC1, 0xFFFF])
def test_nan_and_infinity_are_refused(codec, bad):
    plane = hidden_states(np.random.default_rng(4), 2000, 64)
    plane[1777, 13] = bad
    with pytest.raises(StorageError, match="position 1777, channel 13 is NaN or infinite"):
        encode_plane(plane, codec)


@pytest.mark.parametrize("codec", CODECS)
def test_a_cut_or_longer_plane_is_an_error(codec):
    plane = hidden_states(np.random.default_rng(5), 30, 128)
    data = encode_plane(plane, codec)
    out = np.empty_like(plane)
    for damaged in (data[:-1], data[:-8], data[: len(data) // 3], b"", data + b"\0" * 2 if codec == "raw" else data[:40]):
        with pytest.raises(CorruptShard):
            decode_plane(damaged, codec, out)


def test_a_damaged_header_does_not_allocate():
    plane = hidden_states(np.random.default_rng(6), 4, 64)
    huge = encode_plane(np.zeros((4096, 64), np.uint16), "lossless")
    with pytest.raises(CorruptShard, match="where 256 belong"):
        decode_plane(huge[: plane.size] + huge[4096 * 64 :], "lossless", np.empty_like(plane))


def test_the_last_hidden_state_stays_lossless_under_fp8():
    assert [plane_codec("fp8", plane) for plane in ("context", "last_hidden")] == ["fp8", "lossless"]
    with pytest.raises(StorageError, match="unknown codec 'zip'"):
        plane_codec("zip", "context")


def test_encoding_is_deterministic():
    plane = hidden_states(np.random.default_rng(7), 64, 128)
    for codec in CODECS:
        assert encode_plane(plane, codec) == encode_plane(plane.copy(), codec)


@pytest.mark.parametrize(("codec", "most"), [("lossless", 0.70), ("fp8", 0.50)])
def test_size_against_the_deepspec_layout(codec, most):
    """Five layers, half of the tokens supervised, H = 2560: stored bytes against 12 H + 6 a token."""
    rng = np.random.default_rng(8)
    hidden, tokens = 2560, 96
    context = len(encode_plane(hidden_states(rng, tokens, hidden), plane_codec(codec, "context"))) / tokens
    last = len(encode_plane(hidden_states(rng, tokens, hidden), plane_codec(codec, "last_hidden"))) / tokens
    assert (5 * context + 0.5 * (last + 4) + 4) / (12 * hidden + 6) <= most
