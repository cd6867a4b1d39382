"""A typed client for the session routes of a kvpolicy server. Needs the extra ``client`` (httpx).

>>> from kvpolicy.client import SessionClient
>>> with SessionClient("http://127.0.0.1:8000") as client:  # doctest: +SKIP
...     with client.open(system_prompt="Be short.") as session:
...         print(session.push("Hello!").text)
"""

from kvpolicy.client.asynchronous import AsyncSession, AsyncSessionClient
from kvpolicy.client.errors import SessionApiError, SessionConnectionError
from kvpolicy.client.synchronous import Session, SessionClient
from kvpolicy.client.values import FrameReply, SessionStatus

__all__ = [
    "AsyncSession",
    "AsyncSessionClient",
    "FrameReply",
    "Session",
    "SessionApiError",
    "SessionClient",
    "SessionConnectionError",
    "SessionStatus",
]
