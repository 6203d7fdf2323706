"""Every function that the package wraps or calls exists, with the parameters it relies on."""

from __future__ import annotations

import pytest

from sglang_verify_graphs.compat.requirements import LAUNCHER, SCHEDULER, WORKER, Requirement
from tests.contract.source import Missing, Source, parameters

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("need", [*LAUNCHER, *SCHEDULER, *WORKER], ids=str)
def test_requirement(source: Source, need: Requirement) -> None:
    found = parameters(source.function(need.module, need.qualname))
    assert set(need.parameters) <= set(found)


@pytest.mark.parametrize(
    "qualname", ["ServerArgs.no_such_method", "NoSuchClass", "ServerArgs.add_cli_args.parser"]
)
def test_what_is_gone_is_reported(source: Source, qualname: str) -> None:
    with pytest.raises(Missing):
        source.function("sglang.srt.server_args", qualname)


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
