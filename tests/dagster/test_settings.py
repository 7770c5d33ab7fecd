"""Tests of settings: sources and their order, validation, and secrets that no error quotes."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pydantic import ValidationError

from surge_dagster import EmbeddingCatalog
from surge_dagster.config.settings import StorageSettings, load_settings
from surge_dagster.definitions import embedding_catalog
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.store import StorageOptions
from surge_dagster.engine.store.object_client import GcpOptions
from surge_dagster.resources import CatalogSource, EncoderResource, OutputStore
from tests.dagster.private_dagster import shown_by_the_ui


@pytest.fixture(autouse=True)
def nothing_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SURGE_CONFIG", "SURGE_B_MIN", "SURGE_MODEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def test_arguments_override_the_environment_which_overrides_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("surge.yaml").write_text("b_min: 1\nb_max: 10\nmodel: hash://8\n")

    assert load_settings().b_min == 1

    monkeypatch.setenv("SURGE_B_MIN", "2")
    assert load_settings().b_min == 2

    settings = load_settings(b_min=3, b_max=None)
    assert settings.b_min == 3
    assert settings.b_max == 10
    assert settings.encoding_spec() == EncodingSpec(model="hash://8")


@pytest.mark.parametrize("given", [{"devices": "gpu"}, {"precision": "int8"}, {"b_min": 0}])
def test_resource_refuses_the_values_that_the_settings_refuse(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        EncoderResource(**given)


def test_surge_config_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("surge.yaml").write_text("b_min: 1\n")
    elsewhere = tmp_path / "other.yaml"
    elsewhere.write_text("b_min: 5\n")

    monkeypatch.setenv("SURGE_CONFIG", str(elsewhere))

    assert load_settings().b_min == 5

    monkeypatch.setenv("SURGE_CONFIG", str(tmp_path / "missing.yaml"))

    with pytest.raises(ConfigError, match=r"missing\.yaml"):
        load_settings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "bmin: 1",
            "setting bmin in surge.yaml is unknown; there are alert_webhook, b_max, b_min,",
        ),
        ("b_min: many", "setting b_min in surge.yaml is 'many'"),
        ("dtype: int8", "'float32' or 'float16'"),
        ("- 1", "surge.yaml cannot be read"),
        ("a: : [", "surge.yaml cannot be read"),
    ],
)
def test_error_in_surge_yaml_names_the_file_and_the_reason(text: str, message: str) -> None:
    Path("surge.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_settings()

    assert message in str(refused.value)


def test_error_of_a_wrong_variable_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SURGE_B_MIN", "0")
    with pytest.raises(ConfigError, match="setting SURGE_B_MIN is '0'"):
        load_settings()


class TestImpossibleSettings:
    """They are refused when definitions are loaded and not by the first run."""

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"max_runs": 2, "cluster": "auto"}, "max_runs is 1 with cluster, not 2"),
            (
                {"precision": "int8"},
                "setting precision is 'int8': input should be 'auto', 'fp32', 'fp16' or 'bf16'",
            ),
            (
                {"devices": "gpu"},
                "setting devices is 'gpu': expected auto, or a list of one kind: cpu, cuda",
            ),
            ({"devices": "cuda:0,cpu"}, "setting devices is 'cuda:0,cpu': expected auto"),
            ({"devices": ""}, "setting devices is '': expected auto"),
            (
                {"timezone": "Europe/Berln"},
                "setting timezone is 'Europe/Berln': expected a time zone such as Europe/Berlin",
            ),
            ({"timezone": ""}, "setting timezone is '': expected a time zone"),
            ({"timezone": "Europe"}, "setting timezone is 'Europe': expected a time zone"),
            (
                {"model": "hash://abc"},
                "'hash://abc': hash:// is followed by a dimension, as in hash://384",
            ),
            (
                {"model": "hash://8", "dimension": 16},
                "hash://8 makes unit vectors of dimension 8 and no others",
            ),
            (
                {"max_length": 2},
                "max_length counts tokens, special ones included, and is at least 3, not 2",
            ),
            ({"b_min": 100, "b_max": 10}, "b_min (100 texts) must not exceed b_max (10)"),
            (
                {"output": "~nobody-of-this-name/x"},
                "setting output: cannot open output '~nobody-of-this-name/x': ",
            ),
            ({"output": ""}, "setting output: the output is empty: give a path or a URL"),
            ({"source": " "}, "setting source: the source is empty: give a path or a URL"),
            (
                {"output": "s3:/bucket"},
                "setting output: the output begins with s3: but is no URL: expected s3://",
            ),
            (
                {"output": "https://host/x"},
                "setting output: cannot open output 'https://host/x': expected a local",
            ),
            (
                {"checks": {"nothing": "off"}},
                "checks.nothing.[key] is 'nothing': input should be 'every_",
            ),
            (
                {"checks": {"published_partitions_are_valid": "off"}},
                "published_partitions_are_valid ends every run and cannot be off",
            ),
            (
                {"checks": {"ids_match": "loud"}},
                "checks.ids_match is 'loud': input should be 'error', 'warn' or 'off'",
            ),
            ({"max_truncated_share": 1.5}, "max_truncated_share is 1.5"),
            (
                {"run_tags": {"surge/attempt": "1"}},
                "'surge/attempt' is set by Dagster or by this project; of its tags",
            ),
            (
                {"run_tags": {".dagster/surge_heartbeat": "1"}},
                "'.dagster/surge_heartbeat' is set by",
            ),
            (
                {"run_tags": {"dagster/retry_on_asset_or_op_failure": True}},
                "'dagster/retry_on_asset_or_op_failure' is set by",
            ),
            (
                {"run_tags": {"dagster/priority": "high"}},
                "'dagster/priority' is 'high'; expected a whole number",
            ),
            ({"run_tags": {"queue": None}}, "input should be a valid string"),
            ({"lancedb": {"table": "a"}}, "setting lancedb.uri: field required"),
            (
                {"qdrant": {"uri": "http://a:hunter2@b"}},
                "setting qdrant.uri: it is shown to people",
            ),
            (
                {"qdrant": {"uri": "http://a", "api_key": "hunter2", "distance": "dot"}},
                "setting qdrant.distance: input should be",
            ),
            ({"qdrant": {"uri": "localhost:6333"}}, "setting qdrant.uri: write http://"),
            ({"qdrant": {"uri": "localhost:6333/a"}}, "setting qdrant.uri: write http://"),
            ({"qdrant": {"uri": ":memory:"}}, "setting qdrant.uri: write http://"),
            ({"qdrant": {"uri": ""}}, "setting qdrant.uri: write http://"),
            (
                {"pgvector": {"dsn": "host=b", "table": "ä" * 28}},
                "setting pgvector.table: it has 56 bytes; Postgres takes 54 here",
            ),
            (
                {"pgvector": {"dsn": "postgresql://a:hunter2@b/c", "index": "ivf"}},
                "setting pgvector.index: input should be",
            ),
            (
                {"pgvector": {"dsn": dg.EnvVar("NOT_SET")}},
                "setting pgvector.dsn: the environment variable NOT_SET is not",
            ),
        ],
    )
    def test_error_names_the_possible_values(self, given: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError) as refused:
            load_settings(**given)
        assert message in str(refused.value)
        assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("uri", ["http://a:6333", "https://a", "data/q", "./q", "/q", "file:///q"])
def test_servers_and_folders_of_qdrant_are_accepted(uri: str) -> None:
    settings = load_settings(qdrant={"uri": uri})

    assert settings.qdrant is not None
    assert settings.qdrant.uri == uri


class TestChecks:
    def test_severity_off_is_read_from_yaml_without_quotes(self) -> None:
        Path("surge.yaml").write_text("checks:\n  ids_match: off\n  one_space: warn\n")
        settings = load_settings()
        severities = [settings.severity(name) for name in ("ids_match", "one_space", "texts_match")]

        assert severities == ["off", "warn", "error"]


class TestRunTags:
    def test_values_are_text_or_what_dagster_reads_as_json(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        limits = {"limits": {"nvidia.com/gpu": 1}}
        Path("surge.yaml").write_text(
            "run_tags:\n  dagster/priority: 5\n  queue: night\n"
            "  dagster-k8s/config: {container_config: {resources: {limits: {nvidia.com/gpu: 1}}}}\n"
        )
        tags = {
            "dagster/priority": "5",
            "queue": "night",
            "dagster-k8s/config": json.dumps({"container_config": {"resources": limits}}),
        }

        assert load_settings().run_tags == tags

        monkeypatch.setenv("SURGE_RUN_TAGS", '{"queue": "day"}')

        assert load_settings().run_tags == tags | {"queue": "day"}, (
            "each tag comes from the first source that has it"
        )


class TestSecretsInUrls:
    """They are refused before they become a resource's configuration, which Dagster's UI shows."""

    @pytest.mark.parametrize("name", ["source", "output"])
    @pytest.mark.parametrize("origin", ["argument", "environment", "file"])
    @pytest.mark.parametrize(
        "url",
        [
            "s3://AKIA:hunter2@bucket/out",
            "az://c/out?sig=hunter2",
            "s3://b/out#hunter2",
            "s3://a:hunter2@[b/out",
        ],
    )
    def test_url_with_credentials_is_refused_and_not_shown(
        self, monkeypatch: pytest.MonkeyPatch, name: str, origin: str, url: str
    ) -> None:
        given: dict[str, Any] = {}
        if origin == "argument":
            given[name] = url
        elif origin == "environment":
            monkeypatch.setenv(f"SURGE_{name.upper()}", url)
        else:
            Path("surge.yaml").write_text(f"{name}: '{url}'\n")
        with pytest.raises(
            ConfigError, match=f"(?i){name}.*expected a path, or a URL of a bucket"
        ) as caught:
            load_settings(**given)

        assert "hunter2" not in str(caught.getrepr(style="native"))

    @pytest.mark.parametrize(
        "path", ["data/you@home?#", "file:///data/out", "s3://bucket/a@b", "gs://bucket"]
    )
    def test_path_that_only_looks_like_credentials_is_accepted(self, path: str) -> None:
        assert load_settings(output=path).output == path

    def test_endpoint_with_credentials_is_refused_and_not_shown(self) -> None:
        endpoint = "http://user:hunter2@minio:9000"
        Path("surge.yaml").write_text(f"storage_options: {{endpoint: '{endpoint}'}}\n")
        for make in (load_settings, lambda: StorageOptions(endpoint=endpoint)):
            with pytest.raises(
                ConfigError, match="as endpoint the base URL of a service"
            ) as caught:
                make()
            assert "hunter2" not in str(caught.getrepr(style="native"))


class TestStorageOptions:
    def test_environment_variable_holds_storage_options_as_json(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(
            "SURGE_STORAGE_OPTIONS", '{"endpoint": "http://h:1", "secret_access_key": "hunter2"}'
        )
        settings = load_settings()

        options = settings.storage_options.options()

        assert options.endpoint == "http://h:1"
        assert options.secret_access_key == "hunter2"
        assert options.region is None

        for shown in (repr(settings), str(settings), repr(options), str(settings.model_dump())):
            assert "hunter2" not in shown

    @pytest.mark.parametrize(
        "document",
        [
            "storage_options: {secret_access_key: [hunter2]}",
            "storage_options: {secret: hunter2}",
            "storage_options: hunter2",
            "storage_options: {session_token: hunter2, region: [5]}",
            "storage_options: {session_token: hunter2",
            "storage_options:\n  session_token: 'hunter2\n",
        ],
    )
    def test_error_does_not_quote_storage_options(self, document: str) -> None:
        Path("surge.yaml").write_text(document)
        with pytest.raises(ConfigError) as caught:
            load_settings()

        assert "hunter2" not in str(caught.getrepr(style="native"))


class TestGcp:
    """The setting `gcp`; the keys of these tests have the form of a key and no use."""

    KEY = base64.b64encode(b'{"type": "service_account", "private_key": "hunter2"}').decode()

    def test_environment_variable_holds_the_account_as_json(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SURGE_GCP", json.dumps({"project": "p", "gcp_credentials": self.KEY}))
        assert load_settings().cloud_options().gcp == GcpOptions("p", gcp_credentials=self.KEY)

    def test_env_var_of_dagster_is_read_with_the_settings(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GCP_KEY", self.KEY)
        gcp: Any = {"gcp_credentials": dg.EnvVar("GCP_KEY")}

        assert load_settings(gcp=gcp).cloud_options().gcp.gcp_credentials == self.KEY

    def test_env_var_that_is_not_set_is_refused_by_its_name(self) -> None:
        gcp: Any = {"gcp_credentials": dg.EnvVar("GCP_KEY_OF_NOBODY")}
        with pytest.raises(ConfigError, match="environment variable GCP_KEY_OF_NOBODY is not set"):
            load_settings(gcp=gcp)

    @pytest.mark.parametrize(
        "credentials",
        [
            "hunter2",
            '{"type": "service_account", "private_key": "hunter2"}',
            base64.b64encode(b"hunter2").decode(),
            base64.b64encode(b'["hunter2"]').decode(),
            base64.b64encode(b'{"type": "authorized_user", "refresh_token": "hunter2"}').decode(),
            ["hunter2"],
        ],
        ids=["text", "JSON", "text in base64", "list", "user", "not text"],
    )
    def test_value_that_is_no_key_is_refused_and_not_quoted(self, credentials: Any) -> None:
        Path("surge.yaml").write_text(json.dumps({"gcp": {"gcp_credentials": credentials}}))
        with pytest.raises(ConfigError, match="setting gcp") as caught:
            load_settings()

        shown = str(caught.getrepr(style="native"))

        assert "hunter2" not in shown
        assert str(credentials) not in shown


@pytest.mark.parametrize("given", ["lang,category", "lang, category", ["lang", "category"]])
def test_columns_of_the_key_are_a_list_or_a_plain_string_everywhere(
    given: str | list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = ["lang", "category"]

    assert load_settings(partition_by=given).partition_by == expected
    assert CatalogSource(url="t.csv", partition_by=given).partition_by == expected  # pyright: ignore

    attributes = {"source": "t.csv", "output": "out", "partition_by": given}
    assert (
        EmbeddingCatalog.from_attributes_dict(attributes=attributes).settings.partition_by
        == expected
    )

    if isinstance(given, str):
        monkeypatch.setenv("SURGE_PARTITION_BY", given)
        assert load_settings().partition_by == expected


def test_bad_rows_can_be_set_aside_everywhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)

    assert load_settings(bad_rows="set_aside").selection().bad_rows == "set_aside"
    resource = CatalogSource(url="t.csv", bad_rows="set_aside")  # pyright: ignore
    assert resource.selection().bad_rows == "set_aside"

    Path("surge.yaml").write_text("bad_rows: set_aside\n")
    assert load_settings().selection().bad_rows == "set_aside"


def open_in_a_run(output: OutputStore) -> Any:
    """The store as an op gets it: Dagster makes new resources for each run."""
    opened: list[Any] = []

    @dg.op
    def look(output: OutputStore) -> None:
        opened.append(output.open())

    @dg.job(resource_defs={"output": output})
    def looking() -> None:
        look()

    assert looking.execute_in_process().success
    return opened[0]


CHUNKS = {"tokens": 64, "overlap": 8, "format": "markdown", "column": "body"}
CHUNKS_AS_TEXT = "tokens=64, overlap=8, format=markdown, column=body"


@pytest.mark.parametrize("given", [CHUNKS, CHUNKS_AS_TEXT, json.dumps(CHUNKS)])
def test_chunks_are_a_mapping_or_a_text_everywhere(
    given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("surge.yaml").write_text(json.dumps({"chunks": given}))

    assert load_settings().chunks == CHUNKS
    assert load_settings(chunks=given).chunks == CHUNKS
    named: dict[str, Any] = {"chunks": given}
    assert EncoderResource(**named).chunks == CHUNKS

    if isinstance(given, str):
        monkeypatch.setenv("SURGE_CHUNKS", given)
        assert load_settings().chunks == CHUNKS


@pytest.mark.parametrize(
    ("given", "chunks"), [("on", {}), (True, {}), ({}, {}), ("off", None), (False, None)]
)
def test_chunks_with_all_defaults_are_switched_on_and_off(given: Any, chunks: object) -> None:
    assert load_settings(chunks=given).chunks == chunks


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("tokens:64", "expected a mapping of tokens, overlap, format, column"),
        ({"splitter": "x"}, "expected a mapping of tokens, overlap, format, column"),
        ("{", "expected a mapping of tokens, overlap, format, column"),
        ("tokens=many", "tokens is a number of tokens, not 'many'"),
        ({"tokens": 64, "overlap": 60}, "overlap is 60 tokens of chunks of at most 64"),
        ({"format": "html"}, "format is text or markdown, not 'html'"),
    ],
)
def test_chunks_that_make_no_sense_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"setting chunks is .*: {message}"):
        load_settings(chunks=given)


def test_storage_options_reach_the_store_and_are_not_shown_by_dagster() -> None:
    given = {
        "access_key_id": "hunter1",
        "secret_access_key": "hunter2",
        "endpoint": "http://127.0.0.1:9",
    }
    options = StorageSettings.model_validate(given)
    webhook = "https://127.0.0.1:9/hunter3"
    settings = load_settings(
        output="s3://vectors/out", storage_options=options, alert_webhook=webhook
    )
    definitions = embedding_catalog(settings)
    output = definitions.resources["output"] if definitions.resources else None

    assert isinstance(output, OutputStore)

    store = open_in_a_run(output)
    assert store._store.credential_provider()["secret_access_key"] == "hunter2"

    everything_the_ui_gets = shown_by_the_ui(definitions)
    assert "s3://vectors/out" in everything_the_ui_gets
    assert "hunter" not in everything_the_ui_gets + repr(output)

    shown = repr(settings) + str(settings.model_dump()) + settings.model_dump_json()
    assert "hunter2" not in shown + repr(StorageOptions(secret_access_key="hunter2"))
    assert "hunter3" not in shown
