"""Is everything we patch, call and read where we expect it? Asked before anything is patched.

One table, filled in two ways: from the source of a release (``doctor``, the contract tests) and
from the imported modules of a running process, whose ranks must all hold the same table.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from sglang_verify_graphs.compat.releases import Release
from sglang_verify_graphs.compat.requirements import Requirement, Requirements
from sglang_verify_graphs.compat.source import Source, parameters, required
from sglang_verify_graphs.compat.values import attributes


class State(str, Enum):
    """What becomes of a row."""

    APPLIED = "applied"
    NOT_NEEDED = "not needed"
    REFUSED = "refused"


@dataclass(frozen=True)
class Row:
    """One line of the table; ``kind`` says what ``name`` names."""

    kind: str
    name: str
    state: State = State.APPLIED
    reason: str = ""

    def __str__(self) -> str:
        link = " because " if self.state is State.REFUSED else ": "
        return f"{self.state.value}{link}{self.reason}" if self.reason else self.state.value


class Signature(NamedTuple):
    """Names by which a function takes arguments, and those that it does not do without."""

    names: list[str]
    required: list[str]


PLUGIN_LOADER = Requirement("sglang.srt.plugins", "load_plugins")
"""Calls the entry points of plugins, in the launcher and in every worker."""

Find = Callable[[Requirement], Signature]
"""Looks a requirement up; raises ``LookupError``, which says what is missing."""


def in_source(source: Source) -> Find:
    """Looks requirements up in the text of a release."""

    def find(need: Requirement) -> Signature:
        function = source.function(need.module, need.qualname)
        return Signature(parameters(function), required(function))

    return find


def in_process(need: Requirement) -> Signature:
    """Looks a requirement up among the objects of this process."""
    try:
        found: Any = importlib.import_module(need.module)
        for part in need.qualname.split("."):
            found = inspect.getattr_static(found, part)
    except (ImportError, AttributeError) as error:
        raise LookupError(str(error)) from None
    function = found.__func__ if isinstance(found, (classmethod, staticmethod)) else found
    taken = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    return Signature([p.name for p in taken], [p.name for p in taken if p.default is p.empty])


def check(needs: Iterable[Requirement], find: Find, kind: str = "patch") -> tuple[Row, ...]:
    """A row for each requirement."""
    rows = []
    for need in needs:
        problem = _problem(need, find, called=kind == "call")
        rows.append(Row(kind, str(need), State.REFUSED if problem else State.APPLIED, problem))
    return tuple(rows)


def check_worker(needs: Requirements, find: Find) -> tuple[Row, ...]:
    """What a scheduler process patches, replaces while it captures, and calls."""
    return (
        *check((*needs.scheduler, *needs.capture), find),
        *check(needs.worker, find, kind="call"),
    )


def check_values(release: Release, source: Source) -> tuple[Row, ...]:
    """A row for each class whose attributes the adapter relies on."""
    rows = []
    for owner, names in attributes(release).items():
        try:
            missing = sorted(set(names) - source.attributes(*owner.split(":")))
            problem = f"it has no {', '.join(missing)}" if missing else ""
        except LookupError as error:
            problem = f"it is gone ({error})"
        rows.append(Row("values", owner, State.REFUSED if problem else State.APPLIED, problem))
    return tuple(rows)


def refused(rows: Iterable[Row]) -> list[str]:
    """The rows that forbid to go on, one line each."""
    return [f"{row.name} {row}" for row in rows if row.state is State.REFUSED]


def _problem(need: Requirement, find: Find, *, called: bool) -> str:
    try:
        found = find(need)
    except LookupError as error:
        return "it is gone" if str(error) == str(need) else f"it is gone ({error})"
    if missing := [name for name in need.parameters if name not in found.names]:
        return f"it takes {found.names}, not {', '.join(missing)}"
    if called and (more := [name for name in found.required if name not in need.parameters]):
        return f"it must be given {', '.join(more)}, which this package does not know"
    return ""


# -- upstream defects ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Defect:
    """A fault of some SGLang releases, and how this package keeps it from serving."""

    name: str
    present: Callable[[Release], bool]
    removal: str
    patch: str = ""
    """The one of ``patches/`` that mends it."""


DEFECTS: tuple[Defect, ...] = (
    Defect(
        "verify above the captured ladder runs eager, without a word",
        lambda release: True,
        "captured to the largest batch that may run, and named where it is not",
    ),
    Defect(
        "draft extend of narrower step counts runs eager",
        lambda release: release.draft_extend_width_from_server_args,
        "its graphs are captured at their own width",
        "draft-extend-width",
    ),
    Defect(
        "draft extend runs eager on FlashAttention-3",
        lambda release: not release.graphs_fa3_draft_extend,
        "counted as BACKEND_NOT_GRAPHED; triton and flashinfer have graphs",
    ),
    Defect(
        "capturing a step count above the configured one dies",
        lambda release: release.logits_of_configured_width,
        "the widest is configured, narrower ones are added, wider ones are refused",
        "wide-candidates",
    ),
    Defect(
        "every runner captures on a stream of its own, so that no graph reuses memory of another",
        lambda release: release.stream_per_capture,
        "one stream for all captures",
        "wide-candidates",
    ),
    Defect(
        "each step count captures every batch, whatever it was told",
        lambda release: release.runner_package,
        "the ladder is replaced where it is read",
        "batch-pruning",
    ),
    Defect(
        "without padding no graph is ever found",
        lambda release: release.integer_keys,
        "the gate checks the size, stock's lookup is by size",
    ),
    Defect(
        "a batch of another width passes stock's gate",
        lambda release: release.width_attribute == "num_tokens_per_bs",
        "the gate checks the width",
        "graph-key-width",
    ),
    Defect(
        "a request for other hidden states recaptures the whole ladder in mid-serving",
        lambda release: release.recaptures_hidden_mode,
        "such a verify runs eager, by name",
    ),
    Defect(
        "the largest batch asked for may not be captured",
        lambda release: release.truncates_ladder,
        "captured to the largest batch that may run",
    ),
    Defect(
        "verify graphs read the default EAGLE-3 layers, whichever the draft asks for",
        lambda release: release.captures_default_layers,
        "they read the configured ones",
    ),
    Defect(
        "a refused verify may be replayed in a prefill graph",
        lambda release: release.prefill_graph_takes_verify,
        "prefill graphs are kept from it",
    ),
)


def defects(release: Release, patches: Sequence[str] = ()) -> tuple[Row, ...]:
    """A row for each defect that any release has; ``patches`` are those that SGLang carries."""
    rows = []
    for defect in DEFECTS:
        state, reason = State.APPLIED, defect.removal
        if not defect.present(release):
            state, reason = State.NOT_NEEDED, "this release does not have it"
        elif defect.patch in patches:
            state, reason = State.NOT_NEEDED, f"SGLang carries the patch {defect.patch}"
        rows.append(Row("defect", defect.name, state, reason))
    return tuple(rows)


def check_patches(patches: Iterable[str]) -> tuple[Row, ...]:
    """A row for each patch that SGLang carries."""
    reason = "SGLang carries it, and what it mends is left to it"
    return tuple(Row("patched", name, State.NOT_NEEDED, reason) for name in patches)
