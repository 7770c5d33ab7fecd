"""The encoder pool: worker processes that turn texts in shared memory into vectors in shared
memory.

Read `pool.py` for the call, `arena.py` for the memory of texts and vectors, `schedule.py` for how
work is shared, `dispatcher.py` for supervision, and `worker/main.py` for the worker's side. Only
workers import torch.
"""
