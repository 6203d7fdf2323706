"""The plugin on the releases of one width: real scheduler, v1 worker and graph runners on a CPU."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sglang_verify_graphs.compat.releases import RELEASES, sglang_version
from tests.engine.worker import engine_env, run_scenario

_RELEASE = next((r for r in RELEASES if r.version == sglang_version() and r.one_width), None)
_ENGINE = find_spec("torch") is not None
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(_RELEASE is None or not _ENGINE, reason="SGLang is no release of one width"),
]

LADDER = (1, 2, 4)
MAX_BATCH = 7


def run(scenario: str, pair: dict[str, str], settings: Any, **kwargs: Any) -> Any:
    config = pair | {
        "batch_sizes": LADDER,
        "server_args": {"max_running_requests": MAX_BATCH},
    }
    return run_scenario(
        f"tests.engine.legacy.scenarios:{scenario}",
        env={"TRITON_INTERPRET": "1"},
        timeout=300,
        config=config,
        settings=settings,
        **kwargs,
    )


@pytest.fixture(scope="module")
def eager(pair: dict[str, str]) -> dict[str, Any]:
    return run("serve", pair, None, with_graphs=False)


@pytest.fixture(scope="module")
def stock(pair: dict[str, str]) -> dict[str, Any]:
    return run("serve", pair, None)


@pytest.fixture(scope="module")
def active(pair: dict[str, str]) -> dict[str, Any]:
    return run("serve", pair, {"steps": [0, 1, 3]})


def phases(result: dict[str, Any]) -> dict[str, Any]:
    return result["status"]["phases"]


class TestConfiguredWidth:
    def test_tokens(self, eager: dict[str, Any], active: dict[str, Any]) -> None:
        assert active["tokens"] == eager["tokens"]
        assert active["leaked"] == 0

    def test_the_whole_ladder_is_covered(
        self, stock: dict[str, Any], active: dict[str, Any]
    ) -> None:
        """Stock verifies 6 requests eager, in silence; all of ours replay."""
        assert max(map(int, stock["verify"])) == max(LADDER)
        assert phases(active)["verify"]["eager"] == 0
        assert "6" in active["verify"]
        assert active["status"]["plan"] == {"3": [1, 2, 4, 6, 7]}

    def test_the_report_is_what_ran(self, active: dict[str, Any]) -> None:
        replayed = sum(active["verify"].values())
        assert phases(active)["verify"]["replayed"] == replayed > 0
        assert active["status"]["rounds"] == replayed
        assert phases(active)["draft"]["replayed"] == replayed

    def test_every_width_but_the_configured_is_refused_by_name(
        self, active: dict[str, Any]
    ) -> None:
        (reason,) = active["status"]["reasons"]
        assert reason.startswith("only the configured draft steps are captured: SGLang of before")
        assert active["status"]["state"] == "active"

    def test_nothing_is_captured_in_mid_serving(self, active: dict[str, Any]) -> None:
        assert active["captured"]["CudaGraphRunner"] == 5
        assert active["captured_while_serving"] == 0

    def test_stocks_ladder_is_left_as_it_was(self, active: dict[str, Any]) -> None:
        assert active["ladder"] == list(LADDER)


class TestObserve:
    def test_stock_is_explained_and_not_changed(
        self, pair: dict[str, str], stock: dict[str, Any]
    ) -> None:
        seen = run("serve", pair, {"observe": True})
        for same in ("tokens", "accept_length", "captured", "verify"):
            assert seen[same] == stock[same]
        verify = phases(seen)["verify"]
        assert verify["replayed"] == sum(stock["verify"].values())
        assert verify["reasons"] == {"BATCH_ABOVE_LADDER": verify["eager"]}
        assert verify["eager"] > 0

    def test_without_graphs(self, pair: dict[str, str], eager: dict[str, Any]) -> None:
        """No runner to ask: the rounds are counted all the same."""
        seen = run("serve", pair, {}, with_graphs=False)
        assert seen["status"]["state"] == "off"
        assert "decode graphs disabled" in seen["status"]["reasons"][0]
        assert seen["tokens"] == eager["tokens"]
        rounds = seen["status"]["rounds"]
        assert phases(seen)["verify"]["reasons"] == {"NO_RUNNER": rounds}
        assert rounds > 0


class TestDefects:
    def test_width_and_hidden_mode(self, pair: dict[str, str]) -> None:
        """Stock's gate lets both through, and captures the whole ladder anew for the second."""
        answers = run("odd_batches", pair, None)
        assert answers["width"]
        assert answers["hidden"]
        assert answers["recaptured"] == len(LADDER)

    def test_width_and_hidden_mode_are_refused(self, pair: dict[str, str]) -> None:
        answers = run("odd_batches", pair, {})
        assert not answers["width"]
        assert not answers["hidden"]
        assert answers["recaptured"] == 0
        assert answers["status"]["phases"]["verify"]["reasons"] == {
            "STEPS_NOT_CAPTURED": 1,
            "HIDDEN_MODE": 1,
        }

    def test_prefill_graph(self, pair: dict[str, str]) -> None:
        takes_verify, takes_extend = run("prefill_graph", pair, {})
        assert _RELEASE is not None
        assert takes_verify is not _RELEASE.prefill_graph_takes_verify
        assert takes_extend

    @pytest.mark.parametrize("settings", [None, {}, {"observe": True}], ids=str)
    def test_eagle3_layers(
        self, pair: dict[str, str], settings: dict[str, Any] | None, tmp_path: Path
    ) -> None:
        """Case 9. SGLang counts a layer by its input, so one more than the draft asks for."""
        found = run("layers", pair, settings, draft=str(tmp_path / "draft"), ids=[0, 2, 5])
        assert _RELEASE is not None
        ours = settings == {} or not _RELEASE.captures_default_layers
        assert found["captured"] == [[1, 3, 6] if ours else [2, 4, 5]]
        assert found["after"] == [1, 3, 6]


class TestRoads:
    """These releases may have no plugins: the ``.pth`` of the wheel is the road into a process."""

    def test_a_worker(self) -> None:
        """A spawned scheduler imports its module with the settings in the environment."""
        code = (
            "import sglang.srt.managers.scheduler; import sglang_verify_graphs.install as i; "
            "print(i.installed())"
        )
        env = engine_env() | {"SGLANG_VERIFY_GRAPHS": "{}"}
        assert "Scheduler.init_model_worker" in _python(code, env=env)

    def test_the_launcher(self) -> None:
        code = (
            "import argparse; from sglang.srt.server_args import ServerArgs; "
            "p = argparse.ArgumentParser(); ServerArgs.add_cli_args(p); print(p.format_help())"
        )
        assert "--verify-graph-strict" in _python(code, "--enable-verify-graphs")
        assert "--verify-graph-strict" not in _python(code)


def _python(code: str, *arguments: str, env: dict[str, str] | None = None) -> str:
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=env or engine_env(), capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return process.stdout
