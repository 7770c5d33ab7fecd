"""Settings: one YAML file, `SURGE_…` environment variables, and the caller's own arguments, in rising order of weight.

The names are the same everywhere: `b_min: 5000` in `surge.yaml` is `SURGE_B_MIN=5000` in the environment and
`--b-min 5000` on the command line. The file is `surge.yaml` in the working folder, or the one that `SURGE_CONFIG`
names. Reading settings opens nothing and loads no model, so that definitions load before a catalog exists.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    YamlConfigSettingsSource,
)
from yaml import MarkedYAMLError, YAMLError

from surge_dagster.check_policy import (
    CHECK_NAMES,
    MAX_TRUNCATED_SHARE,
    MIN_PREVIOUS_COSINE,
    RUN_CHECK,
    AnyCheckName,
    CheckPolicy,
    Severity,
)
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.model_files import DEFAULT_MODEL
from surge_dagster.engine.model.spec import EncodingSpec, FileFormat
from surge_dagster.engine.sources import DEFAULT_MAX_TEXT_BYTES, ParquetCatalog, open_source
from surge_dagster.engine.store import StorageOptions, open_store
from surge_dagster.engine.store.storage_options import NO_ENDPOINT
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.urls import is_bare
from surge_dagster.engine.thresholds import Thresholds
from surge_dagster.setting_checks import (
    require_backend,
    require_devices,
    require_encoding,
    require_place,
    require_precision,
)
from surge_dagster.shards import Sharding

log = logging.getLogger(__name__)

VanishedPolicy = Literal["keep", "report", "delete"]

CONFIG_VARIABLE = "SURGE_CONFIG"
CONFIG_FILE = "surge.yaml"
_NOT_SHOWN = ("alert_webhook", "source", "output")


def _unquoted_off(value: Any) -> Any:
    return "off" if value is False else value  # what YAML makes of a plain off


_Severity = Annotated[
    Severity, BeforeValidator(_unquoted_off), WithJsonSchema({"enum": [*get_args(Severity), False]}, mode="validation")
]


class StorageSettings(BaseModel):
    """How a bucket is reached; see `StorageOptions`. Secrets are never shown, not even in errors about them."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    endpoint: str | None = None
    region: str | None = None
    access_key_id: SecretStr | None = None
    secret_access_key: SecretStr | None = None
    session_token: SecretStr | None = None
    token: SecretStr | None = None
    service_account: str | None = None
    timeout_seconds: float = Field(60.0, gt=0)
    connect_timeout_seconds: float = Field(10.0, gt=0)
    part_bytes: int = Field(16 * 1024 * 1024, ge=5 * 1024 * 1024)
    abandoned_after_seconds: float = Field(24 * 3600.0, ge=0)

    @field_validator("endpoint")
    @classmethod
    def _require_bare(cls, value: str | None) -> str | None:
        if value is not None and not is_bare(value):
            raise ValueError(NO_ENDPOINT)
        return value

    def options(self) -> StorageOptions:
        """The same for the engine."""
        return StorageOptions(**self.revealed())

    def revealed(self) -> dict[str, Any]:
        """The values by name, secrets as they are: for the engine, and for nothing that shows them."""
        values: dict[str, Any] = {name: getattr(self, name) for name in type(self).model_fields}
        for name, value in values.items():
            if isinstance(value, SecretStr):
                values[name] = value.get_secret_value()
        return values


