"""What SGLang does with NCCL: the variables it writes, its communicators, its paths past them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from sglang_verify_graphs.compat.facts import SchedulerFacts, module
from sglang_verify_graphs.nccl.evidence import Bypass

_SRT = "sglang.srt"
RAY = (f"{_SRT}.ray.engine", f"{_SRT}.ray.data_parallel_controller")
"""Modules that start ``SchedulerActor``; 0.5.10 and later."""
ACTOR = "SchedulerActor"

# 0.5.9: entrypoints/engine.py:806-818, server_args.py:2791;
# 0.5.17: entrypoints/engine.py:1574-1597, server_args.py:7881;
# 0.5.23: entrypoints/engine.py:1878-1921; arg_groups/attention_hook.py:676-698, moe_hook.py:403,
# parallel_hook.py:425.
SGLANG_WRITES = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "always",
    "NCCL_CUMEM_ENABLE": "--enable-symm-mem, KV sharding, DeepEP or multi-node NVLink, else unset",
    "NCCL_NVLS_ENABLE": "--enable-nccl-nvls or --enable-symm-mem, else unset",
    "NCCL_MNNVL_ENABLE": "multi-node NVLink",
    "NCCL_GRAPH_MIXING_SUPPORT": "decode context parallelism",
    "NCCL_GRAPH_REGISTER": "captured collectives, where it is unset",
    "NCCL_ALGO": "deterministic inference",
    "NCCL_MIN_NCHANNELS": "deterministic inference",
    "NCCL_MAX_NCHANNELS": "deterministic inference",
}
"""Variables that SGLang writes in the launcher, and when."""

# Attribute of the group, its question about a tensor, its largest size in bytes where it has one
# (distributed/parallel_state.py; _resolve_outplace_all_reduce_method in 0.5.23:949).
_SYMMETRIC = "should_torch_symm_mem_allreduce"
PATHS = (
    ("custom all-reduce", "ca_comm", "should_custom_ar", "max_size"),
    ("PCIe IPC all-reduce", "pcie_ipc_comm", "should_pcie_ipc_ar", "max_numel"),
    ("quick all-reduce", "qr_comm", "should_quick_allreduce", "qr_max_size"),
    ("MSCCL++", "pymscclpp_comm", "should_mscclpp_allreduce", ""),
    ("torch symmetric memory", "torch_symm_mem_comm", _SYMMETRIC, "max_size"),
)
# layers/communicator.py to 0.5.20; 0.5.21 keeps the name, 0.5.22 renames it.
FUSION = (
    (f"{_SRT}.layers.layer_boundary.residual.add_norm", "flashinfer_ar_fusion_applies"),
    (f"{_SRT}.layers.layer_boundary.residual.add_norm", "apply_flashinfer_allreduce_fusion"),
    (f"{_SRT}.layers.communicator", "apply_flashinfer_allreduce_fusion"),
)


def installed_version() -> tuple[int, ...] | None:
    """Of the NCCL distribution beside torch; None where there is none."""
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            return tuple(int(part) for part in version(name).split(".")[:3] if part.isdecimal())
        except PackageNotFoundError:
            continue
    return None


def load_plugins() -> None:
    """As ``run_scheduler_process`` does first and a Ray actor never; a second call does nothing."""
    with suppress(ModuleNotFoundError):  # 0.5.10 has actors and no plugins
        module(f"{_SRT}.plugins").load_plugins()


class NcclFacts:
    """The tensor-parallel group of a live scheduler, as NCCL serves it."""

    def __init__(self, facts: SchedulerFacts) -> None:
        self._facts = facts
        self.group = module(f"{_SRT}.distributed.parallel_state").get_tp_group()
        config = facts.model_runner.model_config
        self._hidden, self._dtype = int(config.hidden_size), config.dtype
        self._on_gpu = self.group.device.type == "cuda"

    @property
    def communicator_up(self) -> bool:
        """Whether this rank has a NCCL communicator."""
        found = getattr(self.group, "pynccl_comm", None)
        return bool(found is not None and found.available)

    def message_tokens(self) -> Sequence[int]:
        """Tokens of the all-reduces to look at: decode and verify of 1 to 32 requests."""
        width = 1
        if self._facts.scheduler.draft_worker is not None:
            width = int(self._facts.config("speculative_num_draft_tokens") or 1)
        return sorted({batch * w for batch in (1, 2, 4, 8, 16, 32) for w in (1, width)})

    def probe(self) -> None:
        """All-reduces of those sizes, so that NCCL says what it chooses.

        On the communicator of captured graphs, which is up: torch would make one of its own for
        this, out of memory that nobody planned for.
        """
        torch, own = module("torch"), self.group.pynccl_comm
        if not self._on_gpu:
            return
        for tokens in self.message_tokens():
            data = torch.zeros(tokens, self._hidden, dtype=self._dtype, device=self.group.device)
            with own.change_state(enable=True):
                own.all_reduce(data)
            torch.cuda.synchronize()

    def bypasses(self) -> tuple[Bypass, ...]:
        """Paths that take an all-reduce of one token past NCCL, asked of SGLang itself."""
        return tuple(self._bypasses())

    def _bypasses(self) -> Iterator[Bypass]:
        if not self._on_gpu:
            return
        one = module("torch").zeros(1, self._hidden, dtype=self._dtype, device=self.group.device)
        for path, attribute, question, largest in PATHS:
            found = getattr(self.group, attribute, None)
            if found is None or getattr(found, "disabled", False):
                continue
            if getattr(found, question)(one):
                unit = one.element_size() if largest == "max_numel" else 1
                yield Bypass(path, int(getattr(found, largest, one.nbytes)) * unit + 1)
        for name, function in FUSION:
            try:
                where = module(name)
                applies = getattr(where, function)
            except (ImportError, AttributeError):
                continue
            if applies(1):
                tokens = int(where.FUSE_ALLREDUCE_MAX_BATCH_SIZE)
                yield Bypass("flashinfer fusion", tokens * one.nbytes + 1)
            return
