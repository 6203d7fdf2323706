"""The life of a wrapper, from the patch to its undo: one suite for every kind of target, and for
every target there is on SGLang itself.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import logging
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import wrapt

from sglang_verify_graphs import install
from sglang_verify_graphs.compat.releases import resolve_release, sglang_version
from sglang_verify_graphs.compat.requirements import requirements_of
from sglang_verify_graphs.settings import ENV
from tests.unit.test_install import LLAMA, ON, needs_sglang, sglang

CODE = """
class Owner:
    def greet(self, name):
        return f"hello {name}"

    @staticmethod
    def add(a, b=2):
        return a + b

    @classmethod
    def label(cls, end=""):
        return cls.__name__ + end
"""


def louder(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return f"{wrapped(*args, **kwargs)}!"


def theirs_by_wrapt(owner: Any, name: str) -> None:
    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return f"<{wrapped(*args, **kwargs)}>"

    wrapt.wrap_function_wrapper(owner, name, wrapper)


def theirs_by_hand(owner: Any, name: str) -> None:
    """As SGLang's hook registry does it: ``__func__`` of what says it is a class method."""
    found = owner.__dict__[name]
    kind = next((k for k in (staticmethod, classmethod) if isinstance(found, k)), None)
    function = found.__func__ if kind else getattr(owner, name)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return f"<{function(*args, **kwargs)}>"

    setattr(owner, name, kind(wrapper) if kind else wrapper)


THEIRS = pytest.mark.parametrize("theirs", [theirs_by_wrapt, theirs_by_hand])


class Target:
    """A method of some kind; its module is imported before or after the patch is asked for."""

    def __init__(self, module: str, name: str, first: str) -> None:
        self.name = name
        self._module = module
        if first == "imported first":
            importlib.import_module(module)
        self.patch()
        self.owner = importlib.import_module(module).Owner

    def patch(self) -> None:
        install._when_imported(
            self._module, lambda module: install._wrap(module, f"Owner.{self.name}", louder)
        )

    @property
    def there(self) -> Any:
        return self.owner.__dict__[self.name]

    def call(self) -> Any:
        return call(self.owner, self.name)


def call(owner: Any, name: str) -> Any:
    """The method, through its class or an heir of it."""
    return {
        "greet": lambda: owner().greet("you"),
        "add": lambda: owner.add(1),
        "label": lambda: type("Heir", (owner,), {}).label(end="."),
    }[name]()


ANSWER = {"greet": "hello you", "add": 3, "label": "Heir."}
"""What ``call`` gives on the original."""


@pytest.fixture(autouse=True)
def no_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "_patches", {})


_number = count()


