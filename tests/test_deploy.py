"""The configurations in deploy/ are valid for the installed packages and fit several machines."""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from dagster import DagsterInstance, Shape
from dagster._config import process_config, resolve_to_config_type
from dagster._core.instance.config import dagster_instance_config_schema
from dagster._core.utils import parse_env_var
from dagster._serdes import ConfigurableClassData

from surge_dagster.config.settings import Settings, load_settings
from tests.extras import require

# Tests import these packages themselves, which takes seconds; pyright also has to pass without
# them.
require("integrations", "dagster_aws", "dagster_docker", "dagster_k8s")
require("postgres", "dagster_postgres")

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
KINDS = ("kubernetes", "docker", "ecs")
PLANNED = "DAGSTER_EMIT_PARTITION_SUBSET_IN_PLANNED_EVENTS"
# Keys that the chart adds to the configuration of the launcher.
AROUND = {
    "service_account_name": "dagster",
    "instance_config_map": "instance",
    "dagster_home": "/opt/dagster",
}
# Keys that the chart sets for the instance, too.
ABOUT_THE_INSTANCE = {*AROUND, "postgres_password_secret", "job_namespace"}
# A run without these variables reads and writes folders of its own.
WITHOUT_DEFAULTS = {"SURGE_SOURCE", "SURGE_OUTPUT"}
# Containers of one machine see the same GPU, those of a cluster have one each.
LIMITS = {"kubernetes": 4, "docker": 1, "ecs": 4}
STORED = ("Run", "EventLog", "Schedule")
CLASSES = {"kubernetes": "K8sRunLauncher", "docker": "DockerRunLauncher", "ecs": "EcsRunLauncher"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment variables that the files name."""
    for name in (
        "SURGE_RUN_TASK_DEFINITION",
        "ECS_CLUSTER",
        "DAGSTER_PG_PASSWORD",
        "DAGSTER_PG_HOST",
    ):
        monkeypatch.setenv(name, "named")


def load(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text())


def accepted(schema: Any, config: Any) -> Any:
    """A configuration as Dagster resolves it; it must be valid."""
    result = process_config(schema, config)
    assert result.success, [error.message for error in result.errors or []]
    return result.value


def snake_case(given: Any) -> Any:
    """Helm's values under Dagster's names."""
    if isinstance(given, dict):
        return {
            re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", name): snake_case(it)
            for name, it in given.items()
        }
    return [snake_case(each) for each in given] if isinstance(given, list) else given


@pytest.mark.parametrize("kind", KINDS)
def test_configuration_is_valid_for_an_instance(kind: str) -> None:
    config = load(f"{kind}/dagster.yaml")
    accepted(Shape(dagster_instance_config_schema()), config)
    assert config["concurrency"]["pools"] == {"granularity": "run", "default_limit": LIMITS[kind]}
    assert config["run_retries"]["retry_on_asset_or_op_failure"] is False


@pytest.mark.parametrize("kind", KINDS)
def test_storage_finds_the_driver_of_its_database(kind: str, tmp_path: Path) -> None:
    """A storage creates its engine, which imports the driver; creating tables would need a server."""
    config = load(f"{kind}/dagster.yaml")
    config["storage"]["postgres"]["should_autocreate_tables"] = False
    (tmp_path / "dagster.yaml").write_text(yaml.safe_dump(config))
    with DagsterInstance.from_config(str(tmp_path)) as instance:
        storages = (instance.run_storage, instance.event_log_storage, instance.schedule_storage)
        assert [type(storage).__name__ for storage in storages] == [
            f"Postgres{each}Storage" for each in STORED
        ]


@pytest.mark.parametrize("kind", KINDS)
def test_run_launcher_accepts_its_configuration(kind: str) -> None:
    given = load(f"{kind}/dagster.yaml")["run_launcher"]
    assert given["class"] == CLASSES[kind]
    data = ConfigurableClassData(given["module"], given["class"], yaml.safe_dump(given["config"]))
    module = __import__(given["module"], fromlist=[given["class"]])
    accepted(resolve_to_config_type(getattr(module, given["class"]).config_type()), given["config"])
    if kind == "docker":  # the other launchers connect to their cloud when they are created
        assert type(data.rehydrate()).__name__ == CLASSES[kind]


def test_kubernetes_launcher_accepts_the_values_of_helm() -> None:
    from dagster_k8s.container_context import K8sContainerContext  # pyright: ignore
    from dagster_k8s.job import DagsterK8sJobConfig  # pyright: ignore

    values = load("kubernetes/values.yaml")
    launcher = snake_case(values["runLauncher"]["config"]["k8sRunLauncher"])
    accepted(
        resolve_to_config_type(DagsterK8sJobConfig.config_type_run_launcher()), launcher | AROUND
    )
    [deployment] = values["dagster-user-deployments"]["deployments"]
    assert deployment["includeConfigInLaunchedRuns"]["enabled"], "runs get what follows"
    handed_on = {
        "env": deployment["env"],
        "env_secrets": [secret["name"] for secret in deployment["envSecrets"]],
        "volumes": snake_case(deployment["volumes"]),
        "volume_mounts": snake_case(deployment["volumeMounts"]),
    }
    context = K8sContainerContext.create_from_config({"k8s": handed_on})
    made = context.run_k8s_config
    assert {mount["name"] for mount in made.container_config["volume_mounts"]} <= {
        volume["name"] for volume in made.pod_spec_config["volumes"]
    }
    for variables in (deployment["env"], values["dagsterWebserver"]["env"]):
        assert {"name": PLANNED, "value": "true"} in variables
    assert (
        values["dagsterDaemon"]["env"] == {PLANNED: "true"}
        and f"{PLANNED}=true" in launcher["env_vars"]
    )


def test_run_in_kubernetes_has_a_gpu_with_helm_and_without() -> None:
    from dagster_k8s.job import USER_DEFINED_K8S_JOB_CONFIG_SCHEMA, UserDefinedDagsterK8sConfig  # pyright: ignore

    by_helm = load("kubernetes/values.yaml")["runLauncher"]["config"]["k8sRunLauncher"][
        "runK8sConfig"
    ]
    by_hand = load("kubernetes/dagster.yaml")["run_launcher"]["config"]["run_k8s_config"]
    snake = {
        "container_config": by_helm["containerConfig"],
        "pod_spec_config": by_helm["podSpecConfig"],
        "job_spec_config": by_helm["jobSpecConfig"],
    }
    for config in (snake, by_hand):
        resolved = accepted(resolve_to_config_type(USER_DEFINED_K8S_JOB_CONFIG_SCHEMA), config)
        made = UserDefinedDagsterK8sConfig.from_dict(resolved)
        assert made.container_config["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert made.pod_spec_config["node_selector"] == {"nvidia.com/gpu.present": "true"}


def test_run_in_kubernetes_is_the_same_with_helm_and_without() -> None:
    values, by_hand = (
        load("kubernetes/values.yaml"),
        load("kubernetes/dagster.yaml")["run_launcher"]["config"],
    )
    by_helm = values["runLauncher"]["config"]["k8sRunLauncher"]
    [deployment] = values["dagster-user-deployments"]["deployments"]
    handed_on = {variable["name"]: variable["value"] for variable in deployment["env"]}
    image = deployment["image"]
    assert {
        "job_image": f"{image['repository']}:{image['tag']}",
        "image_pull_policy": image["pullPolicy"],
        "env_vars": handed_on | dict(variable.split("=", 1) for variable in by_helm["envVars"]),
        "env_secrets": [secret["name"] for secret in deployment["envSecrets"]],
        "volumes": snake_case(deployment["volumes"]),
        "volume_mounts": snake_case(deployment["volumeMounts"]),
        "run_k8s_config": snake_case(by_helm["runK8sConfig"]),
    } == {name: said for name, said in by_hand.items() if name not in ABOUT_THE_INSTANCE} | {
        "env_vars": dict(variable.split("=", 1) for variable in by_hand["env_vars"])
    }
    assert handed_on.keys() >= WITHOUT_DEFAULTS


def test_helm_and_dagster_yaml_agree_on_slots_retries_and_driver() -> None:
    by_helm, by_hand = load("kubernetes/values.yaml"), load("kubernetes/dagster.yaml")
    daemon = by_helm["dagsterDaemon"]
    said = {
        "concurrency": {
            name: each for name, each in by_helm["concurrency"].items() if name != "enabled"
        },
        "run_monitoring": daemon["runMonitoring"],
        "run_retries": daemon["runRetries"],
    }
    assert by_helm["concurrency"]["enabled"], "the chart leaves it out otherwise"
    assert "config" not in daemon["runCoordinator"], "the chart refuses a limit in both places"
    assert snake_case(said) == {name: by_hand[name] for name in said}
    database = by_hand["storage"]["postgres"]["postgres_db"]
    assert by_helm["postgresql"] == {
        "postgresqlScheme": database["scheme"],
        "postgresqlParams": database["params"],
    }


def test_pooled_connections_reach_the_database_of_the_instances_and_forget_the_settings_of_a_session() -> (
    None
):
    pooled = ConfigParser(inline_comment_prefixes=None)
    pooled.read(DEPLOY / "pgbouncer.ini")
    names = {
        load(f"{kind}/dagster.yaml")["storage"]["postgres"]["postgres_db"]["db_name"]
        for kind in KINDS
    }
    assert names == set(pooled["databases"]) and pooled["pgbouncer"]["pool_mode"] == "session"


def test_stopped_run_has_its_grace_time_before_it_is_killed() -> None:
    docker = load("docker/dagster.yaml")["run_launcher"]["config"]["container_kwargs"]
    by_helm = load("kubernetes/values.yaml")["runLauncher"]["config"]["k8sRunLauncher"][
        "runK8sConfig"
    ]
    by_hand = load("kubernetes/dagster.yaml")["run_launcher"]["config"]["run_k8s_config"]
    given = (
        docker["stop_timeout"],
        by_helm["podSpecConfig"]["terminationGracePeriodSeconds"],
        by_hand["pod_spec_config"]["termination_grace_period_seconds"],
    )
    assert min(given) > Settings.model_fields["grace_seconds"].default
    assert docker["stop_signal"] == "SIGTERM"


def test_compose_and_launcher_agree() -> None:
    compose, launcher = (
        load("docker/docker-compose.yml"),
        load("docker/dagster.yaml")["run_launcher"]["config"],
    )
    assert launcher["image"] == compose["x-surge"]["image"]
    assert launcher["network"] == compose["networks"]["surge"]["name"]
    assert set(launcher["env_vars"]) == compose["x-surge"]["environment"].keys() > WITHOUT_DEFAULTS
    assert launcher["container_kwargs"]["volumes"] == compose["x-surge"]["volumes"]
    mounted = {volume.partition(":")[0] for volume in launcher["container_kwargs"]["volumes"]}
    assert all(compose["volumes"][name]["name"] == name for name in mounted), (
        "runs know them by their full names"
    )
    build = compose["x-surge"]["build"]
    assert (DEPLOY / "docker" / build["context"] / build["dockerfile"]).samefile(
        DEPLOY / "docker" / "Dockerfile"
    )


def test_compose_sets_every_variable_of_a_run() -> None:
    """Dagster refuses to launch a run whose launcher names a variable that is not set."""
    for name, value in load("docker/docker-compose.yml")["x-surge"]["environment"].items():
        assert parse_env_var(f"{name}={value}") == (name, value) and not re.search(
            r"\$\{\w+\}", value
        ), name
    with pytest.raises(Exception, match="SURGE_PROMPT, but it was not set"):
        parse_env_var("SURGE_PROMPT")


def test_image_has_the_settings_that_code_server_and_runs_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = image()
    assert built["deploy/docker/surge.yaml"] == "surge.yaml" and "SURGE_CONFIG=" not in built["ENV"]
    monkeypatch.chdir(DEPLOY / "docker")
    assert load_settings().model_fields_set >= {"model"}


def test_downloaded_and_converted_models_are_on_the_volume_of_every_run() -> None:
    kept = dict(variable.split("=") for variable in image()["ENV"].split())
    volumes = load("docker/dagster.yaml")["run_launcher"]["config"]["container_kwargs"]["volumes"]
    [cache] = [volume.split(":")[1] for volume in volumes if volume.startswith("cache:")]
    assert all(Path(kept[name]).is_relative_to(cache) for name in ("SURGE_CACHE_DIR", "HF_HOME"))


def test_working_folder_of_the_image_hides_no_part_of_the_package() -> None:
    """Dagster imports from the working folder first, where `surge_dagster` has no `assets`."""
    built = image()
    assert (
        built["surge_dagster"] == "surge_dagster"
        and built["WORKDIR"] != built["WORKDIR of surge_dagster"]
    )


def image() -> dict[str, str]:
    """Copies of the Dockerfile with targets, its variables, and its working folder during the
    copies and at the end."""
    text = (DEPLOY / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    built: dict[str, str] = {}
    for instruction, _, rest in (line.partition(" ") for line in text.splitlines()):
        if instruction == "COPY":
            *copied, place = rest.split()
            built |= dict.fromkeys(copied, place)
            built |= {f"WORKDIR of {name}": built["WORKDIR"] for name in copied}
        elif instruction in ("ENV", "WORKDIR"):
            built[instruction] = rest
    return built


def test_docker_accepts_the_container_settings_of_a_run() -> None:
    from docker.models.containers import _create_container_args  # pyright: ignore

    given = load("docker/dagster.yaml")["run_launcher"]["config"]["container_kwargs"]
    del given["stop_timeout"]  # which the launcher keeps for itself
    made = _create_container_args(
        {"image": "surge-dagster", "command": [], "version": "1.43"} | given
    )
    assert made["host_config"]["DeviceRequests"][0]["Capabilities"] == [["gpu"]]


def test_ecs_task_has_the_variables_that_the_page_names() -> None:
    handed_on = set(load("ecs/dagster.yaml")["run_launcher"]["config"]["env_vars"])
    named = set(re.findall("`([A-Z_]+)`", (DEPLOY / "ecs" / "README.md").read_text()))
    of_no_run = {"SURGE_RUN_TASK_DEFINITION", "ECS_CLUSTER", "SURGE_MAX_RUNS"}
    assert handed_on == named - of_no_run - {
        "DAGSTER_PG_PASSWORD"
    } and handed_on > WITHOUT_DEFAULTS | {PLANNED}


def test_every_surge_variable_names_a_setting() -> None:
    known = {f"SURGE_{name.upper()}" for name in Settings.model_fields}
    deployment = load("kubernetes/values.yaml")["dagster-user-deployments"]["deployments"][0]
    named = {variable["name"] for variable in deployment["env"]} | set(
        load("docker/docker-compose.yml")["x-surge"]["environment"]
    )
    assert {name for name in named if name.startswith("SURGE_")} <= known
