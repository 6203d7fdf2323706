"""SGLang's own Ray launcher on a running cluster, for `test_ray.py`; prints one JSON line.

Everything up to the handshake is real: arguments, `RayEngine._launch_subprocesses`, placement
group, `SchedulerActor` with its whole scheduler. The event loop is not: it begins with
`torch.cuda.set_device`, which a CPU does not have.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main(argv: list[str]) -> None:
    """As `python -m sglang.launch_server --use-ray`, as far as the actors go."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    server_args = prepare_server_args(argv)
    import ray
    from sglang.srt.entrypoints.engine import (
        init_tokenizer_manager,
        run_detokenizer_process,
        run_scheduler_process,
    )
    from sglang.srt.ray.engine import RayEngine

    if not hasattr(server_args, "placement_group") and hasattr(server_args, "override"):
        # 0.5.17: as RayEngine.__init__ (ray/engine.py:237); launch_server forgets it, and dies.
        server_args.override("ray.placement_group", placement_group=None)
    launched = RayEngine._launch_subprocesses(
        server_args,
        init_tokenizer_manager_func=init_tokenizer_manager,
        run_scheduler_process_func=run_scheduler_process,
        run_detokenizer_process_func=run_detokenizer_process,
    )
    (actors,) = [x.scheduler_actors for x in launched if hasattr(x, "scheduler_actors")]
    found = ray.get([actor.__ray_call__.remote(look) for actor in actors])
    driver = {k: v for k, v in os.environ.items() if k.startswith("NCCL_")}
    print(json.dumps({"driver": driver, "actors": found}), flush=True)
    os._exit(0)  # SGLang's threads and children would hold the interpreter


def look(actor: Any) -> dict[str, Any]:
    """What there is in an actor; runs inside it."""
    import os
    import sys

    ours = sys.modules.get("sglang_verify_graphs.install")
    plugins = sys.modules.get("sglang.srt.plugins")
    return {
        "scheduler": type(actor.scheduler).__name__,
        "environ": {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "CUDA_DEV"))},
        "plugins": bool(plugins and plugins._plugins_loaded),
        "patched": ours.installed() if ours else [],
        "nccl": ours.report.nccl if ours else None,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
