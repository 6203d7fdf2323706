"""Stands where ``sglang.launch_server`` is looked for: the HTTP interface that ``calibrate`` uses.

A round takes ``round_ms``; a bucket costs what ``cost`` says, if just that bucket ran. FAKE holds
the rest as JSON, and a line of what was asked goes to ``asked``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = {
    "gpu": "cpu", "tp_size": 1, "model_digest": "m", "draft_digest": "d",
    "sglang_version": "0.0", "attention_backend": "none", "dtype": "float32",
}  # fmt: skip
KEPT = 32


def cost(batch: int, steps: int) -> float:
    return 10.0 * batch + steps


class Fake:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.pinned, self.cold = 2, 0
        self.running: tuple[int, int, float] | None = None
        self.rounds: dict[tuple[int, int], int] = {}
        self.aborted = threading.Event()

    def count(self) -> None:
        if self.running is not None:
            batch, steps, since = self.running
            took = (time.monotonic() - since) * 1e3
            done = int(took / self.settings["round_ms"])
            self.rounds[batch, steps] = min(done, self.settings.get("ends_after", done))

    def generate(self, batch: int) -> None:
        self.aborted.clear()
        if batch <= self.settings["runs"]:
            steps = -1 if self.cold and not self.pinned else self.pinned
            self.running = batch, steps, time.monotonic()
        if "ends_after" not in self.settings:
            self.aborted.wait()
        self.count()
        self.running = None

    def info(self) -> Any:
        self.count()
        s = self.settings
        costs = [
            {"batch": b, "draft_steps": k, "ms": cost(b, k), "low_ms": 1.0, "high_ms": 999.0,
             "samples": min(n, KEPT)}
            for (b, k), n in sorted(self.rounds.items()) if n
        ]  # fmt: skip
        report = {
            "state": s["state"], "reasons": ["for a reason"], "cost_key": KEY, "plan": s["plan"],
            "policy": {"batches": s["batches"], "costs": costs} if len(s["plan"]) > 1 else None,
            "round_ms": {
                f"{b}x{k}": {"rounds": n, "mean_ms": s["round_ms"]}
                for (b, k), n in self.rounds.items()
            },
        }  # fmt: skip
        state = {
            "verify_graphs": report, "effective_max_running_requests_per_dp": s["max_running"],
        }  # fmt: skip
        return {
            "internal_states": [state] * s["replicas"], "max_total_num_tokens": s["kv"],
            "max_req_input_len": 4096, "page_size": 1,
        }  # fmt: skip

    def ask(self, path: str, body: Any) -> Any:
        with open(self.settings["asked"], "a") as file:
            file.write(json.dumps([path, body and {k: body[k] for k in body if k != "rid"}]) + "\n")
        if path == "/server_info":
            return self.info()
        if path == "/set_internal_state":
            asked = body["server_args"]
            if str(asked["verify_graph_steps"]) not in self.settings["plan"]:
                return [False]
            self.pinned, self.cold = asked["verify_graph_steps"], asked["verify_graph_cold_zero"]
            return [True]
        if path == "/generate":
            self.generate(len(body["input_ids"]))
        if path == "/abort_request":
            self.aborted.set()
        return None


def main() -> None:
    settings = json.loads(os.environ["FAKE"])
    words = sys.argv[1:]
    key = words[words.index("--api-key") + 1] if "--api-key" in words else None
    assert "--enable-verify-graphs" in words
    if "dies" in settings:
        print(settings["dies"], file=sys.stderr)
        sys.exit(3)
    child = subprocess.Popen(["sleep", "1000"])
    with open(settings["pids"], "w") as file:
        file.write(json.dumps([os.getpid(), child.pid]))
    fake = Fake(settings)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("content-length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            if key and self.headers.get("authorization") != f"Bearer {key}":
                self.send_error(401)
                return
            answer = fake.ask(self.path, body)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"" if answer is None else json.dumps(answer).encode())

        do_POST = do_GET

        def log_message(self, *args: Any) -> None:
            pass

    port = int(words[len(words) - 1 - words[::-1].index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
