"""One catalog as a Dagster component: its settings in a `defs.yaml`, under the names that they have
everywhere.

    type: surge_dagster.EmbeddingCatalog
    attributes:
      name: shop
      source: /data/shop/catalog
      output: gs://vectors/shop

The attributes are made from `Settings`. An attribute that is left out, null, or a template of an
unset variable such as `{{ env.SHOP_PROMPT }}` counts as not given: its value comes from the
environment, from `surge.yaml` or is the default.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Self, Union

import dagster as dg
from pydantic import BaseModel, ConfigDict, Field, SecretStr, create_model

from surge_dagster.config.settings import Settings, StorageSettings, load_settings
from surge_dagster.definitions import embedding_catalog
from surge_dagster.engine.errors import ConfigError

_REQUIRED = ("source", "output")  # two catalogs that both took the defaults would share them
_Template = Annotated[str, Field(pattern=r"\{\{.*\}\}")]


class _Scaffolder(dg.Scaffolder):
    """Creates a `defs.yaml` whose catalog has the name of its folder."""

    def scaffold(self, request: dg.ScaffoldRequest) -> None:
        name = re.sub(r"\W", "_", request.target_path.name, flags=re.ASCII)
        folder = f"{{{{ context.project_root }}}}/data/{name}"  # runs begin in any working folder
        attributes = {"name": name, "source": f"{folder}/catalog", "output": f"{folder}/embeddings"}
        dg.scaffold_component(request, attributes)


class _Attributes(dg.Model):
    model_config = ConfigDict(hide_input_in_errors=True)

    name: str | None = Field(
        None, description="name of the catalog, the prefix of its assets, jobs and resources"
    )


@cache
def _attributes() -> type[BaseModel]:
    """Return the model of the attributes: the name, and each setting as a value or a template."""
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
    return create_model("EmbeddingCatalogAttributes", __base__=_Attributes, **fields)


@dg.scaffold_with(_Scaffolder)
@dataclass(frozen=True)
class EmbeddingCatalog(dg.Component, dg.Resolvable):
    """Embeddings of one partitioned catalog: its assets, jobs, sensor, schedules and checks."""

    settings: Settings
    name: str | None = None

    @classmethod
    def model(cls) -> type[BaseModel]:
        return _attributes()

    @classmethod
    def resolve_from_model(cls, context: dg.ResolutionContext, model: BaseModel) -> Self:
        """Resolve the templates with Dagster's resolver and read the settings."""
        written = {name: _plain(getattr(model, name)) for name in model.model_fields_set}
        given = dict(context.resolve_value(written))
        if missing := [name for name in _REQUIRED if given[name] is None]:
            raise ConfigError(
                f"attribute {missing[0]}: {written[missing[0]]!r} resolves to nothing; set the "
                "variable"
            )
        name = given.pop("name", None)
        return cls(load_settings(**given), name)

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        return embedding_catalog(self.settings, name=self.name)


def _plain(value: Any) -> Any:
    """Return a value in which Dagster's resolver finds templates."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, BaseModel):
        return {name: _plain(getattr(value, name)) for name in value.model_fields_set}
    return value
