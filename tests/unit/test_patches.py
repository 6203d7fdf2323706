"""The life of a wrapper, from the patch to its undo: one suite for every kind of target, and for
every target there is on SGLang itself.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import wrapt

from sglang_verify_graphs import install

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
