"""The ladder that ``plan`` predicts is the one that each release's own code comes to.

That code stands in functions which need their module's names and nothing of a GPU: the functions
alone are executed, from GPU memory to the batches that the decode runner captures.
"""

from __future__ import annotations

import ast
import copy
import logging
import sys
import types
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_verify_graphs.compat.arguments import (
    RUNNING_REQUESTS,
    ServerParser,
    facts_of,
    stock_ladder,
)
from sglang_verify_graphs.compat.releases import RELEASES, Release
from tests.contract.conftest import source_of
from tests.contract.source import Missing, Source

pytestmark = pytest.mark.contract

_SRT = "sglang.srt"
_HOOKS = f"{_SRT}.arg_groups"
_GPUS = (16, 24, 32, 40, 48, 80, 94, 141, 180)
EAGLE = ["--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3",
         "--speculative-eagle-topk", "1", "--max-running-requests"]  # fmt: skip


@pytest.fixture(params=RELEASES, ids=lambda release: release.version)
def release(request: pytest.FixtureRequest) -> Release:
    return request.param


@pytest.fixture
def stock(release: Release, monkeypatch: pytest.MonkeyPatch) -> Stock:
    return Stock(release, source_of(release), monkeypatch)


class Stock:
    """One release's way from its arguments to the ladder."""

    def __init__(self, release: Release, source: Source, patch: pytest.MonkeyPatch) -> None:
        self.source, self.modern = source, release.runner_package
        self.alone = SimpleNamespace(attn_tp_size=1, attn_cp_size=1)
        self.names: dict[str, Any] = {
            "copy": copy, "logger": logging.getLogger("stock"), "ceil_align": lambda n, _: n,
            "resolving_view": lambda arguments: arguments, "use_mla_backend": lambda _: False,
            "declare_resolution": lambda arguments, _, **new: vars(arguments).update(new),
            "get_device_memory_capacity": lambda _: self.gpu_mib, "get_exec": lambda: self.exec,
            "get_flags": lambda: SimpleNamespace(
                capture=SimpleNamespace(enable_torch_compile=False)
            ),
            "get_parallel": lambda: self.alone, "require_gathered_buffer": lambda *_: False,
            "get_attention_tp_size": lambda: 1, "get_attention_cp_size": lambda: 1,
            "get_cuda_graph_batch_size_alignment": lambda *_, **__: 1,
            "get_cuda_graph_max_batch_size": lambda *given: given[-1],
            "DllmConfig": SimpleNamespace(from_server_args=lambda _: None),
        }  # fmt: skip
        try:
            self.configure = self._function(f"{_HOOKS}.memory_hook", "handle_gpu_memory_settings")
        except Missing:
            owner = "ServerArgs._handle_gpu_memory_settings"
            self.configure = self._function(f"{_SRT}.server_args", owner)
            name = "_generate_decode" if self.modern else "_generate"
            self.method = f"{name}_cuda_graph_batch_sizes"
            self.sizes = self._function(f"{_SRT}.server_args", f"ServerArgs.{self.method}")
        else:
            self.method = "generate_decode_cuda_graph_batch_sizes"
            self.sizes = self._function(f"{_HOOKS}.cuda_graph_hook", self.method)
            self._module(patch, f"{_HOOKS}.cuda_graph_hook", **{
                self.method: self.sizes, "generate_prefill_cuda_graph_batch_sizes": None,
                "generate_cpu_graph_batch_sizes": None,
            })  # fmt: skip
            self._module(
                patch, f"{_HOOKS}.model_overrides.qwen3_vl",
                expand_multimodal_decode_graph_to_running_limit=lambda *_: None,
            )  # fmt: skip
        self.captured = self._function(release.runner_module, "get_batch_sizes_to_capture")

    def ladder(
        self, gpu_gb: int, tp_size: int, requests: int, *, padding: bool, **graphs: Any
    ) -> tuple[int, ...]:
        self.gpu_mib = gpu_gb * 1024
        decode, prefill = (
            SimpleNamespace(bs=sizes, max_bs=top, backend="full")
            for sizes, top in ((graphs.get("bs"), graphs.get("max_bs")), ([1], 1))
        )
        config = SimpleNamespace(decode=decode, prefill=prefill)
        arguments = SimpleNamespace(
            device="cuda", tp_size=tp_size, chunked_prefill_size=None, mem_fraction_static=0.8,
            cuda_graph_config=config, cuda_graph_bs=decode.bs, cuda_graph_max_bs=decode.max_bs,
            piecewise_cuda_graph_max_tokens=1, piecewise_cuda_graph_tokens=[1], context_length=None,
            speculative_algorithm="EAGLE3", max_running_requests=requests, enable_symm_mem=False,
            disable_cuda_graph_padding=not padding, enable_two_batch_overlap=False,
            enable_torch_compile=False,
        )  # fmt: skip
        setattr(arguments, self.method, partial(self.sizes, arguments))
        takes_memory = self.configure.__code__.co_argcount == 2
        self.configure(arguments, *[self.gpu_mib] * takes_memory)
        self.exec = SimpleNamespace(
            graph=SimpleNamespace(cuda_graph_config=arguments.cuda_graph_config),
            overlap=SimpleNamespace(enable_two_batch_overlap=False),
        )
        pool = SimpleNamespace(size=requests)
        runner = SimpleNamespace(server_args=arguments, req_to_token_pool=pool)
        return tuple(self.captured(runner, 4)[0])

    def _function(self, module: str, name: str) -> Any:
        node = self.source.function(module, name)
        tree = ast.parse("from __future__ import annotations")
        tree.body.append(node)
        exec(compile(tree, f"{module}:{name}", "exec"), self.names)
        return self.names[node.name]

    def _module(self, patch: pytest.MonkeyPatch, name: str, **found: Any) -> None:
        parts = name.split(".")
        for at in range(1, len(parts)):
            patch.setitem(sys.modules, ".".join(parts[:at]), types.ModuleType(parts[at - 1]))
        module = types.ModuleType(name)
        vars(module).update(found)
        patch.setitem(sys.modules, name, module)


