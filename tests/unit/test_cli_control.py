"""``sglang-verify-graphs control`` against a real HTTP server that changes as SGLang does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sglang_verify_graphs.cli import main
from sglang_verify_graphs.control import COLD_ZERO, MODE, RESUME, STEPS, Control, Mode
from sglang_verify_graphs.errors import SettingsError

KEY, ADMIN = "a-key", "an-admin"


@dataclass
class Scheduler:
    """One replica; what it wants is what a real one would."""

    control: Control = field(default_factory=Control)
    captured: tuple[int, ...] = (3, 1, 0)
    hidden: bool = False
    """Says nothing of verify graphs."""

    def change(self, asked: dict[str, int]) -> bool:
        try:
            self.control = self.control.change(asked, self.captured)
        except SettingsError:
            return False
        return True

    def state(self) -> dict[str, Any]:
        report = {
            "state": "active", "reasons": [], "control": self.control.name, "draft_steps": 3,
            "pinned": self.control.pinned, "cold_zero": self.control.cold_zero,
            "plan": {str(steps): [1, 2] for steps in self.captured} | {"2": []},
        }  # fmt: skip
        return {} if self.hidden else {"verify_graphs": report}


@dataclass
class Server:
    url: str = ""
    schedulers: list[Scheduler] = field(default_factory=lambda: [Scheduler()])
    key: str | None = None
    admin_key: str | None = None
    says: dict[str, bytes] = field(default_factory=dict)
    """In place of its own answers, by path."""
    changes: list[Any] = field(default_factory=list)

    def answer(self, path: str, key: str | None, body: Any) -> bytes | None:
        """None where the key is not the one that SGLang asks for (srt/utils/auth.py)."""
        needed = (body and self.admin_key) or self.key
        if needed and key != f"Bearer {needed}":
            return None
        if body:
            self.changes.append(body["server_args"])
        if path in self.says:
            return self.says[path]
        if path == "/set_internal_state":
            found: Any = [scheduler.change(body["server_args"]) for scheduler in self.schedulers]
        else:
            found = {"internal_states": [scheduler.state() for scheduler in self.schedulers]}
        return json.dumps(found).encode()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    told = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers["Content-Length"] or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            answer = told.answer(self.path, self.headers["Authorization"], body)
            self.send_response(401 if answer is None else 200)
            self.end_headers()
            self.wfile.write(answer or b"")

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    monkeypatch.delenv("SGLANG_API_KEY", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        told.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield told
        http.shutdown()
        thread.join()


def run(server: Server, *words: str) -> int:
    return main(["control", server.url, *words])


def shown(control: str) -> str:
    return f"control {control}, draft_steps 3, captured 3, 1, 0"


@pytest.mark.parametrize(
    ("before", "action", "asked", "after"),
    [
        (Control(), "pin 1", {MODE: 1, STEPS: 1}, Control(pinned=1)),
        (Control(Mode.OFF, 1), "pin 0", {MODE: 1, STEPS: 0}, Control(pinned=0)),
        (Control(Mode.OFF, 1), "policy", {MODE: 1, STEPS: RESUME}, Control()),
        (Control(pinned=1), "off", {MODE: 0}, Control(Mode.OFF, 1)),
        (Control(Mode.OFF, 1), "on", {MODE: 1}, Control(pinned=1)),
        (Control(Mode.OFF), "on", {MODE: 1}, Control()),
        (Control(), "observe", {MODE: 2}, Control(Mode.OBSERVE)),
        (Control(pinned=1), "cold-zero on", {COLD_ZERO: 1}, Control(pinned=1, cold_zero=True)),
        (Control(cold_zero=True), "cold-zero off", {COLD_ZERO: 0}, Control()),
    ],
)
def test_action(
    server: Server, capsys: pytest.CaptureFixture[str],
    before: Control, action: str, asked: dict[str, int], after: Control,
) -> None:  # fmt: skip
    server.schedulers[0].control = before
    assert run(server, *action.split()) == 0
    assert server.changes == [asked]
    assert server.schedulers[0].control == after
    cold = ", cold rounds of 0" * after.cold_zero
    assert capsys.readouterr() == (f"scheduler 1: {shown(after.name)}{cold}\n", "")


def test_without_an_action_the_state_is_shown(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.schedulers.append(Scheduler(Control(pinned=1)))
    assert run(server) == 0
    assert server.changes == []
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"scheduler 1: {shown('policy')}", f"scheduler 2: {shown('pinned')}"]


@pytest.mark.parametrize("state", ["off", "observe"])
def test_a_server_with_nothing_to_control(
    server: Server, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    report = {"state": state, "reasons": ["LoRA"], "control": "observe", "plan": {"3": [1]}}
    info = {"internal_states": [{"verify_graphs": report}]}
    server.says = {"/server_info": json.dumps(info).encode(), "/set_internal_state": b"[false]"}
    assert run(server, "observe") == 1
    out, err = capsys.readouterr()
    assert out == f"scheduler 1: state {state}, nothing to control; reasons: ['LoRA']\n"
    assert err.startswith("error: 1 of 1 scheduler(s) refused")


def test_refused_by_one_of_two(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.schedulers.append(Scheduler(captured=(3,)))
    assert run(server, "pin", "1") == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == f"scheduler 1: {shown('pinned')}"
    assert err == (
        "error: 1 of 2 scheduler(s) refused verify_graphs 1, verify_graph_steps 1; their log says "
        "why\n"
    )


@pytest.mark.parametrize("action", ["policy", "pin 1", "cold-zero on", "off", "observe", "on"])
def test_not_in_force_though_taken(
    server: Server, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    """Somebody else was faster, or a scheduler says yes and does nothing."""
    server.schedulers[0].control = Control(Mode.OBSERVE if action != "observe" else Mode.OFF)
    server.says = {"/set_internal_state": b"[true]"}
    assert run(server, *action.split()) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: 1 of 1 scheduler(s) want something else than verify_graph")
    assert err.count("\n") == 1


def test_another_pin_is_something_else(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.schedulers[0].control = Control(pinned=3)
    server.says = {"/set_internal_state": b"[true]"}
    assert run(server, "pin", "1") == 1
    assert "want something else" in capsys.readouterr().err


class TestKeys:
    @pytest.mark.parametrize(
        ("key", "admin_key", "options"),
        [
            (KEY, None, ["--api-key", KEY]),
            (None, ADMIN, ["--api-key", ADMIN]),
            (None, ADMIN, ["--admin-api-key", ADMIN]),
            (KEY, ADMIN, ["--api-key", KEY, "--admin-api-key", ADMIN]),
        ],
    )
    def test_each_request_has_its_own(
        self, server: Server, key: str | None, admin_key: str | None, options: list[str]
    ) -> None:
        server.key, server.admin_key = key, admin_key
        assert run(server, "off", *options) == 0
        assert server.schedulers[0].control.mode is Mode.OFF

    @pytest.mark.parametrize(
        ("admin_key", "path", "advice"),
        [(None, "server_info", "--api-key"), (ADMIN, "set_internal_state", "--admin-api-key")],
    )
    def test_the_one_that_is_missing_is_named(
        self, server: Server, capsys: pytest.CaptureFixture[str],
        admin_key: str | None, path: str, advice: str,
    ) -> None:  # fmt: skip
        server.key, server.admin_key = KEY, admin_key
        assert run(server, "off", *["--api-key", KEY] * bool(admin_key)) == 2
        said = f"error: {server.url}/{path} answers 401; give its {advice}\n"
        assert capsys.readouterr() == ("", said)
        assert server.changes == []


class TestNoAnswer:
    def error(self, capsys: pytest.CaptureFixture[str]) -> str:
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        return err

    @pytest.mark.parametrize(
        "action", ["pin", "pin x", "pin -1", "pin 1 2", f"pin {'9' * 5000}", "cold-zero", "pause"]
    )
    def test_no_action(
        self, server: Server, capsys: pytest.CaptureFixture[str], action: str
    ) -> None:
        assert run(server, *action.split()) == 2
        assert "is no ACTION; give policy, pin K," in self.error(capsys)
        assert server.changes == []

    @pytest.mark.parametrize(
        "info",
        [b"[]", b"{}", b'{"internal_states": []}', b'{"internal_states": {"0": {}}}',
         b'{"internal_states": [{}]}', b'{"internal_states": [{"verify_graphs": 7}]}'],
    )  # fmt: skip
    def test_a_server_without_the_package_is_not_changed(
        self, server: Server, capsys: pytest.CaptureFixture[str], info: bytes
    ) -> None:
        server.says = {"/server_info": info}
        assert run(server, "off") == 2
        assert "holds no verify_graphs; start the server with" in self.error(capsys)
        assert server.changes == []

    def test_one_scheduler_without(
        self, server: Server, capsys: pytest.CaptureFixture[str]
    ) -> None:
        server.schedulers.append(Scheduler(hidden=True))
        assert run(server, "off") == 2
        assert "holds no verify_graphs" in self.error(capsys)

    @pytest.mark.parametrize("answer", [b"{}", b"[]", b"true"])
    def test_an_odd_answer(
        self, server: Server, capsys: pytest.CaptureFixture[str], answer: bytes
    ) -> None:
        server.says = {"/set_internal_state": answer}
        assert run(server, "off") == 2
        assert "answers no list of schedulers" in self.error(capsys)

    def test_nobody_listens(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["control", "http://127.0.0.1:9", "off"]) == 2
        assert "does not answer" in self.error(capsys)


def test_what_a_server_sends_is_untrusted(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = "\x1b[2J\n\u202e" + "x" * 10_000
    reports: list[Any] = [
        {"state": "active", "control": odd, "draft_steps": [odd], "plan": {odd: [1]}},
        {"state": {odd: odd}, "reasons": 7},
        {"state": "active", "control": [], "plan": [odd]},
    ]
    info = {"internal_states": [{"verify_graphs": report} for report in reports]}
    server.says = {"/server_info": json.dumps(info).encode(), "/set_internal_state": b'[null, "x"]'}
    assert run(server, "off") == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3
    assert max(map(len, out.splitlines())) <= 300
    assert all(c.isprintable() or c == "\n" for c in out + err)
    assert "2 of 2 scheduler(s) refused verify_graphs 0" in err
