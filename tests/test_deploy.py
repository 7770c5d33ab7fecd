"""The configurations in deploy/ are valid for the installed packages and agree with each other."""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from dagster import DagsterInstance

from surge_dagster.config.settings import Settings, load_settings
from tests.extras import require
from tests.pages import DEPLOY, deployed

# Tests import these packages themselves, which takes seconds.
require("integrations", "dagster_aws", "dagster_docker", "dagster_k8s")
require("postgres", "dagster_postgres")

ROOT = Path(__file__).parent.parent
KINDS = ("kubernetes", "docker", "ecs")
PLANNED = "DAGSTER_EMIT_PARTITION_SUBSET_IN_PLANNED_EVENTS"
# Keys that the chart adds to the configuration of the launcher or sets for the instance.
OF_THE_CHART = {
    "service_account_name",
    "instance_config_map",
    "dagster_home",
    "postgres_password_secret",
    "job_namespace",
}
# A run without these variables reads and writes folders of its own.
WITHOUT_DEFAULTS = {"SURGE_SOURCE", "SURGE_OUTPUT"}
# Containers of one machine see the same GPU, those of a cluster have one each.
LIMITS = {"kubernetes": 4, "docker": 1, "ecs": 4}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment variables that the files name."""
    names = ["SURGE_RUN_TASK_DEFINITION", "ECS_CLUSTER", "DAGSTER_PG_PASSWORD", "DAGSTER_PG_HOST"]
    for name in (*names, "SURGE_SOURCE", "SURGE_OUTPUT", "SURGE_MAX_RUNS", PLANNED):
        monkeypatch.setenv(name, "named")


def launcher_of(kind: str) -> dict[str, Any]:
    return deployed(f"{kind}/dagster.yaml")["run_launcher"]["config"]


def helm_launcher() -> dict[str, Any]:
    return deployed("kubernetes/values.yaml")["runLauncher"]["config"]["k8sRunLauncher"]


def snake_case(given: Any) -> Any:
    """Return Helm's values under Dagster's names."""
    if isinstance(given, list):
        return [snake_case(each) for each in given]
    if not isinstance(given, dict):
        return given
    return {
        re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", name): snake_case(value)
        for name, value in given.items()
    }


def instance_of(kind: str, folder: Path) -> DagsterInstance:
    """Return the instance of a deployment; creating tables would need a server."""
    config = deployed(f"{kind}/dagster.yaml")
    config["storage"]["postgres"]["should_autocreate_tables"] = False
    (folder / "dagster.yaml").write_text(yaml.safe_dump(config))
    return DagsterInstance.from_config(str(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_dagster_makes_an_instance_of_the_configuration(kind: str, tmp_path: Path) -> None:
    """A storage creates its engine, which imports the driver."""
    with instance_of(kind, tmp_path) as instance:
        storages = (instance.run_storage, instance.event_log_storage, instance.schedule_storage)
        names = [type(storage).__name__ for storage in storages]

    assert names == ["PostgresRunStorage", "PostgresEventLogStorage", "PostgresScheduleStorage"]


@pytest.mark.parametrize(
    ("kind", "launcher"), [("kubernetes", "K8sRunLauncher"), ("docker", "DockerRunLauncher")]
)
def test_run_launcher_accepts_its_configuration(
    kind: str, launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher of ECS connects to its cloud when it is created."""
    monkeypatch.setattr("kubernetes.config.load_incluster_config", lambda: None)

    with instance_of(kind, tmp_path) as instance:
        assert type(instance.run_launcher).__name__ == launcher


@pytest.mark.parametrize("kind", KINDS)
def test_pools_are_limited_to_the_gpus_of_the_deployment(kind: str) -> None:
    pools = deployed(f"{kind}/dagster.yaml")["concurrency"]["pools"]

    assert pools == {"granularity": "run", "default_limit": LIMITS[kind]}


@pytest.mark.parametrize("kind", KINDS)
def test_run_whose_data_are_bad_is_not_launched_again(kind: str) -> None:
    assert deployed(f"{kind}/dagster.yaml")["run_retries"]["retry_on_asset_or_op_failure"] is False


