"""Every function that the package wraps, replaces or calls is as the preflight knows it."""

from __future__ import annotations

import pytest

from sglang_verify_graphs.compat.preflight import check, check_worker, in_source, refused
from sglang_verify_graphs.compat.releases import Release
from sglang_verify_graphs.compat.requirements import Requirement, requirements_of
from tests.contract.source import Missing, Source

pytestmark = pytest.mark.contract


def test_requirements(source: Source, release: Release) -> None:
    needs, find = requirements_of(release), in_source(source)
    assert refused(check(needs.launcher, find)) == []
    assert refused(check_worker(needs, find)) == []


def test_every_requirement_has_its_row(source: Source, release: Release) -> None:
    needs, find = requirements_of(release), in_source(source)
    rows = (*check(needs.launcher, find), *check_worker(needs, find))
    assert [row.name for row in rows] == [str(need) for need in needs]


@pytest.mark.parametrize(
    ("need", "kind", "reason"),
    [
        (("ServerArgs.no_such_method", ()), "patch", "it is gone"),
        (("NoSuchClass", ()), "patch", "it is gone"),
        (("ServerArgs.add_cli_args.parser", ()), "patch", "it is gone"),
        (("ServerArgs.add_cli_args", ("parser", "more")), "patch", "not more"),
        (("ServerArgs.add_cli_args", ()), "call", "must be given parser"),
    ],
    ids=str,
)
def test_what_differs_is_refused(
    source: Source, need: tuple[str, tuple[str, ...]], kind: str, reason: str
) -> None:
    (row,) = check([Requirement("sglang.srt.server_args", *need)], in_source(source), kind)
    assert reason in row.reason
    assert str(row).startswith("refused because it ")


def test_what_is_gone_is_reported(source: Source) -> None:
    with pytest.raises(Missing):
        source.function("sglang.srt.server_args", "ServerArgs.no_such_method")


def test_entry_points_of_the_launcher_are_of_the_kinds_that_are_wrapped(source: Source) -> None:
    """``wrapt`` hands a static method its arguments as they are, a class method without ``cls``."""
    kinds = {
        name: [d.id for d in source.function("sglang.srt.server_args", name).decorator_list]
        for name in ("ServerArgs.add_cli_args", "ServerArgs.from_cli_args")
    }
    assert kinds == {
        "ServerArgs.add_cli_args": ["staticmethod"],
        "ServerArgs.from_cli_args": ["classmethod"],
    }