class Settings(BaseSettings):
    """What a run is asked to do; use `load_settings` to get one with errors written for people."""

    model_config = SettingsConfigDict(
        env_prefix="SURGE_", extra="forbid", frozen=True, protected_namespaces=(), hide_input_in_errors=True
    )

    source: str = Field("data/catalog", description="the catalog: a path or URL")
    output: str = Field("data/embeddings", description="where embedding files go: a path or URL")
    storage_options: StorageSettings = Field(
        default_factory=StorageSettings,  # pyright: ignore[reportArgumentType]
        description="how a bucket is reached, where the cloud's own environment variables do not say",
    )
    id_column: str = "id"
    text_column: str = "text"
    max_text_bytes: int = Field(DEFAULT_MAX_TEXT_BYTES, ge=1, description="a longer text refuses its partition")
    include_text: bool = Field(True, description="whether output files carry the texts beside the vectors")
    format: FileFormat = Field("parquet", description="of output files: parquet, or arrow for readers that map them")

    model: str = Field(DEFAULT_MODEL, min_length=1, description="hub name, local folder, or hash://D")
    prompt: str | None = Field(None, description="put before each text; none: the model's own default")
    max_length: int | None = Field(None, ge=1, description="tokens; none: the model's own limit")
    normalize: bool | None = Field(None, description="unit vectors; none: as the model's modules say")
    dimension: int | None = Field(None, ge=1, description="leading dimensions kept; none: all")
    dtype: Literal["float32", "float16"] = Field("float32", description="type of the stored vectors")

    devices: str = Field("auto", description='"auto", "cpu", "cuda" or a comma-separated list such as "cuda:0,cuda:1"')
    precision: str = Field("auto", description="arithmetic: auto, fp32, fp16 or bf16")
    backend: str = Field("auto", description="auto, torch or openvino")
    check_parity: bool = Field(True, description="refuse to start when vectors differ from sentence-transformers'")
    b_min: int | None = Field(None, ge=1, description="texts of a SuperBatch, at least")
    b_max: int | None = Field(None, ge=1, description="texts of a SuperBatch, at most")
    b_min_bytes: int | None = Field(None, ge=1)
    b_max_bytes: int | None = Field(None, ge=1)
    memory_limit_bytes: int | None = Field(None, ge=1, description="budget of all data a run holds; none: derived")

    grace_seconds: float = Field(
        8.0, ge=0, description="how long a run that is stopped may take to publish and to tell"
    )

    max_partitions_per_run: int = Field(10_000, ge=1, description="keys in one run of sensor or schedule, at most")
    shards: int = Field(1, ge=1, description="runs that sensor and schedule divide their work among, at most")
    shard_bytes: int = Field(16 * 1024 * 1024, ge=1, description="text that is worth a run of its own")
    vanished: VanishedPolicy = Field(
        "report", description="what the sensor does about partitions that the source no longer lists"
    )
    vanished_grace_seconds: float = Field(24 * 3600.0, ge=0, description="how long they must be away to be deleted")
    vanished_share: float = Field(0.1, ge=0, le=1, description="nothing is deleted when more of the catalog is away")
    refresh_stale: bool = Field(False, description="whether the sensor also requests partitions that changed")
    nightly_cron: str = "0 2 * * *"
    check_cron: str | None = Field(None, description="when catalog_check is run; none: by hand alone")
    timezone: str = "UTC"

    alert_webhook: SecretStr | None = Field(
        None, description="http(s) URL that alerts of failed runs are posted to; a secret"
    )

    _require_devices = field_validator("devices")(require_devices)
    _require_precision = field_validator("precision")(require_precision)
    _require_backend = field_validator("backend")(require_backend)

    @field_validator("source", "output")
    @classmethod
    def _require_place(cls, value: str, info: ValidationInfo) -> str:
        return require_place(value, what="catalog" if info.field_name == "source" else "output")

    @field_validator("alert_webhook")
    @classmethod
    def _require_http(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not value.get_secret_value().startswith(("http://", "https://")):
            raise ValueError("expected a URL that begins with https:// or http://")
        return value

    checks: dict[AnyCheckName, _Severity] = Field(
        {}, description="severity of asset checks, by name: error, warn or off", examples=[{"texts_match": "warn"}]
    )
    max_truncated_share: float = Field(
        MAX_TRUNCATED_SHARE, ge=0, le=1, description="of a partition's texts; above it few_texts_are_truncated fails"
    )
    min_previous_cosine: float = Field(
        MIN_PREVIOUS_COSINE,
        ge=-1,
        le=1,
        description="mean cosine of texts encoded again to their old vectors, for vectors_have_not_drifted",
    )

    @field_validator("checks")
    @classmethod
    def _keep_run_check(cls, value: dict[AnyCheckName, Severity]) -> dict[AnyCheckName, Severity]:
        if value.get(RUN_CHECK) == "off":
            raise ValueError(f"{RUN_CHECK} ends every run and cannot be off; expected error or warn")
        return value

    @model_validator(mode="after")
    def _require_agreement(self) -> Self:
        require_encoding(self.encoding_spec(), self.thresholds())
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments over environment over file; nothing else is looked at."""
        return init_settings, env_settings, YamlConfigSettingsSource(settings_cls, yaml_file=_config_file())

    def encoding_spec(self) -> EncodingSpec:
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

    def check_policy(self) -> CheckPolicy:
        """How the asset checks are made."""
        return CheckPolicy(self.checks, self.max_truncated_share, self.min_previous_cosine)

    def sharding(self) -> Sharding:
        """How work is divided among runs."""
        return Sharding(self.shards, self.shard_bytes, self.max_partitions_per_run)

    def start_pool(self, spec: EncodingSpec | None = None) -> EncoderPool:
        """A pool for these settings, or for another spec on the same devices; close it, or use `with`."""
        return EncoderPool(
            spec or self.encoding_spec(),
            devices=self.devices,
            precision=self.precision,
            backend=self.backend,
            check_parity=self.check_parity,
        )

    def open_source(self) -> ParquetCatalog:
        """The catalog; `ConfigError` when there is none."""
        return open_source(
            self.source, id_column=self.id_column, text_column=self.text_column, max_text_bytes=self.max_text_bytes
        )

    def open_store(self) -> Store:
        """The output; it need not exist yet."""
        return open_store(self.output, self.storage_options.options())


def load_settings(**arguments: Any) -> Settings:
    """Read the settings; an argument that is None counts as not given.

    Raises:
        ConfigError: a value is of the wrong kind, a name is unknown, or the file cannot be read.
    """
    return settings_of({name: value for name, value in arguments.items() if value is not None})


def settings_of(given: Mapping[str, Any]) -> Settings:
    """The settings with these values; one that is None is none, whatever the environment and the file say.

    Raises:
        ConfigError: as for `load_settings`.
    """
    for name, value in given.items():
        if isinstance(value, str):
            require_text(name, value)
    _warn_of_unknown_variables()
    try:
        return Settings(**given)
    except ValidationError as error:
        # Without its cause, which quotes every value, secrets too.
        raise ConfigError("\n".join(_problem(detail, given) for detail in error.errors())) from None
    except (SettingsError, YAMLError, OSError, TypeError, ValueError) as error:  # the last two: not a mapping
        where = _config_file() or "the SURGE_… environment variables"
        raise ConfigError(f"the settings in {where} cannot be read: {_without_quotes(error)}") from None


def require_text(name: str, value: str) -> None:
    """Refuse an argument that is not text: the shell hands over bytes, and Python keeps those that are not UTF-8.

    Raises:
        ConfigError: the value cannot be written as UTF-8.
    """
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} is not valid UTF-8 text: {value!r}. Give it in UTF-8.") from error


def _warn_of_unknown_variables() -> None:
    # Not refused: whoever runs this in a container may find variables there that others chose.
    known = {f"SURGE_{name.upper()}" for name in Settings.model_fields} | {CONFIG_VARIABLE, "SURGE_CACHE_DIR"}
    for name in sorted(os.environ):
        if name.startswith("SURGE_") and name.upper() not in known:
            log.warning("the environment variable %s names no setting and is ignored", name)


def _config_file() -> Path | None:
    named = os.environ.get(CONFIG_VARIABLE)
    if named:
        path = Path(named).expanduser()
        if not path.is_file():
            raise ConfigError(f"{CONFIG_VARIABLE} names {named!r}, which is not a file")
        return path
    path = Path(CONFIG_FILE)
    return path if path.is_file() else None


def _problem(detail: Any, given: Mapping[str, Any]) -> str:
    """One validation error as a sentence that says which source it came from."""
    place: Sequence[Any] = detail["loc"]
    name = str(place[0]) if place else "?"
    if name in given:
        origin = name
    elif f"SURGE_{name.upper()}" in os.environ:
        origin = f"SURGE_{name.upper()}"
    else:
        origin = f"{name} in {_config_file()}"
    message = detail["msg"].removeprefix("Value error, ")
    message = f"{message[0].lower()}{message[1:]}"
    if name == "storage_options":
        inner = ".".join(map(str, place[1:]))
        known = ", ".join(StorageSettings.model_fields)
        if detail["type"] == "extra_forbidden":
            return f"setting {origin} names {inner!r}, which is unknown; there are {known}"
        return f"setting {origin}{'.' if inner else ''}{inner}: {message}"  # the value may be a secret
    if name == "checks" and len(place) > 1:
        if place[-1] == "[key]":
            known = ", ".join((*CHECK_NAMES, RUN_CHECK))
            return f"setting {origin} names {place[1]!r}, which is no check that can be set; there are {known}"
        return f"setting {origin}.{place[1]} is {detail['input']!r}: {message}"
    if detail["type"] == "extra_forbidden":
        known = ", ".join(Settings.model_fields)
        return f"setting {origin} is unknown; there are {known}"
    if name in _NOT_SHOWN:  # a secret, or a URL that one was written into
        return f"setting {origin}: {message}"
    return f"setting {origin} is {detail['input']!r}: {message}"


def _without_quotes(error: Exception) -> str:
    """What went wrong and where; YAML's messages also quote the line, which may hold a secret."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem or 'it is not YAML'} (line {mark.line + 1}, column {mark.column + 1})"
    return str(error)
