"""Images: their type, their size before anything is decoded, and damage."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from kvpolicy.adapters.http.errors import ApiError
from kvpolicy.adapters.http.images import decode_image, image_format
from tests.unit.http.serving import image_bytes

LIMIT = 4 * 1024 * 1024


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _bomb(width: int, height: int) -> bytes:
    """Return a whole PNG of one colour: a few kilobytes that decode to ``width * height`` pixels."""
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    packer = zlib.compressobj(9)
    row = bytes(1 + (width + 7) // 8)
    rows = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", rows) + _chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_an_image_is_decoded_to_rgb(kind: str) -> None:
    image = decode_image(image_bytes(9, 5, kind=kind, mode="L"), LIMIT)
    assert (image.size, image.mode) == ((9, 5), "RGB")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_every_mode_of_png_becomes_rgb(mode: str) -> None:
    assert decode_image(image_bytes(mode=mode), LIMIT).mode == "RGB"


def test_transparent_colours_of_a_palette_become_rgb_without_a_warning() -> None:
    buffer, image = io.BytesIO(), Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.putpixel((1, 0), 1)
    image.save(buffer, "PNG", transparency=b"\x40\x80")
    decoded = decode_image(buffer.getvalue(), LIMIT)
    assert [decoded.getpixel((x, 0)) for x in (0, 1)] == [(255, 0, 0), (0, 255, 0)]


def test_the_limit_itself_is_allowed() -> None:
    assert decode_image(image_bytes(8, 8), 64).size == (8, 8)
    with pytest.raises(ApiError, match=r"at most 63 pixels, got 8 x 8; scale it down") as caught:
        decode_image(image_bytes(8, 8), 63)
    assert caught.value.status == 413


@pytest.mark.parametrize("side", [4096, 12_000, 20_000])
def test_a_decompression_bomb_is_refused_by_its_header(side: int) -> None:
    # 12,000 and 20,000 are also beyond Pillow's own two limits: it warns at one and raises at the other.
    bomb = _bomb(side, side)
    assert len(bomb) < 8 * 1024 * 1024 / 100
    with pytest.raises(ApiError, match="image: expected at most 4194304 pixels") as caught:
        decode_image(bomb, LIMIT)
    assert (caught.value.status, caught.value.code) == (413, "too_many_pixels")


@pytest.mark.parametrize("side", [3000, 2**31 - 1])
def test_a_large_header_alone_is_refused_too(side: int) -> None:
    """There is nothing behind it that could be decoded. The smaller one is within Pillow's own limits."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", b"")
    with pytest.raises(ApiError) as caught:
        decode_image(data, LIMIT)
    assert (caught.value.status, caught.value.code) == (413, "too_many_pixels")


@pytest.mark.parametrize("data", [b"", b"GIF89a", b"\x89PN", b"BM", b"II*\0", b"hello"])
def test_other_files_are_no_images(data: bytes) -> None:
    with pytest.raises(ApiError, match="begin like neither") as caught:
        image_format(data)
    assert caught.value.status == 400


def _png(*chunks: bytes, colour_type: int = 2) -> bytes:
    header = struct.pack(">IIBBBBB", 8, 8, 8, colour_type, 0, 0, 0)
    rows = _chunk(b"IDAT", zlib.compress(bytes(8 * 25)))
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + rows + b"".join(chunks) + _chunk(b"IEND", b"")


@pytest.mark.parametrize(
    "data",
    [
        _png(colour_type=3),
        _png(_chunk(b"zTXt", b"a\0\1\0\0\0")),
        _png(_chunk(b"iCCP", b"")),
        _png(_chunk(b"gAMA", b"")),
        image_bytes()[:40],
    ],
    ids=["no palette", "unknown compression", "no profile", "no value", "no rows"],
)
def test_whatever_is_damaged_is_a_client_error(data: bytes) -> None:
    with pytest.raises(ApiError, match="this one cannot be decoded") as caught:
        decode_image(data, LIMIT)
    assert (caught.value.status, caught.value.code) == (400, "bad_image")


@given(
    st.sampled_from([image_bytes(16, 16, kind="PNG", mode="P"), image_bytes(16, 16, kind="JPEG")]),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4),
    st.floats(0, 1),
)
def test_damage_is_a_client_error(whole: bytes, changes: list[tuple[float, int]], kept: float) -> None:
    data = bytearray(whole)
    for place, value in changes:
        data[int(place * len(data))] = value
    # Nothing but an answer may come out of it.
    with contextlib.suppress(ApiError):
        assert decode_image(bytes(data[: int(kept * len(data))]), LIMIT).mode == "RGB"
