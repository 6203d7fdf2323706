"""``control``: what a running server does with its rounds, shown and changed.

The state is read first: a change that could not be seen is not made. What a server sends is
untrusted, and the schedulers of several data-parallel replicas answer in no order.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Mapping
from typing import Any

from sglang_verify_graphs.cli.client import add_server_to, clean, fetch, key_of
from sglang_verify_graphs.control import COLD_ZERO, MODE, RESUME, STEPS, Mode
from sglang_verify_graphs.errors import EvidenceError, SettingsError

_ACTIONS = "policy, pin K, cold-zero on, cold-zero off, observe, off or on"
_WIDTH = 300
"""Characters of a line of what a server sent."""


def add_to(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "control",
        help="show and change what a running server does with its rounds",
        description="ACTION is policy (draft steps by what pays), pin K (K draft steps in every "
        "round), cold-zero on or off (rounds of 0 steps skip the draft extend, or not), observe "
        "(stock's answers, counted), off (stock alone) or on (as before those two); without one, "
        "the state is shown. A change takes effect at the next decode round. Exit 0 where it is "
        "done, 1 where it was refused or is not in force, 2 where there is no answer.",
    )
    add_server_to(parser)
    parser.add_argument("action", nargs="*", metavar="ACTION", help=_ACTIONS)
    parser.add_argument("--admin-api-key", help="the server's, if it has one, for changes")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    answers: list[Any] = []
    try:
        asked, wanted = _change(arguments.action)
        reports = _reports(arguments)
        if asked:
            answers = _post(arguments, asked)
            reports = _reports(arguments)
    except (EvidenceError, SettingsError) as error:
        print(clean(f"error: {error}"), file=sys.stderr)
        return 2
    for number, report in enumerate(reports, 1):
        print(clean(f"scheduler {number}: {_state(report)}")[:_WIDTH])
    change = ", ".join(f"{key} {int(value)}" for key, value in asked.items())
    problem = ""
    if refused := sum(answer is not True for answer in answers):
        problem = f"{refused} of {len(answers)} scheduler(s) refused {change}; their log says why"
    elif others := sum(
        any(report.get(field) not in values for field, values in wanted.items())
        for report in reports
    ):
        problem = (
            f"{others} of {len(reports)} scheduler(s) want something else than {change}; ask "
            "again, unless somebody else did"
        )
    if problem:
        print(f"error: {problem}", file=sys.stderr)
    return int(bool(problem))


def _change(words: list[str]) -> tuple[dict[str, int], Mapping[str, Collection[Any]]]:
    """What to ask for, and what a report's fields may be then."""
    match words:
        case []:
            return {}, {}
        case ["policy"]:
            return {MODE: Mode.ON, STEPS: RESUME}, {"control": ("policy",)}
        case ["pin", steps] if steps.isdecimal() and len(steps) < 10:
            wanted = {"control": ("pinned",), "pinned": (int(steps),)}
            return {MODE: Mode.ON, STEPS: int(steps)}, wanted
        case ["cold-zero", "on" | "off" as switch]:
            return {COLD_ZERO: int(switch == "on")}, {"cold_zero": (switch == "on",)}
        case ["on"]:
            return {MODE: Mode.ON}, {"control": ("policy", "pinned")}
        case ["off" | "observe" as name]:
            return {MODE: Mode[name.upper()]}, {"control": (name,)}
    raise SettingsError(f"{' '.join(words)!r} is no ACTION; give {_ACTIONS}")


def _post(arguments: argparse.Namespace, asked: dict[str, int]) -> list[Any]:
    """Whether each scheduler took it; ``/server_info`` answered, so 401 is for the admin's key."""
    url = f"{arguments.url}/set_internal_state"
    try:
        answers = fetch(url, arguments.admin_api_key or key_of(arguments), {"server_args": asked})
    except EvidenceError as error:
        raise EvidenceError(str(error).replace(" --api-key", " --admin-api-key")) from None
    if not isinstance(answers, list) or not answers:
        raise EvidenceError(f"{url} answers no list of schedulers; is it an SGLang server?")
    return answers


def _reports(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    url = f"{arguments.url}/server_info"
    info = fetch(url, key_of(arguments))
    states = info.get("internal_states") if isinstance(info, dict) else None
    states = states if isinstance(states, list) else []
    found = [state.get("verify_graphs") for state in states if isinstance(state, dict)]
    reports = [report for report in found if isinstance(report, dict)]
    if not reports or len(reports) < len(states):
        raise EvidenceError(
            f"{url} holds no verify_graphs; start the server with sglang-verify-graphs installed "
            "and --enable-verify-graphs"
        )
    return reports


def _state(report: dict[str, Any]) -> str:
    state, plan = report.get("state"), report.get("plan")
    if state != "active" or not isinstance(plan, dict):
        return f"state {state}, nothing to control; reasons: {report.get('reasons') or 'none'}"
    captured = ", ".join(steps for steps, batches in plan.items() if batches)
    return (
        f"control {report.get('control')}, draft_steps {report.get('draft_steps')}, "
        f"captured {captured}" + ", cold rounds of 0" * (report.get("cold_zero") is True)
    )
