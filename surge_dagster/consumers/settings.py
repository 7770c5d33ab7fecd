"""Settings of the tables that follow the vectors: `lancedb`, `pgvector` and `qdrant`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

from surge_dagster.consumers.lance import Index as LanceIndex
from surge_dagster.consumers.lance import LanceTable
from surge_dagster.consumers.postgres import Index, PgVectorTable
from surge_dagster.consumers.qdrant import QdrantTable
from surge_dagster.consumers.target import Distance
from surge_dagster.engine.support.urls import is_bare

_NAME_BYTES = 63 - len("_versions")


def _resolved(value: Any) -> Any:
    if not hasattr(value, "env_var_name"):
        return value
    if (secret := value.get_value()) is None:
        raise ValueError(f"the environment variable {value.env_var_name} is not set")
    return secret


def _place_of_qdrant(uri: str) -> str:
    """Refuse what reads as a host and would be taken for a folder, such as localhost:6333."""
    scheme, mark, _ = uri.partition("://")
    first, slash, _ = uri.partition("/")
    is_url = bool(mark) and scheme.lower() in ("http", "https", "file")
    is_path = bool(slash) and ":" not in first
    if not is_url and not is_path:
        raise ValueError("write http://… for a server, or a path with a / for a folder")
    return uri


def _of_63_bytes(table: str) -> str:
    """Refuse a name that Postgres would cut after 63 bytes, here with "_versions"."""
    if (length := len(table.encode())) > _NAME_BYTES:
        raise ValueError(f"it has {length} bytes; Postgres takes {_NAME_BYTES} here")
    return table


def _without_secrets(url: str) -> str:
    if not is_bare(url):
        raise ValueError("it is shown to people: give a secret as api_key, not in the URL")
    return url


# Also an `EnvVar` of Dagster, whose variable is read with the settings.
Secret = Annotated[SecretStr, BeforeValidator(_resolved)]


class _Target(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class LanceDBSettings(_Target):
    """A table of an embedded LanceDB."""

    table: str = Field(
        "embeddings",
        pattern=r"^[A-Za-z0-9_.-]+$",
        description="as LanceDB takes it: name of the table",
    )
    uri: str = Field(
        min_length=1, description="folder of the database, or a URL that LanceDB takes"
    )

    index: LanceIndex = Field("none", description="index of the vectors: ivf_pq, hnsw or none")
    distance: Distance = Field("cosine", description="that the index is for: cosine, l2 or ip")

    def target(self) -> LanceTable:
        return LanceTable(self.uri, self.table, index=self.index, distance=self.distance)


class PgVectorSettings(_Target):
    """A table of Postgres with pgvector."""

    table: Annotated[str, AfterValidator(_of_63_bytes)] = Field(
        "embeddings",
        min_length=1,
        description="name of the table, which the first hand-over makes",
    )
    dsn: Secret = Field(description="how to connect, as libpq takes it; a secret")
    index: Index = Field("hnsw", description="index of the vectors: hnsw or none")
    distance: Distance = Field("cosine", description="that the index is for: cosine, l2 or ip")

    def target(self) -> PgVectorTable:
        return PgVectorTable(
            self.dsn.get_secret_value(), self.table, index=self.index, distance=self.distance
        )


class QdrantSettings(_Target):
    """A collection of Qdrant."""

    table: str = Field(
        "embeddings",
        pattern=r"^[A-Za-z0-9_.-]+$",
        description="name that readers use; an alias, which the first hand-over makes",
    )
    uri: Annotated[str, AfterValidator(_without_secrets), AfterValidator(_place_of_qdrant)] = Field(
        description="URL of a server, or folder of an embedded Qdrant for tests"
    )
    api_key: Secret | None = Field(None, description="of the server; a secret")
    distance: Distance = Field("cosine", description="of the index: cosine, l2 or ip")

    def target(self) -> QdrantTable:
        api_key = None if self.api_key is None else self.api_key.get_secret_value()
        return QdrantTable(self.uri, self.table, api_key=api_key, distance=self.distance)


TargetSettings = LanceDBSettings | PgVectorSettings | QdrantSettings
