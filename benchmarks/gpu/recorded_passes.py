"""Small passes that are recorded once and run again: on CUDA as graphs. No GPU has run them yet, so
only the benchmark has them.

The kernels of a pass of a single query take a GPU less time than Python needs to launch them. A
recorded pass is launched with one call. It reads its texts from a buffer of its own, and leaves
their vectors in another one. So it fits all texts of as many tokens, once they have as many
sequences: as many as tokens, the first ones of them empty.

`torch.compile(mode="reduce-overhead")` records too, but within what is compiled. Here that is a
layer, which would be recorded for each layer and size, and launched once for each layer. What is
before and after the layers, half of a small pass's launches, would stay in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from surge_dagster.engine.encoder.worker.tokenization import Tokens
from surge_dagster.engine.inference.device import Device
from surge_dagster.engine.inference.packed_backend import PackedBackend
from surge_dagster.engine.inference.packing import TILE, Pack, PassShape

MOST_TOKENS = 512
_CALLS_BEFORE_RECORDING = 3

# Returns float32 [sequences, dimension]; its arguments are the ids, the place of each sequence's
# first id, their lengths, and the shape of the pass.
Embed = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PassShape], torch.Tensor]


def record_passes(backend: PackedBackend) -> dict[PassShape, RecordedPass]:
    """Let a backend take recorded passes of at most `MOST_TOKENS`; return them by shape.

    If it fails, the process can only end: torch before 2.12 cannot free memory any more.
    """
    recorder = Recorder(backend._device)
    passes: dict[PassShape, RecordedPass] = {}
    with torch.inference_mode():
        for in_cells in (True, False) if backend._has_cells else (False,):
            # The largest first: the others take their memory from it.
            for tokens in range(MOST_TOKENS, 0, -TILE):
                shape = PassShape(tokens, tokens, in_cells)
                passes[shape] = RecordedPass(backend._embed, recorder, shape, backend._pad_id)
    other_passes = backend._vectors_of

    def vectors_of(pack: Pack, tokens: Tokens, ids: torch.Tensor) -> torch.Tensor:
        shape = PassShape(pack.padded_tokens, pack.padded_tokens, pack.in_cells)
        if shape in passes:
            return passes[shape](tokens, pack)
        return other_passes(pack, tokens, ids)

    backend._vectors_of = vectors_of
    return passes


class Recorder:
    """Records work for a device; on the CPU it is computed again."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._on_cuda: tuple[torch.cuda.Stream, Any] | None = None

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        """Return what queues this work again, and the tensor in which it leaves its result.

        The result is valid until work that was recorded is queued again: recordings share memory.
        """
        torch_device = self.device.torch_device
        if torch_device.type != "cuda":
            result = work()
            return lambda: result.copy_(work()), result

        if self._on_cuda is None:
            pool = torch.cuda.graph_pool_handle()
            self._on_cuda = torch.cuda.Stream(torch_device), pool
        stream, pool = self._on_cuda
        # Libraries and compiled kernels set themselves up during their first calls, on the stream
        # that records.
        stream.wait_stream(torch.cuda.current_stream(torch_device))
        with torch.cuda.stream(stream):
            for _ in range(_CALLS_BEFORE_RECORDING):
                work()
        torch.cuda.current_stream(torch_device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            result = work()
        return graph.replay, result


class RecordedPass:
    """A pass of one shape."""

    def __init__(self, embed: Embed, recorder: Recorder, shape: PassShape, pad_id: int) -> None:
        self._device = recorder.device
        self._pad_id = pad_id
        self._most = shape.tokens
        # One buffer, which one copy fills: ids with an id of padding behind them, starts, lengths.
        sizes = [shape.tokens + 1, shape.tokens, shape.tokens]
        only_padding = Pack(np.array([-1]), np.array([shape.tokens]), shape.in_cells)
        no_tokens = Tokens(np.zeros(0, np.int32), np.zeros(1, np.int64), np.zeros(0, bool), pad_id)
        self._buffer = self._device.upload(self._content(no_tokens, only_padding))
        ids, starts, lengths = self._buffer.split(sizes)
        self._replay, self._vectors = recorder.record(lambda: embed(ids, starts, lengths, shape))

    def __call__(self, tokens: Tokens, pack: Pack) -> torch.Tensor:
        """Queue the pass; return float32 [sequences of the pack, dimension], which stay until the
        next pass is queued."""
        self._buffer.copy_(self._device.upload(self._content(tokens, pack)), non_blocking=True)
        self._replay()
        return self._vectors[self._most - len(pack.lengths) :]

    def _content(self, tokens: Tokens, pack: Pack) -> np.ndarray:
        first = self._most - len(pack.lengths)  # those before it are empty
        is_text = pack.sequences >= 0
        borders = np.cumsum(pack.lengths) - pack.lengths
        content = np.zeros(3 * self._most + 1, np.int64)
        ids = content[: self._most + 1]
        starts = content[self._most + 1 :][first : self._most]
        lengths = content[2 * self._most + 1 :][first:]

        ids[:] = self._pad_id
        shifts = tokens.offsets[pack.sequences[is_text]] - borders[is_text]
        places = np.flatnonzero(np.repeat(is_text, pack.lengths))
        ids[places] = tokens.ids[places + np.repeat(shifts, pack.lengths[is_text])]
        starts[:] = np.where(is_text, borders, self._most)
        lengths[:] = pack.lengths
        return content
