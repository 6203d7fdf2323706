"""What reaches NCCL, and what SGLang does to it, is in every release as the adapter has it."""

from __future__ import annotations

import re

import pytest

from sglang_verify_graphs.compat import nccl
from sglang_verify_graphs.compat.releases import RELEASES, Release
from sglang_verify_graphs.compat.requirements import COMMUNICATOR
from tests.contract.conftest import source_of

pytestmark = pytest.mark.contract

ALL = pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
_GROUP = "sglang.srt.distributed.parallel_state"
_WRITE = re.compile(
    r'environ(?:\.setdefault\(|\[)\s*"((?:NCCL|CUDA_DEVICE)_[A-Z_]+)"(?:\]\s*=[^=]|,)'
)


@ALL
def test_communicator(release: Release) -> None:
    source = source_of(release)
    communicator = source.attributes(COMMUNICATOR.module, "PyNcclCommunicator")
    assert {"available", "change_state", "all_reduce"} <= communicator
    group = source.attributes(_GROUP, "GroupCoordinator")
    assert {"pynccl_comm", "device_group", "device", "ranks", "rank_in_group"} <= group


@ALL
def test_the_world_group_has_no_communicator(release: Release) -> None:
    """So that the first one of a rank is made by ``COMMUNICATOR``."""
    world = source_of(release).text(_GROUP).split("def init_world_group")[1].split("\ndef ")[0]
    assert "use_pynccl=False" in world


@ALL
def test_every_variable_that_sglang_writes_is_known(release: Release) -> None:
    root = source_of(release).root
    written = {
        name
        for path in (root / "sglang" / "srt").rglob("*.py")
        for name in _WRITE.findall(path.read_text(encoding="utf-8"))
    }
    assert "NCCL_CUMEM_ENABLE" in written
    assert written <= set(nccl.SGLANG_WRITES)


def test_nothing_is_listed_that_no_release_writes() -> None:
    texts = "".join(
        path.read_text(encoding="utf-8")
        for release in RELEASES
        for folder in ("entrypoints", "arg_groups")
        for path in (source_of(release).root / "sglang" / "srt" / folder).glob("*.py")
    )
    texts += "".join(source_of(release).text("sglang.srt.server_args") for release in RELEASES)
    assert {name for name in nccl.SGLANG_WRITES if f'environ["{name}"]' not in texts} <= {
        name for name in nccl.SGLANG_WRITES if f'setdefault("{name}"' in texts
    }


@ALL
def test_paths_past_nccl(release: Release) -> None:
    """Where a group has such a path, it answers to the question and has the size."""
    source = source_of(release)
    group = source.text(_GROUP)
    for path, attribute, question, largest in nccl.PATHS:
        if f"self.{attribute}" not in group:
            continue
        assert f"{question}(" in group, path
        folder = source.root / "sglang/srt/distributed/device_communicators"
        texts = [file.read_text(encoding="utf-8") for file in folder.glob("*.py")]
        owners = [text for text in texts if f"def {question}(" in text]
        assert owners, path
        assert any(f"self.{largest}" in text for text in owners) or not largest, path


@ALL
def test_fusion(release: Release) -> None:
    source = source_of(release)
    found = [
        place for place in nccl.FUSION if f"def {place[1]}(batch_size" in source.text(place[0])
    ]
    assert len(found) == 1
    assert "FUSE_ALLREDUCE_MAX_BATCH_SIZE = " in source.text(found[0][0])


@ALL
def test_ray_actors(release: Release) -> None:
    """Stock starts actors without a runtime environment and without plugins, where it has any."""
    source = source_of(release)
    actor = source.text("sglang.srt.ray.scheduler_actor")
    texts = [source.text(module) for module in nccl.RAY]
    assert any(f"{nccl.ACTOR}.options(" in text for text in texts) is bool(actor)
    assert "load_plugins" not in actor
    assert not any("runtime_env" in text for text in (*texts, actor))
