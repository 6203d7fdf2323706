"""What is published, read back from the files as a scrape of SGLang reads them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_verify_graphs.compat.engine import SGLangEngine
from sglang_verify_graphs.gate import RejectReason
from sglang_verify_graphs.prometheus import METRICS, publisher
from sglang_verify_graphs.settings import Settings
from tests.unit.test_startup import started

pytest.importorskip("prometheus_client")

_PUBLISH = """
import json, sys
from prometheus_client import CollectorRegistry, multiprocess
from sglang_verify_graphs.gate import Decision, Phase, RejectReason
from sglang_verify_graphs.buckets import VerifyBucket
from sglang_verify_graphs.prometheus import Publisher
from sglang_verify_graphs.settings import Settings
from tests.unit.test_startup import started

run = started(Settings()).controller
publisher = Publisher(run, {"model_name": "m", "tp_rank": 0})

def scrape():
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return [
        [s.name, dict(s.labels), s.value] for m in registry.collect() for s in m.samples
    ]

answers = [scrape()]
for _ in range(2):
    for batch in (3, 3, 4):
        run.counters.replay(Phase.VERIFY, VerifyBucket(3, 4), batch)
    run.counters.refuse(Phase.DRAFT, Decision(None, RejectReason.BATCH_ABOVE_LADDER))
    run.counters.accept([0, 2, 3])
    for key in ((3, 3), (4, 3)):
        sums = run.timer.sums.setdefault(key, [0, 0.0, 0.0])
        sums[0] += 2
        sums[1] += 20.0
    for steps, ms in ((3, 15.0), (0, 10.0)):
        for _ in range(4):
            run.measured.timed(4, steps, ms)
    publisher.publish()
    publisher.publish()
    answers.append(scrape())
print(json.dumps(answers))
"""


def test_deltas_under_sglangs_labels(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PUBLISH], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parents[2],
        env={"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    start, once, twice = json.loads(done.stdout)

    def value(samples: Any, name: str, **own: str) -> float:
        wanted = {"model_name": "m", "tp_rank": "0", **own}
        (found,) = [v for n, labels, v in samples if (n, labels) == (name, wanted)]
        return float(found)

    prefix, bucket = "sglang:verify_graph_", {"draft_steps": "3", "batch": "4"}
    assert value(start, prefix + "padded_rows_total") == 0
    assert value(start, prefix + "capture_seconds", draft_steps="3") == 1
    eager = {"phase": "draft", "reason": RejectReason.BATCH_ABOVE_LADDER.value}
    for times, samples in ((1, once), (2, twice)):
        assert value(samples, prefix + "replays_total", phase="verify", **bucket) == 3 * times
        assert value(samples, prefix + "eager_total", **eager) == times
        assert value(samples, prefix + "padded_rows_total") == 8 * times
        assert value(samples, prefix + "verified_requests_total") == 3 * times
        for position, count in (("1", 2), ("2", 2), ("3", 1)):
            found = value(samples, prefix + "accepted_drafts_total", position=position)
            assert found == count * times
        assert value(samples, prefix + "round_seconds", **bucket) == pytest.approx(0.01)
        assert value(samples, prefix + "break_even_accept_length", **bucket) == 1.5
        assert {n.removeprefix(prefix) for n, _, _ in samples} == set(METRICS)


def engine(**scheduler: Any) -> SGLangEngine:
    found = SGLangEngine.__new__(SGLangEngine)
    found.scheduler = SimpleNamespace(**scheduler)
    return found


@pytest.mark.parametrize("apart", [False, True])
def test_nothing_where_sglang_publishes_nothing(apart: bool) -> None:
    """As SGLang: with its flag, and on the ranks that it chose."""
    run = started(Settings()).controller
    assert run is not None
    collector = SimpleNamespace(labels={"tp_rank": 1})

    def labels(collector: Any, enabled: bool) -> Any:
        rule: dict[str, Any] = {"current_scheduler_metrics_enabled": enabled}
        rule = {"metrics_collector_context": SimpleNamespace(**rule)} if apart else rule
        return engine(metrics_collector=collector, **rule).metrics_labels()

    assert labels(collector, True) == {"tp_rank": 1}
    assert labels(collector, False) is None
    assert labels(None, True) is None
    assert publisher(run, None) is None


def test_published_after_sglangs_own() -> None:
    seen: list[Any] = []
    collector = SimpleNamespace(log_stats=seen.append)
    engine(metrics_collector=collector).when_publishing(lambda: seen.append("ours"))
    collector.log_stats("theirs")
    assert seen == ["theirs", "ours"]
