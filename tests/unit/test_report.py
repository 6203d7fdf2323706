"""``report``: break-even, verdicts and advice from costs and a server's acceptance."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sglang_verify_graphs.cli import main
from sglang_verify_graphs.cli.report import even_lengths, of_server, report
from sglang_verify_graphs.costs import PLAIN_DECODE, CostKey, CostRow, CostTable
from sglang_verify_graphs.errors import CostsError

KEY = CostKey("NVIDIA H200", 1, "m", "d", "1.2.3", "fa3", "bfloat16")


def table(costs: dict[tuple[int, int], float], spread: float = 0.0) -> CostTable:
    return CostTable(
        KEY,
        tuple(
            CostRow(b, k, ms, ms * (1 - spread), ms * (1 + spread), 32)
            for (b, k), ms in costs.items()
        ),
    )


FIELD = table({(1, PLAIN_DECODE): 15.0, (1, 0): 16.0, (1, 1): 18.0, (1, 3): 30.0})
"""Case 12 of the field: verify 24 ms, draft and extend 6 ms, plain decode 15 ms."""


def rows(costs: CostTable, assumed: float | None = None, **lengths: Any) -> dict[int, Any]:
    (batch,) = report(costs, lengths.get("lengths", {}), assumed).batches
    return {row.draft_steps: row for row in batch.steps}


@pytest.mark.parametrize(
    ("length", "said"),
    [(1.8, "losing 10%: use 0 steps"), (2.4, "gaining 20%"), (2.0, "breaking even")],
)
def test_verdicts_of_the_field(length: float, said: str) -> None:
    costs = table({(1, PLAIN_DECODE): 15.0, (1, 0): 15.0, (1, 3): 30.0})
    assert rows(costs, length)[3].verdict == said


def test_break_even_is_against_plain_decode_where_it_is_known() -> None:
    assert rows(FIELD)[3].break_even == (2.0, 2.0, 2.0)
    assert report(FIELD, {}).batches[0].against == "plain decode"
    own = table({(1, 0): 16.0, (1, 3): 32.0})
    assert rows(own)[3].break_even == (2.0, 2.0, 2.0)
    assert report(own, {}).batches[0].against == "own rounds of 0 steps"


def test_without_a_decode_sample_it_is_unknown() -> None:
    costs = table({(1, 1): 20.0, (1, 3): 30.0})
    assert report(costs, {}).batches[0].against is None
    assert rows(costs, 2.0)[3].verdict == "unknown: no decode sample"
    assert rows(costs, 2.0)[3].break_even is None


def test_a_losing_step_count_names_the_one_that_pays() -> None:
    costs = table({(32, PLAIN_DECODE): 10.0, (32, 0): 10.0, (32, 1): 11.0, (32, 3): 24.7})
    assert rows(costs, 2.0)[3].verdict == "losing 19%: use 1 step"


def test_intervals_of_cost_and_acceptance_both_count() -> None:
    wide = table({(1, 0): 15.0, (1, 3): 30.0}, spread=0.1)
    assert rows(wide)[3].break_even == pytest.approx((2.0, 27 / 16.5, 33 / 13.5))
    observed = of_server(answer(FIELD, {"3": [1.9, 1.7, 2.1]}))[1]
    assert rows(FIELD, lengths=observed)[3].verdict == "breaking even"
    observed = of_server(answer(FIELD, {"3": [1.8, 1.7, 1.9]}))[1]
    assert rows(FIELD, lengths=observed)[3].verdict.startswith("losing 10%")


def test_an_even_acceptance_has_the_length_that_was_asked_for() -> None:
    for length in (1.0, 1.7, 2.0, 3.9, 4.0):
        found = even_lengths(length, 3)
        assert found[3].value == pytest.approx(length)
        assert found[0].value == 1.0
        share = found[1].value - 1
        assert found[2].value == pytest.approx(1 + share + share**2)
    for length in (0.9, 4.1, float("nan")):
        with pytest.raises(CostsError, match="3 draft steps have one of 1 to 4"):
            even_lengths(length, 3)


def test_the_schedule_for_stock() -> None:
    costs = table(
        {(1, 0): 5.0, (1, 1): 6.0, (1, 3): 6.5, (8, 0): 6.0, (8, 1): 7.5, (8, 3): 30.0,
         (32, 0): 8.0, (32, 1): 20.0, (32, 3): 40.0}
    )  # fmt: skip
    known = report(costs, {}, 2.0).adaptive_config
    assert known == {
        "1": {"candidate_steps": [3]},
        "2": {"candidate_steps": [1]},
        "9": {"candidate_steps": [0]},
    }
    unknown = report(costs, {}).adaptive_config
    assert unknown == {
        "1": {"candidate_steps": [0, 1, 3]},
        "2": {"candidate_steps": [0, 1]},
        "9": {"candidate_steps": [0]},
    }


# -- the command -----------------------------------------------------------------------------------


def answer(costs: CostTable, lengths: dict[str, Any]) -> Any:
    data = json.loads(costs.to_json())
    policy = {
        "batches": [1], "chosen": {"1": 3}, "costs": data["rows"], "accept_length": lengths,
        "verified_requests": 400,
    }  # fmt: skip
    return {"internal_states": [{"verify_graphs": {"policy": policy, "cost_key": data["key"]}}]}


@pytest.fixture
def serve() -> Iterator[Any]:
    servers = []

    def start(body: Any) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path == "/server_info" else 404)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_server(serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url = serve(answer(FIELD, {"0": [1, 1, 1], "1": [1.5, 1.4, 1.6], "2": None, "3": [1.8] * 3}))
    assert main(["report", url + "/", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (batch,) = found["batches"]
    assert found["acceptance"] == "observed"
    assert batch["best_steps"] == 1
    assert batch["steps"][-1]["accept_length"] == [1.8, 1.8, 1.8]
    assert batch["steps"][-1]["verdict"] == "losing 10%: use 1 step"
    assert found["adaptive_config"] == {"1": {"candidate_steps": [1]}}


def test_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "costs.json"
    path.write_text(FIELD.to_json())
    assert main(["report", str(path), "--accept-length", "2.4"]) == 0
    said = capsys.readouterr().out
    assert "accept length: assumed" in said
    assert "gaining 20%" in said
    assert "break-even against plain decode: batch 1" in said
    assert '{"1": {"candidate_steps": ' in said
    assert main(["report", str(path)]) == 0
    assert "unknown: no acceptance observed" in capsys.readouterr().out


def bad_answers() -> Iterator[Any]:
    yield {}
    yield []
    yield {"internal_states": [{"verify_graphs": {"policy": None}}]}
    yield {"internal_states": [{"verify_graphs": {"policy": 3}}]}
    for lengths in ({"3": [2.0]}, {"x": [1, 1, 1]}, {"3": [9, 9, 9]}, {"3": [float("nan")] * 3}, 3):
        yield answer(FIELD, lengths)  # type: ignore[arg-type]
    yield answer(table({}), {})


@pytest.mark.parametrize("body", list(bad_answers()))
def test_a_bad_server_gets_one_line(
    body: Any, serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", serve(body)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"key": {}, "rows": []}'])
def test_a_bad_file_gets_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    for source in (str(path), str(tmp_path / "none"), str(tmp_path), "http://127.0.0.1:1"):
        assert main(["report", source]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "costs.json"
    path.write_text(FIELD.to_json())
    assert main(["report", str(path), "--accept-length", "2", "--plots", str(tmp_path / "p")]) == 0
    files = sorted((tmp_path / "p").iterdir())
    assert [file.name for file in files] == ["best_steps.png", "break_even.png", "round_cost.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    assert main(["report", str(path), "--plots", str(path)]) == 2
    assert "cannot write plots" in capsys.readouterr().err


def test_plots_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    path = tmp_path / "costs.json"
    path.write_text(FIELD.to_json())
    assert main(["report", str(path), "--plots", str(tmp_path / "p")]) == 2
    assert "sglang-verify-graphs[report]" in capsys.readouterr().err
