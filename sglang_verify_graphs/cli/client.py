"""How the commands ask a server over HTTP; what it sends is untrusted: bounded, no redirects."""

from __future__ import annotations

import argparse
import json
import os
from http.client import HTTPException
from time import monotonic
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from sglang_verify_graphs.errors import EvidenceError

_KEY = "SGLANG_API_KEY"
_SECONDS, _BYTES = 30.0, 32 << 20
"""Bounds of an answer."""


def add_server_to(parser: argparse.ArgumentParser) -> None:
    """The URL of a server and its key."""
    parser.add_argument(
        "url", type=_server, metavar="URL", help="for example http://127.0.0.1:30000"
    )
    add_key_to(parser)


def add_key_to(parser: argparse.ArgumentParser) -> None:
    """The key alone; read it with ``key_of``."""
    parser.add_argument(
        "--api-key", help=f"the server's --api-key (default: the environment variable {_KEY})"
    )


def key_of(arguments: argparse.Namespace) -> str | None:
    """The key that was given, or the one of the environment."""
    return arguments.api_key or os.environ.get(_KEY)


def _server(text: str) -> str:
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        good = good and parts.username is None
    except ValueError:
        good = False
    if not good or not text.isprintable() or " " in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not the URL of a server: http://HOST:PORT")
    return text.rstrip("/")


class _NoRedirect(HTTPRedirectHandler):
    """A redirect would carry the key to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


def fetch(url: str, key: str | None, body: object = None) -> Any:
    """Parsed JSON of an answer."""
    try:
        return json.loads(read(url, key, body))
    except (ValueError, RecursionError):
        raise EvidenceError(f"{url} does not answer JSON; is it an SGLang server?") from None


def read(
    url: str, key: str | None, body: object = None, seconds: float | None = _SECONDS,
    *, direct: bool = False,
) -> bytes:  # fmt: skip
    """An answer, to a POST where there is a ``body``; ``direct`` goes past any proxy.

    A server takes its key as a bearer token (srt/utils/auth.py, ``decide_request_auth``).
    """
    if key and not (key.isascii() and key.isprintable()):
        raise EvidenceError("the API key is not printable ASCII; give the server's --api-key")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    data = None
    if body is not None:
        data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
    deadline, found = monotonic() + (seconds or float("inf")), bytearray()
    try:
        request = Request(url, data, headers)
        opener = build_opener(_NoRedirect, *[ProxyHandler({})] * direct)
        with opener.open(request, timeout=seconds) as answer:
            while chunk := answer.read1(65536):
                found += chunk
                if len(found) > _BYTES or monotonic() > deadline:
                    raise EvidenceError(
                        f"{url} sends more than {_BYTES >> 20} MiB or takes more than "
                        f"{seconds or 0:.0f} s; is it an SGLang server?"
                    )
        return bytes(found)
    except HTTPError as error:
        advice = "give its --api-key" if error.code in (401, 403) else "is it an SGLang server?"
        raise EvidenceError(f"{url} answers {error.code}; {advice}") from None
    except (OSError, HTTPException) as error:
        raise EvidenceError(f"{url} does not answer ({error}); is the server up?") from None


def clean(line: object) -> str:
    """A line of what a server sent, fit for a terminal."""
    return "".join(c if c.isprintable() else "?" for c in str(line))
