"""Settings that a run's config holds in the place of the code location's own.

Dagster's launchpad writes the whole config of the resources into an edited tab, and keeps the tab. A run that is
launched from it weeks later has the settings of the day on which the tab was edited.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg

from surge_dagster.orchestration.names import CatalogNames


def differing_settings(names: CatalogNames, context: dg.OpExecutionContext) -> list[str]:
    """The settings in a run's config with another value than in the code location, such as `encoder.model`.

    Only their names: a value may be secret.
    """
    given: Mapping[str, Any] = context.run_config.get("resources") or {}  # pyright: ignore[reportAssignmentType]
    differing = list[str]()
    for resource in sorted(names.resource_keys & given.keys()):
        schema = context.job_def.resource_defs[resource].config_schema
        own = schema.default_value if schema.default_provided else {}
        config = (given[resource] or {}).get("config") or {}
        differing += [f"{resource}.{name}" for name, value in config.items() if name in own and own[name] != value]
    return differing