@pytest.fixture(params=["greet", "add", "label"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"patched_{next(_number)}"
    (tmp_path / f"{name}.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.fixture(params=["imported first", "patched first"])
def target(request: pytest.FixtureRequest, module: str, name: str) -> Target:
    return Target(module, name, request.param)


@pytest.fixture
def bare(module: str, name: str) -> tuple[Any, Callable[[], None]]:
    """The owner with nothing patched yet, and how to patch it."""
    owner = importlib.import_module(module).Owner
    return owner, lambda: install._wrap(importlib.import_module(module), f"Owner.{name}", louder)


def test_patch(target: Target) -> None:
    assert target.call() == f"{ANSWER[target.name]}!"
    assert install.installed() == [f"{target.owner.__module__}:Owner.{target.name}"]


def test_a_wrapper_looks_like_what_it_wraps(target: Target) -> None:
    patch = install._patches[install.installed()[0]]
    assert type(patch.ours) is type(patch.original)
    assert inspect.signature(getattr(target.owner, target.name)) == inspect.signature(
        patch.original.__get__(None, target.owner)
    )


def test_double_patch(target: Target) -> None:
    ours = target.there
    target.patch()
    assert target.there is ours
    assert target.call() == f"{ANSWER[target.name]}!"


def test_unpatch_restores_the_very_object(bare: tuple[Any, Callable[[], None]]) -> None:
    owner, patch = bare
    stock = dict(vars(owner))
    patch()
    assert {k for k, v in vars(owner).items() if v is not stock[k]} != set()
    assert install.uninstall() == []
    assert {k for k, v in vars(owner).items() if v is not stock[k]} == set()
    assert install.installed() == []


def test_unpatch_of_one_module_leaves_the_others(target: Target) -> None:
    assert install.uninstall("another_module") == []
    assert target.call() == f"{ANSWER[target.name]}!"


@THEIRS
def test_a_foreign_wrapper_below_ours(
    bare: tuple[Any, Callable[[], None]], name: str, theirs: Callable[[Any, str], None]
) -> None:
    owner, patch = bare
    theirs(owner, name)
    before = owner.__dict__[name]
    patch()
    assert call(owner, name) == f"<{ANSWER[name]}>!"
    assert install.uninstall() == []
    assert owner.__dict__[name] is before
    assert call(owner, name) == f"<{ANSWER[name]}>"


@THEIRS
def test_a_foreign_wrapper_above_ours(
    target: Target, theirs: Callable[[Any, str], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Taking ours out would take theirs out too: it stays, passes calls through, and says so."""
    answer, where = ANSWER[target.name], install.installed()
    theirs(target.owner, target.name)
    above = target.there
    assert target.call() == f"<{answer}!>"
    with caplog.at_level(logging.WARNING):
        assert install.uninstall() == where
        assert install.uninstall() == where
    (record,) = caplog.records
    assert where[0] in record.message
    assert target.there is above
    assert target.call() == f"<{answer}>"
    assert install.installed() == []
    target.patch()
    assert target.there is above
    assert target.call() == f"<{answer}!>"
    assert install.installed() == where


def test_a_foreign_wrapper_that_goes_away(target: Target) -> None:
    """They put back what they found, ours; then undo is by identity again."""
    patch = install._patches[install.installed()[0]]
    theirs_by_wrapt(target.owner, target.name)
    assert install.uninstall() == [*install._patches]
    setattr(target.owner, target.name, patch.ours)
    assert target.call() == ANSWER[target.name]
    assert install.uninstall() == []
    assert target.there is patch.original


def test_a_library_that_put_the_original_back(target: Target) -> None:
    patch = install._patches[install.installed()[0]]
    setattr(target.owner, target.name, patch.original)
    assert install.installed() == []
    target.patch()
    assert target.call() == f"{ANSWER[target.name]}!"
    assert install.uninstall() == []
    assert target.there is patch.original


# -- every target there is, on SGLang itself -------------------------------------------------------

_LIFE = """
import importlib, inspect, json, os, pickle, sys
from argparse import ArgumentParser
from importlib.util import find_spec
from multiprocessing.reduction import ForkingPickler

import wrapt

from sglang_verify_graphs import install, plugin
from sglang_verify_graphs.compat.releases import resolve_release, sglang_version
from sglang_verify_graphs.compat.requirements import requirements_of

first, model, flag, carrier = sys.argv[1:]
flag = f"--{flag}"  # the interpreter looks for it among its arguments
needs = requirements_of(resolve_release(sglang_version(), allow_untested=False))
needs = {str(need): need for need in (*needs.launcher, *needs.scheduler)}
calls = []

def ask():
    sys.argv.append(flag)
    os.environ[carrier] = "{}"
    plugin.load()

def modules():
    return {need.module: importlib.import_module(need.module) for need in needs.values()}

def attributes():
    owners = list(modules().values())
    owners += [owner(need)[0] for need in needs.values()]
    return {(id(o), k): v for o in owners for k, v in list(vars(o).items())}

def owner(need):
    place, name = need.qualname.rsplit(".", 1)
    return getattr(modules()[need.module], place), name

def there(need):
    place, name = owner(need)
    return place.__dict__[name]

def chain(value):
    while value is not None:
        yield value
        value = getattr(value, "__wrapped__", None)

def by_wrapt(need):
    def theirs(wrapped, instance, args, kwargs):
        calls.append(str(need))
        return wrapped(*args, **kwargs)
    wrapt.wrap_function_wrapper(*owner(need), theirs)

def by_registry(need):
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    def theirs(wrapped, *args, **kwargs):
        calls.append(str(need))
        return wrapped(*args, **kwargs)
    HookRegistry.reset()
    HookRegistry.register(f"{need.module}.{need.qualname}", theirs, HookType.AROUND)
    HookRegistry.apply_hooks()

foreign = [by_wrapt]
if first == "patched first":
    ask()
    stock = {**attributes(), **{
        (id(owner(need)[0]), owner(need)[1]): install._patches[name].original
        for name, need in needs.items()
    }}
else:
    stock = attributes()
    ask()
if find_spec("sglang.srt.plugins"):
    foreign.append(by_registry)

def changed():
    now = attributes()
    return sorted(k[1] for k in stock.keys() | now.keys() if stock.get(k) is not now.get(k))

def live(name, need):  # not at the top level, whose names the registry would replace too
    original, ours = install._patches[name].original, there(need)
    case = {
        "patch": ours is not original and type(ours) is type(original)
        and inspect.signature(getattr(*owner(need))) == inspect.signature(
            original.__get__(None, owner(need)[0])),
    }
    plugin.load()
    case["double patch"] = there(need) is ours
    case["undo"] = install.uninstall() == [] and changed() == []
    for wrap in foreign:
        wrap(need)
        theirs = there(need)
        plugin.load()
        case[f"foreign below, {wrap.__name__}"] = (
            there(need) is not theirs and name in install.installed()
            and install.uninstall() == [] and there(need) is theirs)
        setattr(*owner(need), original)
        plugin.load()
        ours = there(need)
        wrap(need)
        theirs = there(need)
        ours = getattr(ours, "__func__", ours)
        case[f"foreign above, {wrap.__name__}"] = (
            any(getattr(v, "__func__", v) is ours for v in chain(theirs))
            and install.uninstall() == [name] and there(need) is theirs
            and install.installed() == [])
        setattr(*owner(need), original)
        install.uninstall()
    case["off means stock"] = changed() == []
    plugin.load()
    return case

found = {name: live(name, need) for name, need in needs.items()}

ServerArgs = modules()["sglang.srt.server_args"].ServerArgs
flags = {}
for wrap in foreign:
    del calls[:]
    wrap(needs["sglang.srt.server_args:ServerArgs.add_cli_args"])
    for state in ("on", "off"):
        parser = ArgumentParser()
        ServerArgs.add_cli_args(parser)
        flags[f"{wrap.__name__} {state}"] = [flag in parser.format_help(), len(calls)]
        install.uninstall()
    owner(needs["sglang.srt.server_args:ServerArgs.add_cli_args"])[0].add_cli_args = stock[
        id(ServerArgs), "add_cli_args"]
    plugin.load()

del calls[:]
foreign[-1](needs["sglang.srt.server_args:ServerArgs.from_cli_args"])
os.environ.pop(carrier)
arguments = importlib.import_module("sglang.srt.server_args").prepare_server_args(
    ["--model-path", model, "--port", "31999", "--device", "cpu", flag])
spawned = importlib.import_module("sglang.srt.managers.scheduler").run_scheduler_process
again, copied = pickle.loads(ForkingPickler.dumps((spawned, arguments)))
print(json.dumps({
    "cases": found, "flags": flags, "settings": bool(os.environ.get(carrier)), "hook": calls,
    "pickled": [again is spawned, type(copied) is ServerArgs, copied.port],
    "patched": install.installed(),
}))
"""

CASES = (
    "patch", "double patch", "undo", "foreign below, by_wrapt", "foreign above, by_wrapt",
    "foreign below, by_registry", "foreign above, by_registry", "off means stock",
)  # fmt: skip


@pytest.fixture(scope="class", params=["imported first", "patched first"])
def life(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(json.dumps(LLAMA))
    got = sglang(_LIFE, request.param, str(model), ON.removeprefix("--"), ENV)
    assert not isinstance(got, subprocess.CompletedProcess), got.stderr[-3000:]
    return got


def _has_registry() -> bool:
    spec = find_spec("sglang")
    assert spec is not None
    (folder,) = spec.submodule_search_locations or ()
    return Path(folder, "srt", "plugins", "hook_registry.py").exists()


class TestOnSGLang:
    pytestmark = needs_sglang

    @pytest.mark.parametrize("case", CASES)
    def test_every_target(self, life: Any, case: str) -> None:
        if case.endswith("by_registry") and not _has_registry():
            pytest.skip("this SGLang release has no plugins, and no registry of their hooks")
        release = resolve_release(sglang_version(), allow_untested=False)
        needs = requirements_of(release)
        assert list(life["cases"]) == [str(n) for n in (*needs.launcher, *needs.scheduler)]
        assert [name for name, passed in life["cases"].items() if not passed[case]] == []

    def test_a_foreign_hook_and_ours_both_work(self, life: Any) -> None:
        """Flags of ours while we are on, and their hook in both states."""
        for theirs in ("by_wrapt", "by_registry")[: 1 + _has_registry()]:
            assert life["flags"][f"{theirs} on"] == [True, 1]
            assert life["flags"][f"{theirs} off"] == [False, 2]
        assert life["hook"] == ["sglang.srt.server_args:ServerArgs.from_cli_args"]
        assert life["settings"], "another plugin's hook dropped the flags in silence"

    def test_what_is_spawned_pickles(self, life: Any) -> None:
        assert life["pickled"] == [True, True, 31999]
        assert any("Scheduler." in name for name in life["patched"])
