"""A measured number and how far off it may be."""

from __future__ import annotations

from typing import NamedTuple


class Estimate(NamedTuple):
    """A value inside its 95% interval; what was never measured is ``None``, not an ``Estimate``."""

    value: float
    low: float
    high: float
