"""Where no fault occurs, a patched SGLang does what stock does, graph by graph.

``ci/patches.sh`` runs this on each whole series, and with ``--each`` on each patch alone.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

import pytest

from sglang_verify_graphs.compat.releases import RELEASES
from tests.engine.worker import ROOT, STANDINS, run_scenario
from tests.patches.conftest import PATCHED

pytestmark = pytest.mark.engine

ONE_WIDTH = any(r.version == version("sglang") and r.one_width for r in RELEASES)
STOCK = {"PYTHONPATH": os.pathsep.join([str(STANDINS), str(ROOT)])}
OF_THE_PATCHES = ("graph_rejects", "nccl")
"""What a patch adds to the report; a count where nothing was rejected is empty."""


def serve(pair: dict[str, str], env: dict[str, str]) -> dict[str, Any]:
    """Eight requests on a ladder that covers them, without the plugin."""
    flags = {"max_running_requests": 8}
    config = {**pair, "batch_sizes": [1, 2, 4, 8], "server_args": flags}
    load: dict[str, Any] = {"config": config, "requests": 8, "max_new_tokens": 24}
    env = {"SGLANG_PLUGINS": "cpu_engine"} | env
    if ONE_WIDTH:
        scenario = "tests.engine.legacy.scenarios:serve"
        env["TRITON_INTERPRET"] = "1"
        found = run_scenario(scenario, env=env, timeout=300, settings=None, **load)
    else:
        found = run_scenario("tests.patches.scenarios:serve", graphs=True, env=env, **load)
    return dict(found)


def test_nothing_else_changes(pair: dict[str, str]) -> None:
    stock, patched = serve(pair, STOCK), serve(pair, {})
    assert patched.pop("sglang").startswith(str(PATCHED))
    assert not stock.pop("sglang").startswith(str(PATCHED))
    for name in OF_THE_PATCHES:
        assert stock.pop(name, None) is None
    assert not patched.pop("graph_rejects", None)
    patched.pop("nccl", None)
    assert patched == stock
    assert stock["leaked"] == 0
    assert stock["verify" if ONE_WIDTH else "verifies"]
