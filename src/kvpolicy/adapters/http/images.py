"""Encoded images into decoded ones, with the size checked before anything is allocated."""

from __future__ import annotations

import io
import struct
import zlib
from typing import TYPE_CHECKING

from kvpolicy.adapters.http.errors import ApiError, bad_request, too_large

if TYPE_CHECKING:
    from PIL.Image import Image as DecodedImage

_FORMATS = ((b"\xff\xd8\xff", "JPEG"), (b"\x89PNG\r\n\x1a\n", "PNG"))
# What Pillow raises on damaged data, by experiment (tests/unit/http/test_images.py damages images, also at random). An
# image whose palette is missing fails an assertion of Pillow's; where Python skips those, what comes after it.
_NO_PALETTE = (AssertionError, AttributeError)
_DAMAGED = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error, zlib.error, *_NO_PALETTE)


def image_format(data: bytes) -> str:
    """Return "JPEG" or "PNG", by the first bytes: what a client says about its data does not count.

    Raises:
        ApiError: 400, it is neither.
    """
    for magic, name in _FORMATS:
        if data.startswith(magic):
            return name
    raise bad_request("bad_image", f"image: expected a JPEG or PNG file, got {len(data)} bytes that begin like neither")


def decode_image(data: bytes, max_pixels: int) -> DecodedImage:
    """Return the image as RGB. Blocks: call it in a thread.

    Raises:
        ApiError: 413, its header announces more than ``max_pixels`` (nothing has been decoded then); 400, it is
            neither JPEG nor PNG, or it is damaged.
    """
    from PIL import Image

    name = image_format(data)
    try:
        with Image.open(io.BytesIO(data), formats=[name]) as image:
            if image.width * image.height > max_pixels:
                raise _too_many_pixels(f"{image.width} x {image.height}", max_pixels)
            # Straight to RGB would give transparent pixels of a palette a warning instead of a colour.
            whole = image.convert("RGBA") if image.has_transparency_data else image
            return whole.convert("RGB")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_many_pixels("even more", max_pixels) from error
    except _DAMAGED as error:
        raise bad_request("bad_image", f"image: expected a whole {name} file, this one cannot be decoded") from error


def _too_many_pixels(got: str, max_pixels: int) -> ApiError:
    return too_large("too_many_pixels", f"image: expected at most {max_pixels} pixels, got {got}; scale it down")
