"""A server that a command starts for itself, asks over HTTP, and ends with all its processes."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sglang_verify_graphs.cli.client import read
from sglang_verify_graphs.errors import CostsError, EvidenceError

_LOG_LINES, _LOG_BYTES = 8, 4000
"""The end of the log that an error shows."""
_SECONDS = 120.0
"""For an answer; a scheduler gives it between two rounds, and may be prefilling."""


class LaunchedServer:
    """``python -m sglang.launch_server`` in a session of its own, reachable from here alone."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        known = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        known.add_argument("--port", type=int, default=0)
        known.add_argument("--api-key")
        given, _ = known.parse_known_args(arguments)
        port = _free_port(given.port)
        self.url, self.log, self._key = f"http://127.0.0.1:{port}", log, given.api_key
        command = [sys.executable, "-m", "sglang.launch_server", *arguments]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise CostsError(
                f"cannot write the server's log ({error}); give another --out"
            ) from None

    def wait_until_ready(self, deadline: float) -> None:
        while True:
            self._check()
            with suppress(EvidenceError):
                self._read("/health", None, 10.0)
                return
            if time.monotonic() > deadline:
                raise CostsError(
                    f"the server was not ready in time; give more --minutes, or see {self.log}"
                )
            time.sleep(0.5)

    def ask(self, path: str, body: object = None, seconds: float | None = _SECONDS) -> Any:
        """Parsed JSON; None for an empty answer."""
        try:
            text = self._read(path, body, seconds)
            return json.loads(text) if text else None
        except (EvidenceError, ValueError) as error:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(2)  # a server that ends closes its port first
            self._check()
            raise CostsError(f"{path} of the server failed ({error}); see {self.log}") from None

    def stop(self) -> None:
        """End all its processes, also those that outlive the first."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(10)

    def _read(self, path: str, body: object, seconds: float | None) -> bytes:
        return read(self.url + path, self._key, body, seconds, direct=True)

    def _check(self) -> None:
        if (status := self._process.poll()) is not None:
            end = self.log.read_text(errors="replace")[-_LOG_BYTES:].splitlines()[-_LOG_LINES:]
            raise CostsError(
                f"the server ended with status {status}; mend what {self.log} says last:\n"
                + "\n".join(end)
            )


def _free_port(wanted: int) -> int:
    """``wanted`` if nobody listens there, any for 0: another server would answer in its place."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except (OSError, OverflowError) as error:
            raise CostsError(
                f"port {wanted} cannot be used ({error}); leave --port out for a free one"
            ) from None
        return int(probe.getsockname()[1])
