"""OpenVINO on the CPU: the same fp32 vectors as torch at a multiple of its speed, and a start without torch.

The whole sentence-transformers module (transformer, pooling, normalization) is converted once and kept on disk beside
its tokenizer; later starts read these files and import neither torch nor sentence-transformers, which is most of what
a start costs. The files belong to one space, one revision of this package and one set of library versions.

OpenVINO chooses bf16 by itself where the CPU has it, so the precision is set, read back and refused when it differs.
Several streams share one process: two processes would hold two models and, with OpenVINO's own pinning, the same cores.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import queue
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openvino as ov

from surge_dagster.engine.encoder import disk_cache
from surge_dagster.engine.encoder.backends.base import BackendSettings
from surge_dagster.engine.encoder.backends.token_backend import ChunkPasses, TokenBackend
from surge_dagster.engine.encoder.fingerprint import cache_key, processor
from surge_dagster.engine.encoder.model_digest import file_sha256, read_document
from surge_dagster.engine.encoder.pass_loop import PassLoop
from surge_dagster.engine.encoder.spec import Space
from surge_dagster.engine.encoder.token_batches import TokenBatch
from surge_dagster.engine.encoder.tokenization import TextTokenizer, TokenizerFacts, Tokens
from surge_dagster.engine.errors import ConfigError

log = logging.getLogger(__name__)

_TOKEN_BUDGET = 1_024
# A pass costs little by itself, but every new shape of one costs about as much as so many tokens.
_PASS_TOKENS = 48
_HINTS = {"fp32": "f32", "bf16": "bf16"}
_FILES = ("model.xml", "model.bin", "tokenizer.json")


class OpenvinoBackend(TokenBackend):
    """The worker's side of OpenVINO on the CPU."""

    name = "openvino"
    budget_candidates = (256, 512, 1_024, 2_048, 4_096)

    def __init__(self, space: Space, settings: BackendSettings) -> None:
        core = ov.Core()
        if settings.precision == "bf16" and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            raise ConfigError("this CPU has no bf16 arithmetic; use precision fp32")
        with _converted(space) as folder:
            facts = read_document(folder / "facts.json") or {}
            tokenizer_facts = TokenizerFacts(
                (folder / "tokenizer.json").read_text(), facts["truncation_side"], facts["pad_id"]
            )
            wanted = getattr(ov.Type, _HINTS[settings.precision])
            # One stream per core gives the most texts per second: no core waits for another inside a pass.
            compiled = core.compile_model(
                folder / "model.xml",
                "CPU",
                {
                    "INFERENCE_PRECISION_HINT": wanted,
                    "NUM_STREAMS": settings.threads,
                    "INFERENCE_NUM_THREADS": settings.threads,
                    "ENABLE_CPU_PINNING": False,
                },
            )
        found = compiled.get_property("INFERENCE_PRECISION_HINT")
        if found != wanted:
            raise ConfigError(f"OpenVINO computes in {found} although {wanted} was asked for")
        self.machine = f"{processor()} {settings.threads}"
        self.detail = f"openvino {ov.get_version().split('-')[0]}, {settings.threads} streams"
        # Requests of our own, not OpenVINO's queue of them: there, nobody learns which pass of several has failed.
        self._idle: queue.SimpleQueue[ov.InferRequest] = queue.SimpleQueue()
        for _ in range(settings.threads):
            self._idle.put(compiled.create_infer_request())
        loop = PassLoop(
            token_budget=settings.token_budget or _TOKEN_BUDGET, pass_tokens=_PASS_TOKENS, streams=settings.threads
        )
        super().__init__(TextTokenizer.for_space(tokenizer_facts, space), loop)

    @contextlib.contextmanager
    def _chunk(self, tokens: Tokens, matrix: np.ndarray) -> Iterator[ChunkPasses]:
        def run_pass(batch: TokenBatch) -> float:
            request = self._idle.get()
            try:
                inputs = list(tokens.gather(batch.rows, batch.length))
                request.start_async(inputs, share_inputs=True)
                request.wait()
                computed = time.perf_counter()
                matrix[batch.rows] = request.get_output_tensor(0).data
                return time.perf_counter() - computed
            finally:
                self._idle.put(request)

        yield ChunkPasses(run_pass)


@contextlib.contextmanager
def _converted(space: Space) -> Iterator[Path]:
    """A folder with the converted model: from the cache, or made now, in the cache where that can be written."""
    root = disk_cache.cache_root() / "openvino"
    folder = root / cache_key(space.spec_sha256, space.normalize)
    if _is_whole(folder):
        yield folder
        return
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / ".lock").open("w")
    except OSError as error:
        log.warning("cannot keep the converted model in %s (%s)", root, error)
        with tempfile.TemporaryDirectory() as aside:
            _convert(space, Path(aside))
            yield Path(aside)
        return
    with lock:
        # Workers that start together convert once.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_whole(folder):
            for left_behind in root.glob(".making-*"):  # by a process that was killed: under the lock it is nobody's
                shutil.rmtree(left_behind, ignore_errors=True)
            aside = Path(tempfile.mkdtemp(dir=root, prefix=".making-"))
            try:
                _convert(space, aside)
                shutil.rmtree(folder, ignore_errors=True)
                aside.replace(folder)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    yield folder


def _is_whole(folder: Path) -> bool:
    """Whether the files are those that were written: a damaged cache must not give damaged vectors."""
    facts = read_document(folder / "facts.json")
    try:
        return facts is not None and all(file_sha256(folder / name) == facts["sha256"][name] for name in _FILES)
    except (OSError, KeyError):
        return False


def _convert(space: Space, folder: Path) -> None:
    import torch

    from surge_dagster.engine.encoder.sentence_model import embedder, load_reference, tokenizer_facts

    reference = load_reference(space, "cpu")
    facts = tokenizer_facts(reference, space)
    if facts is None:
        raise ConfigError("this model's texts do not go through a plain fast tokenizer")
    module = embedder(reference, space, facts.prompt_length)
    with torch.inference_mode():
        example = torch.arange(2 * 7).reshape(2, 7)
        # A mask that hides something: with one of ones alone, tracing could leave it out.
        mask = torch.ones_like(example)
        mask[0, 5:] = 0
        converted = ov.convert_model(module, example_input={"input_ids": example, "attention_mask": mask})
    converted.reshape({place: ov.PartialShape([-1, -1]) for place in range(2)})
    ov.save_model(converted, folder / "model.xml", compress_to_fp16=False)
    (folder / "tokenizer.json").write_text(facts.tokenizer_json)
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in _FILES}
    document = {
        "space": space.name,
        "truncation_side": facts.truncation_side,
        "pad_id": facts.pad_id,
        "sha256": digests,
    }
    (folder / "facts.json").write_text(json.dumps(document, indent=1))
    for name in (*_FILES, "facts.json"):
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
