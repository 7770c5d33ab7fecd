"""One catalog as a Dagster Component: its settings in a `defs.yaml`, under the names that they have everywhere.

    type: surge_dagster.EmbeddingCatalog
    attributes:
      name: shop
      source: /data/shop/catalog
      output: gs://vectors/shop

The attributes are made from `Settings`, so a new setting is an attribute at once. What the file does not say comes from
the environment and from `surge.yaml`; a null is none, whatever those say. A value may be a template such as
`{{ env.SHOP_OUTPUT }}`, which has to give something.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Self, Union

import dagster as dg
from jinja2.nativetypes import NativeEnvironment
from pydantic import BaseModel, ConfigDict, Field, SecretStr, create_model
from pydantic_core import PydanticUndefined

from surge_dagster.definitions import embedding_catalog
from surge_dagster.engine.errors import ConfigError
from surge_dagster.settings import Settings, StorageSettings, settings_of

_REQUIRED = ("source", "output")  # two catalogs that both took the defaults would share them
_VARIABLE = re.compile(r"""\s*\{\{\s*env\s*(\.\s*\w+|[\[(]\s*(['"])\w+\2\s*[\])])\s*\}\}\s*""")
_Template = Annotated[str, Field(pattern=r"\{\{.*\}\}")]


class _Scaffolder(dg.Scaffolder):
    """Begins a `defs.yaml`: the catalog is called as its folder."""

    def scaffold(self, request: dg.ScaffoldRequest) -> None:
        name = re.sub(r"\W", "_", request.target_path.name, flags=re.ASCII)
        folder = f"data/{name}"
        attributes = {"name": name, "source": f"{folder}/catalog", "output": f"{folder}/embeddings"}
        dg.scaffold_component(request, attributes)


class _Attributes(dg.Model):
    """What every set of attributes has; the settings are added to it."""

    model_config = ConfigDict(hide_input_in_errors=True)

    name: str | None = Field(
        None, description="of the catalog in its code location: put before its assets, jobs and resources"
    )


@cache
def _attributes() -> type[BaseModel]:
    """The model of the attributes; each is a setting's value or a template that gives one."""
    fields: dict[str, Any] = {}
    for name, setting in Settings.model_fields.items():
        shape = None
        default = ... if name in _REQUIRED else None if setting.default is PydanticUndefined else setting.default
        annotation = setting.rebuild_annotation()
        if annotation not in (str, StorageSettings):  # text takes a template as it is, storage options take one each
            # Written as a call: the parts are known here only, and `|` is not defined for all of them.
            annotation = Union[annotation, _Template]  # noqa: UP007
            shape = _name_choices
        fields[name] = (
            annotation,
            Field(default, description=setting.description, examples=setting.examples, json_schema_extra=shape),
        )
    return create_model("EmbeddingCatalogAttributes", __base__=_Attributes, **fields)


def _name_choices(schema: dict[str, Any]) -> None:
    """Have `dg check yaml` name the values that there are: of alternatives it says that none is met, and no more."""
    value, template, *_ = schema["anyOf"]
    if "enum" in value or "propertyNames" in value:
        del schema["anyOf"]
        types = sorted({value.pop("type"), "string"})
        schema |= {"type": types if len(types) > 1 else "string", "if": template, "else": value}


@dg.scaffold_with(_Scaffolder)
@dataclass(frozen=True)
class EmbeddingCatalog(dg.Component, dg.Resolvable):
    """Embeddings of one partitioned catalog: its assets, jobs, sensor, schedules and checks.

    Attributes:
        settings: of the catalog.
        name: tells catalogs of one code location apart; see `embedding_catalog`.
    """

    settings: Settings
    name: str | None = None

    @classmethod
    def model(cls) -> type[BaseModel]:
        """What `attributes` may hold."""
        return _attributes()

    @classmethod
    def resolve_from_model(cls, context: dg.ResolutionContext, model: BaseModel) -> Self:
        """Read the settings from attributes whose templates are filled in first.

        Raises:
            ConfigError: a template gives nothing, or what cannot be a setting's value.
        """
        written = [name for name in type(model).model_fields if name in model.model_fields_set]
        given = {name: _plain(getattr(model, name)) for name in written}
        resolved: Mapping[str, Any] = context.resolve_value(given)
        if problems := list(_templates_of_nothing(context, given, resolved)):
            raise ConfigError("\n".join(problems))
        return cls(settings_of({key: resolved[key] for key in resolved if key != "name"}), resolved.get("name"))

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """The same definitions that `embedding_catalog` gives."""
        return embedding_catalog(self.settings, name=self.name)


def _templates_of_nothing(
    context: dg.ResolutionContext, given: Mapping[str, Any], resolved: Mapping[str, Any], place: str = ""
) -> Iterator[str]:
    """What is wrong with templates that are a variable which is not set, or that write None into a text.

    Nobody asked for what would come of them: the default in place of the value, a folder that is called None. Who
    writes `{{ env.X or None }}` has asked.
    """
    for name, value in given.items():
        if isinstance(value, Mapping):
            yield from _templates_of_nothing(context, value, resolved[name], f"{place}{name}.")
        elif isinstance(value, str) and _gives_nothing(context, name, value, resolved[name]):
            # Of a text with templates in it those alone: the rest may be a secret.
            shown = " ".join(re.findall(r"(?s)\{[{%].*?[%}]\}", value)) or value
            remedy = "set the variable" if name in _REQUIRED else "set the variable, or leave the attribute out"
            yield f"attribute {place}{name}: {shown!r} gives nothing; {remedy}"


def _gives_nothing(context: dg.ResolutionContext, name: str, template: str, value: Any) -> bool:
    if value is None:
        return name in _REQUIRED or _VARIABLE.fullmatch(template) is not None
    return _has_nothing(context, template)


def _has_nothing(context: dg.ResolutionContext, text: str) -> bool:
    """Whether an expression in a text is None."""
    found: list[Any] = []

    def look(value: Any) -> Any:
        found.append(value)
        return value

    NativeEnvironment(finalize=look).from_string(text).render(**context.scope)
    return any(value is None for value in found)


def _plain(value: Any) -> Any:
    """An attribute as the settings take it, and as templates in it can be filled in."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return value.revealed() if isinstance(value, StorageSettings) else value
