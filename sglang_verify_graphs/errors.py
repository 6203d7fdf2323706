"""Errors of this package. Every message says what is wrong, why, and what to do."""

from __future__ import annotations


class VerifyGraphsError(Exception):
    """Base of every error this package raises."""


class SettingsError(VerifyGraphsError):
    """A flag, an argument of ``enable()`` or the environment variable holds a bad value."""


class UnsupportedError(VerifyGraphsError):
    """This SGLang release, or a mode it was started in, cannot be served; stock behaviour stays."""


class CaptureError(VerifyGraphsError):
    """Graphs of a width could not be captured."""


class AttestationError(VerifyGraphsError):
    """A rank does not run what the other ranks run, or a patch is not in place."""


class EvidenceError(VerifyGraphsError):
    """What a rank or a server says of NCCL cannot be read."""


class CostsError(VerifyGraphsError):
    """A table of round costs cannot be read, or was measured on another server."""


def first_line(error: BaseException) -> str:
    """Of its message, which runs over many lines in torch, or its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
