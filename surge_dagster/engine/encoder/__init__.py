"""The encoder pool: worker processes that turn texts in shared memory into vectors in shared memory.

Read `spec.py` for what a vector depends on, `arena.py` for where texts and vectors lie, `pool.py` for the call, and
`worker.py` for the other side of the border. This process never imports torch: only workers do.
"""
