"""Requests into values: bodies read under a cap, and the forms that one chunk can come in."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import field, frozen
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser

from kvpolicy.adapters.http.errors import ApiError, bad_request, invalid_fields, too_large
from kvpolicy.adapters.http.images import image_format
from kvpolicy.adapters.http.schemas import FrameTurn, OpenRequest, SamplingOptions

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from fastapi import Request
    from starlette.datastructures import UploadFile

_Model = TypeVar("_Model", bound=BaseModel)
_JSON, _TEXT, _FORM = "application/json", "text/plain", "multipart/form-data"
_IMAGES = ("image/jpeg", "image/png")
_MAX_DIGITS = 20
_FIELDS = ("image", "text", "sampling")


@frozen(kw_only=True)
class Frame:
    """One chunk as it came: text, an encoded image, or both."""

    text: str = ""
    image: bytes | None = field(default=None, repr=False)
    index: int | None = None
    sampling: Mapping[str, Any] = field(factory=dict)
    stream: bool = False

    def digest(self) -> bytes:
        """Return what tells this chunk from another one under the same index."""
        image = b"" if self.image is None else self.image
        head = json.dumps([self.text, self.image is None, self.sampling], sort_keys=True).encode()
        return hashlib.sha256(len(head).to_bytes(8, "big") + head + image).digest()


class _FormParser(MultiPartParser):
    """Starlette's parser, with every part kept in memory: the cap of the body is below what is worth a file.

    A form is UTF-8 whatever charset its header names: some of Python's fail in ways of their own, or take a minute.
    """

    def __init__(self, headers: Headers, body: bytes) -> None:
        _, parameters = parse_options_header(headers["content-type"])
        kind = _FORM.encode()
        if (boundary := parameters.get(b"boundary")) is not None:
            kind += b'; boundary="' + boundary.replace(b"\\", rb"\\").replace(b'"', rb"\"") + b'"'
        only = Headers(raw=[(b"content-type", kind)])
        super().__init__(only, _in_one_piece(body), max_files=4, max_fields=4, max_part_size=len(body))
        self.spool_max_size = len(body)


async def read_open_request(request: Request, max_bytes: int) -> OpenRequest:
    """Return what a session shall be; an empty body asks for the defaults.

    Raises:
        ApiError: 400, 413 or 422.
    """
    body = await read_body(request, max_bytes)
    if not body:
        return OpenRequest()
    if _media_type(request) != _JSON:
        raise bad_request("bad_content_type", _content_type_reason(request, (_JSON,)))
    return _parse(OpenRequest, body)


async def read_frame(request: Request, max_bytes: int, *, index: int | None, stream: bool) -> Frame:
    """Return the chunk in a request; ``index`` and ``stream`` are what its query says.

    Raises:
        ApiError: 400, 413 or 422.
    """
    kind = _media_type(request)
    body = await read_body(request, max_bytes)
    if not body:
        raise bad_request("empty_body", "body: expected text, JSON, an image or a form with them, got nothing")
    if kind == _TEXT:
        return Frame(text=_utf8("body", body), index=index, stream=stream)
    if kind == _JSON:
        return _frame_of(_parse(FrameTurn, body), index=index, stream=stream)
    if kind in _IMAGES:
        image_format(body)
        return Frame(image=body, index=index, stream=stream)
    if kind == _FORM:
        return await _read_form(request.headers, body, index=index, stream=stream)
    raise bad_request("bad_content_type", _content_type_reason(request, (_TEXT, _JSON, *_IMAGES, _FORM)))


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the body. A longer one is refused by its announced length, or else as soon as it has come too far.

    Raises:
        ApiError: 413.
        starlette.requests.ClientDisconnect: the client has gone before its end.
    """
    announced_length(request, max_bytes)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise _body_too_large(max_bytes, "more")
    return bytes(body)


def announced_length(request: Request, max_bytes: int) -> int | None:
    """Return the length that a request says its body has; None if it does not say, or comes in chunks.

    Raises:
        ApiError: 413, it is longer than allowed.
    """
    announced = request.headers.get("content-length", "")
    if not announced.isdecimal() or "transfer-encoding" in request.headers:
        return None
    # Python refuses to read numbers of thousands of digits.
    if len(announced) > _MAX_DIGITS or int(announced) > max_bytes:
        raise _body_too_large(max_bytes, f"an announced length of {announced[:_MAX_DIGITS]}")
    return int(announced)


def may_name_an_index(request: Request) -> bool:
    """Return whether the body of a push is of a kind that can have a ``frame_index``."""
    return _media_type(request) == _JSON


async def _read_form(headers: Headers, body: bytes, *, index: int | None, stream: bool) -> Frame:
    parts = await _form_parts(headers, body)
    image_format(parts["image"])
    sampling = _parse(SamplingOptions, parts["sampling"]).given() if "sampling" in parts else {}
    text = _utf8("text", parts.get("text", b""))
    return Frame(text=text, image=parts["image"], index=index, sampling=sampling, stream=stream)


async def _form_parts(headers: Headers, body: bytes) -> dict[str, bytes]:
    try:
        form = await _FormParser(headers, body).parse()
    except MultiPartException as error:
        raise bad_request("bad_form", f"form: {error.message}") from error
    try:
        if reasons := _form_errors([name for name, _ in form.multi_items()]):
            raise bad_request("bad_form", reasons)
        return {name: await _bytes_of(part) for name, part in form.items()}
    finally:
        await form.close()


def _form_errors(names: list[str]) -> list[str]:
    known = ", ".join(_FIELDS)
    reasons = [f"form: unknown field {name[:40]!r}; known fields: {known}" for name in names if name not in _FIELDS]
    counts = {name: names.count(name) for name in _FIELDS}
    reasons += [
        f"form: expected the field {name!r} once, got it {num} times" for name, num in counts.items() if num > 1
    ]
    if "image" not in names:
        reasons.append("form: expected a field 'image' (a JPEG or PNG file); text alone goes as text/plain or JSON")
    return reasons


async def _bytes_of(part: UploadFile | str) -> bytes:
    return part.encode() if isinstance(part, str) else await part.read()


async def _in_one_piece(body: bytes) -> AsyncGenerator[bytes, None]:
    yield body


def _frame_of(turn: FrameTurn, *, index: int | None, stream: bool) -> Frame:
    if None not in (index, turn.frame_index) and index != turn.frame_index:
        reason = f"frame_index: expected one value, got {index} in the query and {turn.frame_index} in the body"
        raise bad_request("two_indices", reason)
    return Frame(
        text=turn.text,
        index=index if turn.frame_index is None else turn.frame_index,
        sampling={} if turn.sampling is None else turn.sampling.given(),
        stream=stream or turn.stream,
    )


def _parse(model: type[_Model], body: bytes) -> _Model:
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request("bad_json", f"body: expected JSON: {error}") from error
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid_fields(error.errors(include_url=False), tuple(model.model_fields)) from error


def _utf8(name: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        reason = f"{name}: expected UTF-8, got something else at byte {error.start}"
        raise bad_request("not_utf8", reason) from error


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _content_type_reason(request: Request, expected: tuple[str, ...]) -> str:
    return f"Content-Type: expected {' or '.join(expected)}, got {request.headers.get('content-type', 'none')!r}"


def _body_too_large(max_bytes: int, got: str) -> ApiError:
    return too_large("body_too_large", f"body: expected at most {max_bytes} bytes, got {got}; send less in one chunk")
