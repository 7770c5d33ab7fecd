"""The setting `derived`: which derived spaces are assets of their own."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from surge_dagster.engine.model.derivation import DerivedDtype


class DerivedSettings(BaseModel):
    """A derived space: an entry of the setting `derived`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: DerivedDtype = "float32"
    dimension: int | None = Field(None, ge=1)

    @property
    def label(self) -> str:
        """The end of its asset's name."""
        return self.dtype if self.dimension is None else f"{self.dtype}_{self.dimension}"

    @property
    def title(self) -> str:
        """The space for people."""
        return self.dtype if self.dimension is None else f"{self.dtype} with {self.dimension} dimensions"
