"""What a GPU makes of this engine, in one command of less than ten minutes: ceilings, passes,
run, service, small passes, pool.

    python -m benchmarks.gpu

Needs torch, transformers, sentence-transformers 6.2, pyarrow, filelock and psutil, for the stage
`run` also polars and polars-hash, for the stage `http` also aiohttp, fastapi, uvicorn,
pydantic-settings, prometheus-client and python-multipart; and no network. `benchmarks.gpu_models`
makes a folder of 50 MB to take to a GPU machine. Every result is printed, and appended to
results.jsonl, as soon as it is measured; an error ends only its stage. `--device cpu --quick` is a
rehearsal.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
import traceback
from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.kernels import attention, ceilings, cudnn
from benchmarks.gpu.lanes import lanes
from benchmarks.gpu.passes import bf16, causal, parts, passes, tokenizer
from benchmarks.gpu.pools import peer, pool, run
from benchmarks.gpu.service import http
from benchmarks.gpu.small import small
from benchmarks.harness import Options, temporary_folder, versions_of
from surge_dagster import EncodingSpec

_PACKAGES = (
    "torch",
    "transformers",
    "sentence-transformers",
    "tokenizers",
    "numpy",
    "pyarrow",
    "triton",
)


def environment(bench: Bench) -> None:
    """Versions, and facts of the card."""
    cores = len(os.sched_getaffinity(0))
    python = platform.python_version()
    bench.say("environment", python=python, cores=cores, **versions_of(_PACKAGES))
    if bench.on_cuda:
        facts = torch.cuda.get_device_properties(bench.device)
        gigabytes = facts.total_memory / 1e9
        cuda = torch.version.cuda
        bench.say("environment", gpu=facts.name, gigabytes=gigabytes, cuda=cuda)


# The first ones, to `bf16`, are expected to take nine minutes on an H200; the others follow if time
# remains, or if they are named.
_ALL: tuple[Callable[[Bench], None], ...] = (
    environment,
    ceilings,
    passes,
    run,
    http,
    small,
    parts,
    causal,
    bf16,
    pool,
    lanes,
    tokenizer,
    attention,
    cudnn,
    peer,
)
_STAGES = {stage.__name__: stage for stage in _ALL}
_LEAST_SECONDS = 10  # of a stage


@contextlib.contextmanager
def _stage(bench: Bench, name: str) -> Iterator[None]:
    started = time.monotonic()
    try:
        yield
    except Exception as error:
        bench.missed.append(f"{name}: {type(error).__name__}: {error}"[:300])
        bench.say(name, error=traceback.format_exc()[-2_000:])
    bench.say(name, stage_seconds=time.monotonic() - started)


def main() -> None:
    options = Options(__doc__)
    options.add_argument("--model", help="folder of all-MiniLM-L6-v2, also in fp16")
    options.add_argument("--device", default="cuda:0")
    options.add_names("--stages", _STAGES)
    options.add_argument("--seconds", type=float, default=560.0, help="when nothing new begins")
    options.add_argument("--out", default=os.environ.get("OUT", "gpu-results"))
    settings = options.parse_args()
    if settings.device != "cpu" and not torch.cuda.is_available():
        options.error("torch finds no GPU here; --device cpu --quick is a rehearsal without one")
    settings.model = settings.model or EncodingSpec().resolve().model_path
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with temporary_folder(memory) as folder:
        bench = Bench(settings, folder)
        os.environ |= {"SURGE_CACHE_DIR": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
        try:
            for name in settings.stages:
                if bench.has_time(_LEAST_SECONDS, name):
                    with _stage(bench, name):
                        _STAGES[name](bench)
        finally:
            bench.close_encoders()
    title = "Not measured:" if bench.missed else "Everything was measured."
    print("", title, *bench.missed, sep="\n")


if __name__ == "__main__":
    main()
