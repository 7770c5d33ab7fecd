"""The encoder pool as a Dagster resource, started by the op that needs it and by nothing else.

A resource that is started with the run would load a model even when nothing is missing, and every run of a backfill
whose partitions are all fresh would pay for it. So the resource holds the settings, and `start` is a context manager
that ends the worker processes on every way out, an interrupt included.
"""

from __future__ import annotations

import dagster as dg
from pydantic import Field

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.model_files import DEFAULT_MODEL
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.thresholds import Thresholds


class Encoder(dg.ConfigurableResource):
    """Which vectors are made, on what, and in SuperBatches of which size."""

    model: str = Field(DEFAULT_MODEL, description="hub name, local folder, or hash://D")
    prompt: str | None = Field(None, description="put before each text; none: the model's own default")
    max_length: int | None = Field(None, description="tokens; none: the model's own limit")
    normalize: bool | None = Field(None, description="unit vectors; none: as the model's modules say")
    dimension: int | None = Field(None, description="leading dimensions kept; none: all")
    dtype: str = Field("float32", description="type of the stored vectors: float32 or float16")
    devices: str = Field("auto", description='"auto", "cpu", "cuda" or a comma-separated list')
    precision: str = Field("auto", description="arithmetic: auto, fp32, fp16 or bf16")
    backend: str = Field("auto", description="auto, torch or openvino")
    check_parity: bool = Field(True, description="refuse to start when vectors differ from sentence-transformers'")
    b_min: int | None = Field(None, description="texts of a SuperBatch, at least; none: from the measured speed")
    b_max: int | None = Field(None, description="texts of a SuperBatch, at most")
    b_min_bytes: int | None = None
    b_max_bytes: int | None = None
    memory_limit_bytes: int | None = Field(None, description="budget of all data a run holds; none: derived")

    grace_seconds: float = Field(8.0, description="how long a run that is stopped may take to publish what it has")

    def spec(self) -> EncodingSpec:
        """Everything that shapes a vector."""
        return EncodingSpec(
            model=self.model,
            prompt=self.prompt,
            max_length=self.max_length,
            normalize=self.normalize,
            dimension=self.dimension,
            dtype=self.dtype,
        )

    def thresholds(self) -> Thresholds:
        """The bounds of a SuperBatch, as far as they are given."""
        return Thresholds(
            b_min=self.b_min, b_max=self.b_max, b_min_bytes=self.b_min_bytes, b_max_bytes=self.b_max_bytes
        )

    def start(self) -> EncoderPool:
        """Start the worker processes; to be used in a `with` statement, which ends them."""
        devices = self.devices.split(",") if "," in self.devices else self.devices
        return EncoderPool(
            self.spec(),
            devices=devices,
            precision=self.precision,
            backend=self.backend,
            check_parity=self.check_parity,
        )
