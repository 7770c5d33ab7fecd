"""The command line, one file per group of commands."""

import os

# Read when pyarrow is imported. Mimalloc, Arrow's own choice, keeps what each thread has freed:
# over 100 MB in a run, and more the longer it takes. Dagster's runs choose it themselves.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "jemalloc")