def test_run_in_kubernetes_is_the_same_with_helm_and_without() -> None:
    by_hand = launcher_of("kubernetes")
    by_helm = helm_launcher()
    [deployment] = deployed("kubernetes/values.yaml")["dagster-user-deployments"]["deployments"]
    handed_on = {variable["name"]: variable["value"] for variable in deployment["env"]}
    image = deployment["image"]

    of_helm = {
        "job_image": f"{image['repository']}:{image['tag']}",
        "image_pull_policy": image["pullPolicy"],
        "env_vars": handed_on | variables(by_helm["envVars"]),
        "env_secrets": [secret["name"] for secret in deployment["envSecrets"]],
        "volumes": snake_case(deployment["volumes"]),
        "volume_mounts": snake_case(deployment["volumeMounts"]),
        "run_k8s_config": snake_case(by_helm["runK8sConfig"]),
    }

    expected = {name: value for name, value in by_hand.items() if name not in OF_THE_CHART}

    assert of_helm == expected | {"env_vars": variables(by_hand["env_vars"])}
    assert handed_on.keys() >= WITHOUT_DEFAULTS


def variables(written: list[str]) -> dict[str, str]:
    return dict(variable.split("=", 1) for variable in written)


def test_helm_and_dagster_yaml_agree_on_slots_retries_and_monitoring() -> None:
    by_helm = deployed("kubernetes/values.yaml")
    by_hand = deployed("kubernetes/dagster.yaml")
    daemon = by_helm["dagsterDaemon"]

    slots = dict(by_helm["concurrency"])

    assert slots.pop("enabled"), "the chart leaves it out otherwise"
    assert "config" not in daemon["runCoordinator"], "the chart refuses a limit in both places"
    assert snake_case(slots) == by_hand["concurrency"]
    assert snake_case(daemon["runMonitoring"]) == by_hand["run_monitoring"]
    assert snake_case(daemon["runRetries"]) == by_hand["run_retries"]


def test_pooled_connections_reach_the_database_of_the_instances() -> None:
    pooled = ConfigParser(inline_comment_prefixes=None)
    pooled.read(DEPLOY / "pgbouncer.ini")

    storages = [deployed(f"{kind}/dagster.yaml")["storage"]["postgres"] for kind in KINDS]
    names = {storage["postgres_db"]["db_name"] for storage in storages}

    assert names == set(pooled["databases"])
    assert pooled["pgbouncer"]["pool_mode"] == "session"


def test_stopped_run_has_its_grace_time_before_it_is_killed() -> None:
    pod = "terminationGracePeriodSeconds"
    docker = launcher_of("docker")["container_kwargs"]
    grace = Settings.model_fields["grace_seconds"].default

    assert docker["stop_signal"] == "SIGTERM"
    assert docker["stop_timeout"] > grace
    assert helm_launcher()["runK8sConfig"]["podSpecConfig"][pod] > grace


def test_compose_and_launcher_agree() -> None:
    compose = deployed("docker/docker-compose.yml")

    launcher = launcher_of("docker")

    assert launcher["image"] == compose["x-surge"]["image"]
    assert launcher["network"] == compose["networks"]["surge"]["name"]
    assert set(launcher["env_vars"]) == compose["x-surge"]["environment"].keys()
    assert set(launcher["env_vars"]) > WITHOUT_DEFAULTS
    assert launcher["container_kwargs"]["volumes"] == compose["x-surge"]["volumes"]


def test_compose_sets_every_variable_of_a_run() -> None:
    """Dagster refuses to launch a run whose launcher names a variable that is not set."""
    for value in deployed("docker/docker-compose.yml")["x-surge"]["environment"].values():
        assert not re.search(r"\$\{\w+\}", value)


def test_settings_of_the_image_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*WITHOUT_DEFAULTS, "SURGE_MAX_RUNS"):
        monkeypatch.delenv(name)

    monkeypatch.chdir(DEPLOY / "docker")

    assert load_settings().model_fields_set >= {"model"}


def test_ecs_task_has_the_variables_that_the_page_names() -> None:
    handed_on = set(launcher_of("ecs")["env_vars"])

    named = set(re.findall("`([A-Z_]+)`", (DEPLOY / "ecs" / "README.md").read_text()))
    of_no_run = {"SURGE_RUN_TASK_DEFINITION", "ECS_CLUSTER", "SURGE_MAX_RUNS"}

    assert handed_on == named - of_no_run - {"DAGSTER_PG_PASSWORD"}
    assert handed_on > WITHOUT_DEFAULTS | {PLANNED}


def test_every_surge_variable_names_a_setting() -> None:
    known = {f"SURGE_{name.upper()}" for name in Settings.model_fields}
    [deployment] = deployed("kubernetes/values.yaml")["dagster-user-deployments"]["deployments"]
    compose = deployed("docker/docker-compose.yml")["x-surge"]["environment"]

    named = {variable["name"] for variable in deployment["env"]} | set(compose)

    assert {name for name in named if name.startswith("SURGE_")} <= known
