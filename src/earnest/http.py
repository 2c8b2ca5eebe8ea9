"""The HTTP client for every request to another server, with one retry policy.

A request is sent again after a temporary error status, after a broken connection and after an answer that ``read``
cannot use. The wait before try k + 1 is min(60, backoff·2^(k-1))·(½ + u/2) seconds, where a hash of the request's name
gives u in [0, 1); the server's Retry-After replaces it if that is longer. Connections are not reused: an idle one that
the server closed would look like a lost request.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from earnest.errors import EarnestError

if TYPE_CHECKING:
    import httpx

AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
LONGEST = 60.0


class Refused(EarnestError):
    """The server answered with an error that another try would not change. ``tries`` counts this one."""

    def __init__(self, status: int, text: str, tries: int) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status, self.text, self.tries = status, text, tries


class NoAnswer(EarnestError):
    """Every try failed; the message is the last reason."""


class Unusable(Exception):
    """``read`` raises it for an answer that it cannot use; the request is sent again."""


class Answer(NamedTuple):
    """What ``read`` made of the answer, and the number of tries that it took."""

    value: Any
    tries: int


def read_json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise Unusable(f"its answer is not JSON ({error})") from None


def wait(name: str, attempt: int, backoff: float) -> float:
    """Seconds before the next try. They depend on the request's name, so requests that fail together are spread out."""
    u = int.from_bytes(hashlib.sha256(f"{name} {attempt}".encode()).digest()[:4], "big") / 2**32
    return min(LONGEST, backoff * 2 ** (attempt - 1)) * (0.5 + u / 2)


class Client:
    """Requests to one server. ``key`` is sent as a bearer token; ``timeout`` is in seconds."""

    def __init__(
        self, url: str, key: str = "", *, timeout: float = 120.0, tries: int = 6, backoff: float = 0.5
    ) -> None:
        self.url, self.key, self.timeout, self.tries, self.backoff = url.rstrip("/"), key, timeout, tries, backoff

    @cached_property
    def _http(self) -> httpx.Client:
        import httpx

        headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        return httpx.Client(headers=headers, timeout=self.timeout, limits=limits)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        name: str = "",
        read: Callable[[httpx.Response], Any] = read_json,
    ) -> Answer:
        """Send ``body`` (bytes as they are, anything else as JSON) until ``read`` can use the answer. Raises
        ``Refused`` at once for an error status outside ``AGAIN``, and ``NoAnswer`` after the last try."""
        import httpx

        sent: dict[str, Any] = {"json": body} if body is not None and not isinstance(body, bytes) else {}
        if isinstance(body, bytes):
            sent = {"content": body, "headers": {"Content-Type": "application/octet-stream"}}
        reason, least = "", 0.0
        for attempt in range(1, self.tries + 1):
            if attempt > 1:
                time.sleep(max(least, wait(name or path, attempt - 1, self.backoff)))
            try:
                response = self._http.request(method, self.url + path, **sent)
                if response.is_success:
                    return Answer(read(response), attempt)
            except (httpx.UnsupportedProtocol, httpx.LocalProtocolError, httpx.InvalidURL, UnicodeEncodeError) as error:
                # The message of an illegal header would show the key.
                raise NoAnswer(f"{type(error).__name__}: the address or the key cannot be sent") from None
            except httpx.HTTPError as error:
                reason, least = f"{type(error).__name__}: {error}", 0.0
                continue
            except Unusable as error:
                reason, least = str(error), 0.0
                continue
            text = error_text(response)
            if response.status_code not in AGAIN:
                raise Refused(response.status_code, text, attempt)
            reason, least = f"HTTP {response.status_code}: {text}", _seconds(response.headers.get("Retry-After"))
        raise NoAnswer(reason)


def error_text(response: httpx.Response) -> str:
    """The message of an error in OpenAI's format, else the body's first 500 characters; where a redirect leads."""
    if response.is_redirect:
        return f"a redirect to {response.headers.get('Location')}; give that address"
    try:
        found = response.json()
    except ValueError:
        return response.text.strip()[:500]
    message = found.get("error", found) if isinstance(found, dict) else found
    return str(message.get("message", message) if isinstance(message, dict) else message)[:2000]


def _seconds(header: str | None) -> float:
    try:
        return min(LONGEST, max(0.0, float(header or 0)))
    except ValueError:  # an HTTP date: the client's own wait is used
        return 0.0
