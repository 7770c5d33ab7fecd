"""One catalog as a Dagster component: its settings in a `defs.yaml`, under the names that they have
everywhere.

    type: surge_dagster.EmbeddingCatalog
    attributes:
      name: shop
      source: /data/shop/catalog
      output: gs://vectors/shop

Dagster's own `post_processing` changes owners, groups, kinds, automation conditions or freshness of
the assets. What it cannot say, a subclass does in `get_asset_spec` and `execute`.

The attributes are made from `Settings`. An attribute that is left out, null, or a template of an
unset variable such as `{{ env.SHOP_PROMPT }}` counts as not given: its value comes from the
environment, from `surge.yaml` or is the default.
"""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Self, Union, get_type_hints

import dagster as dg
from pydantic import BaseModel, ConfigDict, Field, SecretStr, create_model

from surge_dagster.assets.embeddings import CatalogRun
from surge_dagster.config.settings import Settings, StorageSettings, load_settings
from surge_dagster.definitions import catalog_definitions
from surge_dagster.engine.errors import ConfigError
from surge_dagster.orchestration.names import CatalogNames

_REQUIRED = ("source", "output")  # with the defaults, two catalogs would write to one folder
_Template = Annotated[str, Field(pattern=r"\{\{.*\}\}")]

# Each question of a new user, and the settings that answer it with an example.
_QUESTIONS: dict[str, dict[str, Any]] = {
    "Where are the texts? A folder or bucket with a folder or file per partition, a table with "
    "partition_by, or an asset of this project: asset://products": {
        "source": None,
        "partition_by": ["category"],
    },
    "Where do the vectors go? A folder or bucket": {"output": None},
    "Which columns are read, and which are copied next to the vectors?": {
        "id": "id",
        "text": "{title}. {description}",
        "columns": ["sku", "price"],
    },
    "Which model? A model of sentence-transformers, or an OpenAI-compatible server": {
        "model": "sentence-transformers/all-MiniLM-L6-v2",
        "encoder_url": "https://api.openai.com/v1",
        "encoder_api_key_env": "OPENAI_API_KEY",
    },
    "When? A cron turns the schedule on, and gives embeddings a freshness policy": {
        "nightly_cron": "0 2 * * *",
        "timezone": "Europe/Berlin",
    },
    "Who is told? Owners of the assets, and a webhook for failed runs": {
        "owners": ["team:search"],
        "alert_webhook": "{{ env.ALERT_WEBHOOK }}",
    },
}


class _ScaffoldParams(BaseModel):
    source: str | None = Field(None, description=Settings.model_fields["source"].description)
    output: str | None = Field(None, description=Settings.model_fields["output"].description)
    model: str | None = Field(None, description=Settings.model_fields["model"].description)
    nightly_cron: str | None = Field(
        None, description=Settings.model_fields["nightly_cron"].description
    )


class _Scaffolder(dg.Scaffolder[_ScaffoldParams]):
    """Creates a catalog with the name of its folder, and asks in comments what it has to know."""

    @classmethod
    def get_scaffold_params(cls) -> type[_ScaffoldParams]:
        return _ScaffoldParams

    def scaffold(self, request: dg.ScaffoldRequest[_ScaffoldParams]) -> None:
        name = re.sub(r"\W", "_", request.target_path.name, flags=re.ASCII)
        if not name[0].isalpha():
            name = f"catalog_{name}"
        folder = f"{{{{ context.project_root }}}}/data/{name}"  # runs begin in any working folder
        given = {"source": f"{folder}/catalog", "output": f"{folder}/embeddings"}
        given |= request.params.model_dump(exclude_none=True)
        if request.append or request.scaffold_format != "yaml":
            dg.scaffold_component(request, {"name": name, **given})
            return
        text = _questions(request.type_name, name, given)
        (request.target_path / "defs.yaml").write_text(text, encoding="utf-8")


def _questions(type_name: str, name: str, given: Mapping[str, str]) -> str:
    """Return a `defs.yaml` whose comments are the questions of a new user."""
    lines = [f"type: {type_name}", "", "attributes:", f"  {_yaml_line('name', name)}"]
    for question, answers in _QUESTIONS.items():
        lines += ["", *textwrap.wrap(question, 90, initial_indent="  # ", subsequent_indent="  # ")]
        for setting, example in answers.items():
            if setting in given:
                lines.append(f"  {_yaml_line(setting, given[setting])}")
            else:
                lines.append(f"  # {_yaml_line(setting, example)}")
    job = CatalogNames(name).refresh_job
    lines += ["", f"# docs/configure.md lists all attributes. Launch the job {job} to begin.", ""]
    return "\n".join(lines)


def _yaml_line(setting: str, value: Any) -> str:
    return f"{setting}: {json.dumps(value, ensure_ascii=False)}"  # JSON is YAML, too


class _Attributes(dg.Model):
    model_config = ConfigDict(hide_input_in_errors=True)  # it may have secrets

    name: str | None = Field(
        None, description="name of the catalog, the prefix of its assets, jobs and resources"
    )


