"""NCCL tuning that reaches every rank, and the proof of it.

``evidence`` is what a rank knows, ``log`` what NCCL reported, ``status`` the judgement: these are
pure. ``profiles``, ``reach`` and ``proof`` act in SGLang's processes.
"""
