"""What a scenario imports from other people, imported once: its process is forked from there.

Nothing of SGLang and of this package is in it: those read the environment as they are imported.
"""

from __future__ import annotations

import contextlib
import importlib

for _name in (
    "torch",
    "transformers.models.auto",
    "transformers.models.llama",
    "openai.types.responses",
    "fastapi",
    "aiohttp",
    "compressed_tensors",
    "xgrammar",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)