def predicted(
    release: Release, gpu_gb: int | None, tp_size: int, requests: int, *words: str
) -> tuple[int, ...]:
    args = ServerParser().parse_args([*EAGLE, str(requests), "--tp", str(tp_size), *words])
    return stock_ladder(args, facts_of(args, release), release, gpu_gb)


@pytest.mark.parametrize("gpu_gb", _GPUS)
def test_ladder_by_gpu_memory(stock: Stock, release: Release, gpu_gb: int) -> None:
    for tp_size in (1, 2, 4, 8):
        for requests in (1, 7, 33, RUNNING_REQUESTS, 300, 2048):
            theirs = stock.ladder(gpu_gb, tp_size, requests, padding=True)
            assert predicted(release, gpu_gb, tp_size, requests) == theirs, (tp_size, requests)
        exact = stock.ladder(gpu_gb, tp_size, 300, padding=False)
        found = predicted(release, gpu_gb, tp_size, 300, "--disable-cuda-graph-padding")
        assert found == exact


def test_ladder_that_the_user_gives(stock: Stock, release: Release) -> None:
    for top in (1, 20, 50, 271, 290, 600):
        theirs = stock.ladder(48, 1, 500, padding=True, max_bs=top)
        assert predicted(release, None, 1, 500, "--cuda-graph-max-bs", str(top)) == theirs, top
    for sizes in ([1, 8, 30], [64], [8, 1, 2]):
        theirs = stock.ladder(48, 1, 48, padding=True, bs=list(sizes))
        found = predicted(release, None, 1, 48, "--cuda-graph-bs", *map(str, sizes))
        assert found == theirs, sizes


def test_running_requests_with_speculation(release: Release) -> None:
    source = source_of(release)
    module, name = f"{_HOOKS}.speculative_hook", "_handle_eagle_family"
    if not source.text(module):
        module, name = f"{_SRT}.server_args", "ServerArgs._handle_speculative_decoding"
    found = {
        node.value.value
        for node in ast.walk(source.function(module, name))
        if (isinstance(node, ast.keyword) and node.arg == "max_running_requests")
        or (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]).endswith(".max_running_requests")
        )
    }
    assert found == {RUNNING_REQUESTS}
