"""``sglang-verify-graphs ranks`` against a real HTTP server that need not be a friend."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sglang_verify_graphs.cli import client, main
from sglang_verify_graphs.nccl.evidence import Bypass, RankEvidence
from sglang_verify_graphs.nccl.status import judge, report
from tests.unit.test_nccl_status import LARGE, asked, evidence, log_of

KEY = "a-key"


@dataclass
class Server:
    """Answers every request with what it was told to, and keeps what it was asked."""

    url: str
    body: bytes = b""
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    asked: tuple[tuple[str, str | None], ...] = ()

    def holds(self, *groups: list[RankEvidence]) -> None:
        states = [{"verify_graphs": {"nccl": report(judge(group))}} for group in groups]
        self.sends({"internal_states": states, "version": "any"})

    def sends(self, data: Any) -> None:
        self.body = json.dumps(data).encode()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            told.asked += ((self.path, self.headers["Authorization"]),)
            self.send_response(told.status)
            for name, value in told.headers:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(told.body)

        def log_message(self, *_: Any) -> None:
            pass

    monkeypatch.delenv("SGLANG_API_KEY", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        told = Server(f"http://127.0.0.1:{http.server_port}")
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield told
        http.shutdown()
        thread.join()


FIRST = evidence(asked("NCCL_PROTO"), world_size=2, log=log_of(LARGE, NCCL_PROTO="LL"))
SECOND = replace(FIRST, rank=1)
OTHER = replace(
    FIRST,
    rank=1,
    node="beta",
    variables=(asked("NCCL_PROTO", "Simple"),),
    log=log_of(LARGE, NCCL_PROTO="Simple"),
)


def run(server: Server, *options: str) -> int:
    return main(["ranks", server.url, *options])


def test_equal_ranks_share_a_row(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.holds([FIRST, SECOND])
    assert run(server) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "NCCL 2.27.3 (/lib/libnccl.so.2, installed 2.27.3) on ranks 0-1 (alpha)"
    assert lines[2].split()[:7] == ["alpha", "0-1", "NCCL_PROTO", "LL", "LL", "flag", "in"]
    assert "it chose RING LL on 24 channels for AllReduce of 16777216 bytes" in lines[2]
    assert lines[-1] == "2 rank(s) agree and have what was asked for"
    assert server.asked == (("/server_info", None),)


def test_a_rank_that_differs_is_marked(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.holds([FIRST, OTHER])
    assert run(server) == 1
    lines = capsys.readouterr().out.splitlines()
    marked = [line.split()[1:5] for line in lines if line.startswith("!")]
    assert marked == [["beta", "1", "NCCL_PROTO", "Simple"]]
    assert "mismatch: NCCL_PROTO differs: LL on rank 0 (alpha); Simple on rank 1 (beta)" in lines


def test_what_goes_past_nccl(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.holds(
        [replace(rank, bypasses=(Bypass("MSCCL++", 1 << 25),)) for rank in (FIRST, SECOND)]
    )
    assert run(server) == 0
    assert "bypassed by MSCCL++ (AllReduce below 33554432 bytes)" in capsys.readouterr().out


def test_a_server_without_nccl(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """One rank, or the CPU: what was asked for is set, and no more can be said."""
    none = replace(
        FIRST, world_size=1, library=None, nccl_version=None, communicator_up=False, log=None
    )
    server.holds([none])
    assert run(server) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "no NCCL is loaded on rank 0 (alpha)"
    assert "no communicator is up yet" in lines[2]


def test_a_rank_that_is_missing(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.holds([FIRST])
    assert run(server) == 1
    assert "mismatch: rank 1 is missing: 1 of 2 ranks" in capsys.readouterr().out


def test_json(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.holds([FIRST, OTHER])
    assert run(server, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert [(r["dp"], r["rank"], r["node"]) for r in found["ranks"]] == [
        (0, 0, "alpha"),
        (0, 1, "beta"),
    ]
    assert found["ranks"][1]["variables"]["NCCL_PROTO"]["effective"] == "Simple"
    assert found["mismatches"][0]["what"] == "NCCL_PROTO"


def test_replicas(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """One state for each data-parallel rank; under attention DP they may hold the same ranks."""
    server.holds([FIRST, SECOND], [FIRST, SECOND])
    assert run(server) == 0
    assert "on ranks 0-1 (alpha)" in capsys.readouterr().out
    server.holds([FIRST, SECOND], [FIRST, OTHER])
    assert run(server) == 1
    assert "Simple on dp 1 rank 1 (beta)" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["option", "variable"])
def test_the_key(server: Server, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    server.holds([FIRST, SECOND])
    if how == "variable":
        monkeypatch.setenv("SGLANG_API_KEY", KEY)
    assert run(server, *(["--api-key", KEY] if how == "option" else [])) == 0
    assert server.asked == (("/server_info", f"Bearer {KEY}"),)


def test_a_server_below_a_path(server: Server) -> None:
    server.holds([FIRST, SECOND])
    assert main(["ranks", server.url + "/below/"]) == 0
    assert server.asked[0][0] == "/below/server_info"


class TestNoAnswer:
    def error(self, capsys: pytest.CaptureFixture[str]) -> str:
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert KEY not in err
        return err

    @pytest.mark.parametrize(
        ("body", "text"),
        [
            (b"", "does not answer JSON"),
            (b"[" * 100_000, "does not answer JSON"),
            (b'{"internal_states": 9', "does not answer JSON"),
            (b"\xff\xfe", "does not answer JSON"),
            (b"[]", "has no internal_states"),
            (b'{"internal_states": {"0": 1}}', "has no internal_states"),
            (b'{"internal_states": [7]}', "holds no verify_graphs.nccl.ranks"),
            (b'{"internal_states": [{"verify_graphs": {"nccl": []}}]}', "holds no verify_graphs"),
            (b'{"internal_states": [{"verify_graphs": {"nccl": {"ranks": [1]}}}]}', "the shape of"),
        ],
    )
    def test_what_is_no_evidence(
        self, server: Server, capsys: pytest.CaptureFixture[str], body: bytes, text: str
    ) -> None:
        server.body = body
        assert run(server) == 2
        assert text in self.error(capsys)

    def test_too_much(
        self, server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(client, "_BYTES", 1 << 20)
        server.body = b" " * (2 << 20)
        assert run(server) == 2
        assert "sends more than 1 MiB" in self.error(capsys)

    def test_too_slow(
        self, server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(client, "monotonic", iter([0.0, 31.0]).__next__)
        server.body = b"{}"
        assert run(server) == 2
        assert "takes more than 30 s" in self.error(capsys)

    @pytest.mark.parametrize(
        ("status", "text"),
        [(401, "401; give its --api-key"), (404, "404; is it an SGLang server?"), (500, "500")],
    )
    def test_an_error(
        self, server: Server, capsys: pytest.CaptureFixture[str], status: int, text: str
    ) -> None:
        server.status = status
        assert run(server) == 2
        assert text in self.error(capsys)

    def test_a_redirect_is_not_followed(
        self, server: Server, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """It could take the key to another host."""
        server.status, server.headers = 302, (("Location", f"{server.url}/elsewhere"),)
        assert run(server, "--api-key", KEY) == 2
        assert len(server.asked) == 1
        assert "answers 302" in self.error(capsys)

    def test_nobody_listens(self, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["ranks", "http://127.0.0.1:9"]) == 2
        assert "does not answer" in self.error(capsys)

    def test_a_key_with_a_line_end(
        self, server: Server, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(server, "--api-key", f"{KEY}\r\nX: y") == 2
        assert "not printable ASCII" in self.error(capsys)
        assert server.asked == ()

    @pytest.mark.parametrize(
        "url",
        ["", "127.0.0.1:30000", "file:///etc/passwd", "ftp://host", "http://", "http://[::1",
         "http://user:word@host", "http://host/\r\nX:y", "http://host:port", "http://ho st"],
    )  # fmt: skip
    def test_what_is_no_url(self, capsys: pytest.CaptureFixture[str], url: str) -> None:
        with pytest.raises(SystemExit) as end:
            main(["ranks", url])
        assert end.value.code == 2
        assert "is not the URL of a server" in capsys.readouterr().err


class TestUntrusted:
    def test_secrets_and_control_characters(
        self, server: Server, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A server of another make sends what ours would not."""
        server.holds([FIRST, SECOND])
        data = json.loads(server.body)
        for rank in data["internal_states"][0]["verify_graphs"]["nccl"]["ranks"]:
            rank["node"] = "al\x1b[2Jpha\u202e\n"
            one = rank["variables"]["NCCL_PROTO"]
            secret = dict.fromkeys(("requested", "effective", "evidence"), "s3cr3t")
            rank["variables"]["HF_TOKEN"] = one | secret
            rank["variables"]["NCCL_\x07X"] = one | {"evidence": "x" * 100_000}
        server.sends(data)
        assert run(server) == 0
        text = capsys.readouterr().out
        assert run(server, "--json") == 0
        encoded = capsys.readouterr().out
        for out in (text, encoded):
            assert "s3cr3t" not in out
            assert "(hidden)" in out
            assert all(c.isprintable() or c == "\n" for c in out)
        assert "al?[2Jpha??" in text
        assert max(map(len, text.splitlines())) < 1000
