"""Settings that have settings of their own: `storage_options`, `gcp`, entries of `derived`, and
`checks`, whose names and severities are here."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from surge_dagster.consumers.settings import Secret
from surge_dagster.engine.model.spec import DerivedDtype
from surge_dagster.engine.store import StorageOptions
from surge_dagster.engine.store.object_client import NO_ENDPOINT, GcpOptions
from surge_dagster.engine.support.urls import is_bare


class StorageSettings(BaseModel):
    """Settings of an object store; see `StorageOptions`. Errors do not show secrets."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    endpoint: str | None = None
    region: str | None = None
    access_key_id: SecretStr | None = None
    secret_access_key: SecretStr | None = None
    session_token: SecretStr | None = None
    service_account: str | None = None

    @field_validator("endpoint")
    @classmethod
    def _require_bare(cls, value: str | None) -> str | None:
        if value is not None and not is_bare(value):
            raise ValueError(NO_ENDPOINT)
        return value

    def options(self) -> StorageOptions:
        """Return the engine's form of these settings, with the secrets in clear text."""
        values: dict[str, Any] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            values[name] = value.get_secret_value() if isinstance(value, SecretStr) else value
        return StorageOptions(**values)


class GcpSettings(BaseModel):
    """Settings of Google Cloud; see `GcpOptions`. Errors do not show the key."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    project: str | None = None
    location: str | None = None
    gcp_credentials: Secret | None = None

    def options(self) -> GcpOptions:
        """Return the engine's form of these settings, with the key in clear text."""
        secret = self.gcp_credentials
        key = None if secret is None else secret.get_secret_value()
        return GcpOptions(self.project, self.location, key)


class DerivedSettings(BaseModel):
    """A derived space: an entry of the setting `derived`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: DerivedDtype = "float32"
    dimension: int | None = Field(None, ge=1)

    @property
    def label(self) -> str:
        """The end of its asset's name."""
        if self.dimension is None:
            return self.dtype
        return f"{self.dtype}_{self.dimension}"

    @property
    def title(self) -> str:
        """The space for people."""
        if self.dimension is None:
            return self.dtype
        return f"{self.dtype} with {self.dimension} dimensions"


Severity = Literal["error", "warn", "off"]
CheckName = Literal[
    "every_partition_is_embedded",
    "row_counts_match",
    "ids_match",
    "texts_match",
    "files_are_whole",
    "dimensions_match",
    "vectors_are_finite",
    "vectors_have_length_1",
    "one_space",
    "no_orphan_files",
    "few_texts_are_truncated",
    "few_rows_are_set_aside",
    "vectors_have_not_drifted",
    "encode_not_slow",
]
# Every run ends with this check, which shows the run's metrics and failures; so it is never off.
RUN_CHECK = "published_partitions_are_valid"
AnyCheckName = Literal[CheckName, "published_partitions_are_valid"]

# Checks that fail for other reasons than wrong output.
WARNINGS: frozenset[CheckName] = frozenset(
    {"no_orphan_files", "few_texts_are_truncated", "vectors_have_not_drifted", "encode_not_slow"}
)
