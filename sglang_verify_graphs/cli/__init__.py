"""``sglang-verify-graphs COMMAND``: what can be said of an installation or of a server."""

from __future__ import annotations

import argparse

from sglang_verify_graphs.cli import calibrate, control, doctor, explain, plan, ranks, report


def main(argv: list[str] | None = None) -> int:
    """Run one command; gives the exit status, 2 for a usage error."""
    parser = argparse.ArgumentParser(prog="sglang-verify-graphs", description=__doc__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (doctor, ranks, calibrate, report, explain, control, plan):
        command.add_to(commands)
    chosen = parser.parse_args(argv)
    return int(chosen.run(chosen))