@cache
def _attributes(kind: type[EmbeddingCatalog]) -> type[BaseModel]:
    """Return the model of the attributes: the name, each setting as a value or a template, and the
    fields of a subclass."""
    fields: dict[str, Any] = {}
    for name, setting in Settings.model_fields.items():
        annotation: Any = setting.rebuild_annotation()
        default = ... if name in _REQUIRED else None
        # Written as a call: `|` is not defined for all of these types.
        if annotation is not StorageSettings and name not in _REQUIRED:
            annotation = Union[annotation, _Template, None]  # noqa: UP007
        fields[name] = (
            annotation,
            Field(default, description=setting.description, examples=setting.examples),
        )
    hints = get_type_hints(kind, include_extras=True)
    for own in _subclass_fields(kind):
        if own.name in fields:
            raise ConfigError(
                f"the field {own.name!r} of {kind.__name__} is a setting of each catalog. Give it "
                "another name."
            )
        annotation = Union[hints[own.name], _Template]  # noqa: UP007
        fields[own.name] = (annotation, ... if _is_required(own) else None)
    return create_model(f"{kind.__name__}Attributes", __base__=_Attributes, **fields)


def _subclass_fields(kind: type[EmbeddingCatalog]) -> list[dataclasses.Field[Any]]:
    """Return the fields that a subclass adds."""
    return [each for each in dataclasses.fields(kind) if each.name not in ("settings", "name")]


def _is_required(own: dataclasses.Field[Any]) -> bool:
    return own.default is dataclasses.MISSING and own.default_factory is dataclasses.MISSING


@dg.scaffold_with(_Scaffolder)
@dataclass(frozen=True)
class EmbeddingCatalog(dg.Component, dg.Resolvable):
    """Embeddings of one partitioned catalog: its assets, jobs, sensor, schedules and checks.

    A subclass changes the specs of the assets, or what happens around each run that embeds. Its
    fields are attributes, too:

        @dataclass(frozen=True)
        class ShopCatalog(EmbeddingCatalog):
            domain: str = "shop"

            def get_asset_spec(self, spec):
                return super().get_asset_spec(spec).merge_attributes(tags={"domain": self.domain})

            def execute(self, context, run):
                yield from super().execute(context, run)
                context.log.info(f"{run.report.texts_encoded} texts for the shop")
    """

    settings: Settings
    name: str | None = None

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        """Return what Dagster's tools show of the component in their lists."""
        return dg.ComponentTypeSpec(
            description=(
                "Embeddings of a partitioned catalog of texts: one file of vectors per partition, "
                "kept up to date by a sensor and a nightly refresh, with asset checks."
            ),
            owners=["team:surge-dagster"],
            tags=["embeddings", "vector-search", "sentence-transformers", "parquet"],
            produces=["asset", "asset_check", "job", "resource", "schedule", "sensor"],
        )

    @classmethod
    def model(cls) -> type[BaseModel]:
        return _attributes(cls)

    @classmethod
    def resolve_from_model(cls, context: dg.ResolutionContext, model: BaseModel) -> Self:
        """Resolve the templates with Dagster's resolver and read the settings."""
        written = {
            name: _with_raw_templates(getattr(model, name)) for name in model.model_fields_set
        }
        given = dict(context.resolve_value(written))
        own_required = [each.name for each in _subclass_fields(cls) if _is_required(each)]
        if missing := [name for name in (*_REQUIRED, *own_required) if given[name] is None]:
            raise ConfigError(
                f"attribute {missing[0]}: {written[missing[0]]!r} resolves to nothing; set the "
                "variable"
            )
        name = given.pop("name", None)
        own: dict[str, Any] = {}
        for each in _subclass_fields(cls):
            value = given.pop(each.name, None)
            if value is not None:
                own[each.name] = value
        return cls(load_settings(**given), name, **own)

    def get_asset_spec(self, spec: dg.AssetSpec) -> dg.AssetSpec:
        """Return the spec of an asset of the catalog.

        A subclass may change everything but key, partitions and code version, with which runs
        report the asset. `post_processing` must leave them, too.

        Args:
            spec: as the catalog makes it.
        """
        return spec

    def execute(
        self, context: dg.OpExecutionContext, run: CatalogRun
    ) -> Iterable[dg.AssetCheckResult]:
        """Embed what a run was launched for; return the results of its checks.

        Each run that embeds calls it, from the asset as well as from a job, sensor or schedule.
        A subclass may work before and after it. Errors end the run as failed; so does an
        `execute` that did not call this one, or does not yield its results.
        """
        yield from run.embed()

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        return catalog_definitions(
            self.settings,
            CatalogNames(self.name),
            get_asset_spec=self.get_asset_spec,
            execute=self.execute,
        )


def _with_raw_templates(value: Any) -> Any:
    """Return a value in which Dagster's resolver finds templates."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, BaseModel):
        return {name: _with_raw_templates(getattr(value, name)) for name in value.model_fields_set}
    return value
