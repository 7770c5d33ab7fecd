"""Settings: from one YAML file, `SURGE_…` environment variables and arguments; later ones override
earlier ones.

The names are the same everywhere: `b_min: 5000` in `surge.yaml` is `SURGE_B_MIN=5000` in the
environment and `--b-min 5000` on the command line. The file is `surge.yaml` in the working folder,
or the one that `SURGE_CONFIG` names. Reading settings opens nothing and loads no model, so that
definitions load before a catalog exists.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from typing import Annotated, Any, Literal, Self, get_args
from zoneinfo import ZoneInfo

from pydantic import (
    BaseModel,
    BeforeValidator,
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
from yaml import YAMLError

from surge_dagster.config.catalog_settings import ASSET_SCHEME, CatalogSettings
from surge_dagster.config.chunk_settings import ChunkSettings, chunk_rule
from surge_dagster.config.endpoint_settings import EndpointSettings
from surge_dagster.config.nested_settings import (
    RUN_CHECK,
    WARNINGS,
    AnyCheckName,
    DerivedSettings,
    GcpSettings,
    Severity,
    StorageSettings,
)
from surge_dagster.config.settings_input import (
    config_file,
    problem,
    require_text,
    warn_of_unknown_variables,
    without_quotes,
)
from surge_dagster.consumers.settings import LanceDBSettings, PgVectorSettings, QdrantSettings
from surge_dagster.engine.encoder.devices import device_kind, device_names
from surge_dagster.engine.encoder.pool import DEFAULT_HANG_TIMEOUT_SECONDS, EncoderPool
from surge_dagster.engine.encoder.speed import LEAST_B_MIN
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.digest import EXPECTED, TRUSTED
from surge_dagster.engine.model.locating import DEFAULT_MODEL
from surge_dagster.engine.model.prompts import Task
from surge_dagster.engine.model.spec import HASH_SCHEME, EncodingSpec, Space
from surge_dagster.engine.output.catalog_record import CatalogRecord
from surge_dagster.engine.output.spaces import SPACE_FILE
from surge_dagster.engine.run.change_feed import DEFAULT_KEEP_DAYS
from surge_dagster.engine.run.report import Prices
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources import Source
from surge_dagster.engine.store import StorageOptions, open_store
from surge_dagster.engine.store.object_client import service_account_key
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.urls import expanded, is_bare, is_object_store, local_path
from surge_dagster.engine.tables.bigquery import BIGQUERY_SCHEME

_Severity = Annotated[
    Severity,
    # YAML reads a plain off as false.
    BeforeValidator(lambda value: "off" if value is False else value),
    WithJsonSchema({"enum": [*get_args(Severity), False]}, mode="validation"),
]


# Dagster's own tags, and those of this project, are not an operator's to set, except for these.
PRIORITY_TAG = "dagster/priority"
_SETTABLE_TAGS = (
    PRIORITY_TAG,
    "dagster/max_retries",
    "dagster/max_runtime",
    "dagster/retry_strategy",
)
_OWNED_TAGS = ("dagster/", ".dagster/", "surge/")


_TagValue = Annotated[
    str,
    BeforeValidator(
        lambda value: json.dumps(value) if isinstance(value, int | float | dict | list) else value
    ),
    WithJsonSchema({"type": ["string", "number", "boolean", "object", "array"]}, mode="validation"),
]


class EncoderSettings(EndpointSettings):
    """Settings of the vectors and the encoder pool; part of `Settings` and of the resource
    `EncoderResource`."""

    model: str = Field(
        DEFAULT_MODEL,
        min_length=1,
        description="sentence-transformers model: hub name or local folder; with encoder_url the "
        "server's name for it",
    )
    trust_remote_code: str | None = Field(
        None,
        description="commit of the model's repository whose own code may run; for a local folder "
        "the digest of its code (unset: no code of a model runs)",
    )
    document_prompt: str | None = Field(
        None,
        description="text put before each text (unset: the model's own prompt for documents)",
    )
    query_prompt: str | None = Field(
        None,
        description="text put before each query (unset: the model's own prompt for queries)",
    )
    max_length: int | None = Field(
        None, ge=1, description="tokens read of a text (unset: the model's own limit)"
    )
    normalize: bool | None = Field(
        None, description="scale vectors to length 1 (unset: as the model does)"
    )
    dimension: int | None = Field(None, ge=1, description="leading dimensions to keep (unset: all)")
    dtype: Literal["float32", "float16"] = Field(
        "float32", description="type of the stored vectors: float32 or float16"
    )
    chunks: ChunkSettings = Field(
        None,
        description="cut each text into rows of at most so many tokens, such as "
        "tokens=256,overlap=32,format=markdown,column=body (unset: longer texts are cut off)",
    )
    devices: str = Field(
        "auto", description="devices to encode on: auto, cpu, cuda, or a list such as cuda:0,cuda:1"
    )
    precision: Literal["auto", "fp32", "fp16", "bf16"] = Field(
        "auto", description="arithmetic: auto, fp32, fp16, bf16"
    )
    cluster: str = Field(
        "none",
        min_length=1,
        description="Ray cluster that encodes: none, auto for that of this machine, or ray://…",
    )
    b_min: int | None = Field(
        None,
        ge=1,
        description="fewest texts of a SuperBatch (unset: the texts of about five seconds)",
    )
    first_b_min: int | None = Field(
        None,
        ge=1,
        description="b_min of the first SuperBatch, which doubles (unset: a sixteenth of b_min)",
    )
    b_max: int | None = Field(
        None, ge=1, description="most texts of a SuperBatch (unset: twice b_min, at least 5000)"
    )
    memory_limit_bytes: int | None = Field(
        None,
        ge=1,
        description="bytes of data that a run may hold at any time (unset: half of the memory)",
    )
    grace_seconds: float = Field(
        8.0, ge=0, description="seconds that a stopped run has to publish what is encoded"
    )
    hang_timeout_seconds: float = Field(
        DEFAULT_HANG_TIMEOUT_SECONDS,
        gt=0,
        description="seconds without progress after which a worker is replaced",
    )
    price_per_hour: float | None = Field(
        None,
        ge=0,
        description="price of a machine per hour in any currency (unset: no run reports its cost)",
    )

    price_per_million_tokens: float | None = Field(
        None,
        ge=0,
        description="price of a million tokens of an encoder behind HTTP, in any currency (unset: "
        "no run reports their cost)",
    )
    max_cost: float | None = Field(
        None,
        ge=0,
        description="most that the tokens of a run may cost, which ends before that (unset: no "
        "limit); needs price_per_million_tokens",
    )

    @field_validator("trust_remote_code", mode="before")
    @classmethod
    def _require_commit(cls, value: Any) -> Any:
        if value is not None and not (isinstance(value, str) and TRUSTED.fullmatch(value)):
            raise ValueError(EXPECTED)
        return value

    @field_validator("devices")
    @classmethod
    def _require_devices(cls, value: str) -> str:
        kinds = set(map(device_kind, device_names(value)))
        if len(kinds) != 1 or None in kinds:
            raise ValueError(
                'expected auto, or a list of one kind: cpu, cuda, or cuda:N as in "cuda:0,cuda:1"'
            )
        return value

    @model_validator(mode="after")
    def _require_one_machine(self) -> Self:
        """Refuse a cluster whose machines would each have the limits of an endpoint."""
        if self.cluster != "none" and self.encoder_url is not None:
            raise ValueError(
                "an encoder behind HTTP needs no cluster: leave cluster or encoder_url out"
            )
        return self

    @model_validator(mode="after")
    def _require_price(self) -> Self:
        if self.max_cost is not None and self.price_per_million_tokens is None:
            raise ValueError(
                "max_cost limits the cost of tokens: set price_per_million_tokens, or leave it out"
            )
        return self

    def encoding_spec(self) -> EncodingSpec:
        names = [field.name for field in fields(EncodingSpec)]
        values = {
            name: getattr(self, name) for name in names if name in EncoderSettings.model_fields
        }
        endpoint = self.endpoint()
        values["chunks"] = chunk_rule(self.chunks, endpoint)
        values["endpoint"] = endpoint
        return EncodingSpec(**values)

    def reaching(self, spec: EncodingSpec) -> EncodingSpec:
        """Return a spec that an output names, with the server of these settings if its model is
        behind HTTP: an output does not name one."""
        endpoint = self.endpoint()
        if endpoint is None or spec.endpoint is None:
            return spec
        shaping = {"fields": spec.endpoint.fields, "query_fields": spec.endpoint.query_fields}
        return replace(spec, endpoint=replace(endpoint, **shaping))

    def prices(self) -> Prices:
        return Prices(self.price_per_hour, self.price_per_million_tokens, self.max_cost)

    def superbatch_thresholds(self, max_text_bytes: int) -> Thresholds:
        """The bounds of a SuperBatch as far as they are set, for texts of at most this size."""
        return Thresholds(
            self.b_min, self.b_max, max_text_bytes=max_text_bytes, first_b_min=self.first_b_min
        )

    def encoder_pool(
        self, spec: EncodingSpec | Space | None = None, task: Task = "document"
    ) -> EncoderPool:
        """A pool for this spec or another one, which starts when it is needed; close it, or use
        `with`."""
        return EncoderPool(
            spec or self.encoding_spec(),
            task=task,
            devices=self.devices,
            precision=self.precision,
            hang_timeout_seconds=self.hang_timeout_seconds,
        )

    def pool_of_run(
        self, spec: EncodingSpec | Space | None = None, task: Task = "document"
    ) -> EncoderPool:
        """The pool of a run's own process; with a cluster on any device, as `devices` are those of
        its machines."""
        if self.cluster == "none":
            return self.encoder_pool(spec, task)
        return EncoderPool(spec or self.encoding_spec(), task=task)


class FileSettings(BaseModel):
    """Settings of output files; part of `Settings` and of the resource `OutputStore`."""

    # The defaults stand outside of `Field`: type checkers see them so in a resource, too.
    include_text: Annotated[bool, Field(description="store the texts next to the vectors")] = True
    changes: Annotated[
        bool,
        Field(
            description="record which rows change, even if no consumer is registered in the output"
        ),
    ] = False
    keep_changes_days: Annotated[
        float,
        Field(ge=0, description="days for which recorded changes are kept"),
    ] = DEFAULT_KEEP_DAYS


class Settings(CatalogSettings, EncoderSettings, FileSettings, BaseSettings):  # pyright: ignore[reportIncompatibleVariableOverride]
    """All settings of one catalog; `load_settings` reads them and explains what is wrong."""

    model_config = SettingsConfigDict(
        env_prefix="SURGE_",
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        hide_input_in_errors=True,
    )

    source: str = Field(
        "data/catalog",
        description="catalog: a path or URL, or a pattern such as products/{category}.parquet",
    )
    output: str = Field(
        "data/embeddings", description="folder or bucket of the embedding files: a path or URL"
    )
    storage_options: StorageSettings = Field(
        default_factory=StorageSettings,  # pyright: ignore[reportArgumentType]
        description="how to reach a bucket, unless the cloud's own environment variables are set",
    )
    gcp: GcpSettings | None = Field(
        None,
        description="project, location and gcp_credentials, unless Google's environment has them",
    )

    lancedb: LanceDBSettings | None = Field(
        None, description="a table of LanceDB that follows the vectors"
    )
    pgvector: PgVectorSettings | None = Field(
        None, description="a table of Postgres that follows the vectors"
    )
    qdrant: QdrantSettings | None = Field(
        None, description="a collection of Qdrant that follows the vectors"
    )
    derived: list[DerivedSettings] = Field(
        [],
        description="smaller vectors that are assets of their own",
        examples=[[{"dtype": "int8"}, {"dtype": "binary", "dimension": 256}]],
    )

    max_runs: int = Field(
        1, ge=1, description="most runs that a sensor or schedule requests for its work"
    )
    max_partitions_per_run: int | None = Field(
        None,
        ge=1,
        description="most partitions of one run of a backfill (unset: a backfill is one run)",
    )
    run_tags: dict[str, _TagValue] = Field(
        {},
        description="tags of runs that the sensor and the nightly refresh request",
        examples=[{"dagster/priority": 5, "queue": "night"}],
    )
    removed_partitions: Literal["report", "delete"] = Field(
        "report",
        description="what to do with partitions removed from the source: report or delete",
    )
    refresh_stale: bool = Field(
        False, description="let the sensor also request partitions that changed"
    )
    nightly_cron: str = Field("0 2 * * *", description="when the nightly refresh runs")
    check_cron: str = Field(
        "0 6 * * 0", description="when catalog_check runs; none: only when you launch it"
    )
    timezone: str = Field("UTC", description="time zone of the schedules")

    checks: dict[AnyCheckName, _Severity] = Field(
        {},
        description="severity of asset checks, by name: error, warn or off",
        examples=[{"texts_match": "warn"}],
    )
    max_truncated_share: float = Field(
        0.2,
        ge=0,
        le=1,
        description="share of a partition's texts above which few_texts_are_truncated fails",
    )
    max_set_aside_share: float = Field(
        0.01,
        ge=0,
        le=1,
        description="share of a partition's rows above which few_rows_are_set_aside fails",
    )
    owners: list[str] = Field(
        [], description="owners of the assets: e-mail addresses, or teams such as team:search"
    )
    alert_webhook: SecretStr | None = Field(
        None, description="http(s) URL that alerts of failed runs are posted to; a secret"
    )

    @field_validator("source", "output")
    @classmethod
    def _require_place(cls, value: str, info: ValidationInfo) -> str:
        what = info.field_name or "path"
        if not is_bare(value):
            raise ValueError(
                "expected a path, or a URL of a bucket and a path; put credentials into the "
                "environment or into storage_options"
            )
        if what == "source" and value.startswith(ASSET_SCHEME):
            if not all(value.removeprefix(ASSET_SCHEME).split("/")):
                raise ValueError(
                    "expected the key of an asset, as in asset://products or asset://shop/products"
                )
            return value
        if what == "source" and value.startswith(BIGQUERY_SCHEME):
            return value
        if not is_object_store(value):
            try:
                local_path(value, what=what)
            except ConfigError as error:
                raise ValueError(str(error)) from None
        return value

    @field_validator("gcp")
    @classmethod
    def _require_key(cls, value: GcpSettings | None) -> GcpSettings | None:
        if value is not None and value.gcp_credentials is not None:
            try:
                service_account_key(value.gcp_credentials.get_secret_value())
            except ConfigError as error:
                raise ValueError(str(error)) from None
        return value

    @field_validator("alert_webhook")
    @classmethod
    def _require_http(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not value.get_secret_value().startswith(("http://", "https://")):
            raise ValueError("expected a URL that begins with https:// or http://")
        return value

    @field_validator("timezone")
    @classmethod
    def _require_timezone(cls, value: str) -> str:
        try:
            ZoneInfo(value)
        except (KeyError, ValueError, OSError):  # unknown, no name, the name of a folder
            raise ValueError("expected a time zone such as Europe/Berlin") from None
        return value

    @field_validator("run_tags")
    @classmethod
    def _require_free_tags(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if name.startswith(_OWNED_TAGS) and name not in _SETTABLE_TAGS:
                raise ValueError(
                    f"{name!r} is set by Dagster or by this project; of its tags expected "
                    f"{', '.join(_SETTABLE_TAGS)}"
                )
        if not re.fullmatch(r"-?\d+", value.get(PRIORITY_TAG, "0"), re.ASCII):
            raise ValueError(
                f"{PRIORITY_TAG!r} is {value[PRIORITY_TAG]!r}; expected a whole number"
            )
        return value

    @field_validator("checks")
    @classmethod
    def _keep_run_check(cls, value: dict[AnyCheckName, Severity]) -> dict[AnyCheckName, Severity]:
        if value.get(RUN_CHECK) == "off":
            raise ValueError(
                f"{RUN_CHECK} ends every run and cannot be off; expected error or warn"
            )
        return value

    @model_validator(mode="after")
    def _require_agreement(self) -> Self:
        """Refuse settings that contradict each other, and options that a `hash://` model does not
        have."""
        if self.max_runs > 1 and self.cluster != "none":
            raise ValueError(
                "a run over a cluster has all machines, so max_runs is 1 with cluster, not "
                f"{self.max_runs}"
            )
        spec = self.encoding_spec()
        if spec.model.startswith(HASH_SCHEME):
            spec.resolve()
        self.thresholds().resolve(LEAST_B_MIN)  # it matters only to derived values
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
        """Arguments over environment over file; there is no other source."""
        return (
            init_settings,
            env_settings,
            YamlConfigSettingsSource(settings_cls, yaml_file=config_file()),
        )

    def thresholds(self) -> Thresholds:
        """The bounds of a SuperBatch as far as they are set."""
        return self.superbatch_thresholds(self.max_text_bytes)

    def severity(self, check: AnyCheckName) -> Severity:
        """Return how severe a failure of a check is, or "off" if it is not evaluated."""
        return self.checks.get(check, "warn" if check in WARNINGS else "error")

    def cloud_options(self) -> StorageOptions:
        """Return how buckets and BigQuery are reached."""
        options = self.storage_options.options()
        return options if self.gcp is None else replace(options, gcp=self.gcp.options())

    def open_source(self, spec: EncodingSpec | None = None) -> Source:
        """Open the source with the rows of a spec, or of the own one."""
        return self.open_catalog(self.source, self.cloud_options(), spec or self.encoding_spec())

    def as_recorded(self, catalog: CatalogRecord | None) -> Settings:
        """These settings, where those of the catalog that nobody gave are the recorded ones."""
        known = CatalogSettings.model_fields.keys() - self.model_fields_set
        recorded = dict(catalog.settings) if catalog else {}
        used = {name: recorded[name] for name in known & recorded.keys()}
        try:
            taken = CatalogSettings.model_validate(used).model_dump(include=set(used))
        except ValidationError as error:
            wrong = error.errors()[0]
            raise ConfigError(
                f"the settings of the catalog in {SPACE_FILE} cannot be used: "
                f"{wrong['loc'][0]}: {wrong['msg']}"
            ) from None
        return self.model_copy(update=taken)

    def open_store(self) -> Store:
        return open_store(self.output, self.cloud_options())


def absolute_place(place: str) -> str:
    """A path that means the same in another working folder; URLs as they are."""
    return place if "://" in place else str(expanded(place).absolute())


def absolute_model(model: str) -> str:
    """Likewise of a model in a folder; names of a hub as they are."""
    return absolute_place(model) if expanded(model).is_dir() else model


def load_settings(**arguments: Any) -> Settings:
    """Read the settings; an argument that is None counts as not given."""
    given = {name: value for name, value in arguments.items() if value is not None}
    for name, value in given.items():
        if isinstance(value, str):
            require_text(name, value)
    warn_of_unknown_variables(Settings.model_fields)
    try:
        return Settings(**given)
    except ValidationError as error:
        # Without its cause, which quotes every value, secrets too.
        problems = [problem(detail, given, Settings.model_fields) for detail in error.errors()]
        raise ConfigError("\n".join(problems)) from None
    except (
        SettingsError,
        YAMLError,
        OSError,
        TypeError,
        ValueError,
    ) as error:  # the last two: not a mapping
        where = config_file() or "the SURGE_… environment variables"
        raise ConfigError(
            f"the settings in {where} cannot be read: {without_quotes(error)}"
        ) from None
