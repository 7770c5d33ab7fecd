"""Settings of the tables that follow the vectors: `lancedb` and `pgvector`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from surge_dagster.consumers.lance import LanceTable
from surge_dagster.consumers.postgres import Distance, Index, PgVectorTable


class _Target(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    table: str = Field("embeddings", min_length=1, description="name of the table, which the first hand-over makes")


class LanceDBSettings(_Target):
    """A table of an embedded LanceDB."""

    table: str = Field("embeddings", pattern=r"^[A-Za-z0-9_.-]+$", description="as LanceDB takes it: name of the table")
    uri: str = Field(min_length=1, description="folder of the database, or a URL that LanceDB takes")

    def target(self) -> LanceTable:
        return LanceTable(self.uri, self.table)


class PgVectorSettings(_Target):
    """A table of Postgres with pgvector."""

    dsn: SecretStr = Field(description="how to connect, as libpq takes it; a secret")
    index: Index = Field("hnsw", description="index of the vectors: hnsw or none")
    distance: Distance = Field("cosine", description="that the index is for: cosine, l2 or ip")

    @field_validator("dsn", mode="before")
    @classmethod
    def _resolve(cls, value: Any) -> Any:
        """Read the variable that an `EnvVar` of Dagster names."""
        if not hasattr(value, "env_var_name"):
            return value
        if (dsn := value.get_value()) is None:
            raise ValueError(f"the environment variable {value.env_var_name} is not set")
        return dsn

    def target(self) -> PgVectorTable:
        return PgVectorTable(self.dsn.get_secret_value(), self.table, index=self.index, distance=self.distance)


TargetSettings = LanceDBSettings | PgVectorSettings
