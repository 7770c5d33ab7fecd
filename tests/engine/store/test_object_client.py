"""Credentials of object stores: what provides them may fail, early or late, and its text is never
shown."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import google.auth.credentials
import pytest
from google.auth.exceptions import RefreshError, TransportError

from surge_dagster.engine.errors import ConfigError, StoreUnavailable
from surge_dagster.engine.store import open_store
from surge_dagster.engine.store.object_client import ClientLimits, StorageOptions
from surge_dagster.engine.store.object_store import ObjectStore, open_object_store
from tests.engine.store.object_server import BUCKET, ObjectServer


def open_without_retries(scheme: str, options: StorageOptions) -> ObjectStore:
    """A bucket whose requests obstore sends once, and whose operations wait for nothing."""
    return open_object_store(f"{scheme}://{BUCKET}/out", options, limits=ClientLimits(retries=0))


class TestCredentialProcess:
    """A profile names a program that provides credentials; what it prints when it fails is not
    shown."""

    SCRIPT = """
        echo x >> calls
        if [ $(wc -l < calls) -eq 2 ]; then echo password=hunter2 >&2; exit 1; fi
        printf '{"Version": 1, "AccessKeyId": "k", "SecretAccessKey": "s",'
        echo ' "SessionToken": "t", "Expiration": "'$1'"}'
    """

    @pytest.fixture
    def profile(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
        """Writes the profile whose credentials a program provides, with the arguments of that
        program."""
        monkeypatch.chdir(tmp_path)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_CONFIG_FILE", "aws")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "none")
        Path("give").write_text(self.SCRIPT)

        def write(arguments: str) -> None:
            Path("aws").write_text(f"[default]\ncredential_process = sh give {arguments}\n")

        return write

    def test_renewal_that_fails_is_reported_without_what_the_program_prints(
        self, object_server: ObjectServer, profile: Callable[[str], None]
    ) -> None:
        # so soon that they are renewed immediately
        profile((datetime.now(UTC) + timedelta(seconds=60)).isoformat())
        store = open_without_retries("s3", StorageOptions(endpoint=object_server.url))

        with pytest.raises(StoreUnavailable, match="could not be renewed") as failed:
            list(store.list("space"))

        assert "hunter2" not in str(failed.getrepr(style="native"))

    def test_program_that_fails_is_reported_without_what_it_prints(
        self, profile: Callable[[str], None]
    ) -> None:
        Path("calls").write_text("x\n")
        profile("")
        with pytest.raises(
            ConfigError, match=r"cannot be read \(CredentialRetrievalError\)"
        ) as refused:
            open_store("s3://bucket/out")
        assert "hunter2" not in str(refused.getrepr(style="native"))

    @pytest.mark.parametrize("variable", ["AWS_PROFILE", "AWS_ACCESS_KEY_ID"])
    def test_missing_profile_and_half_a_pair_of_keys_are_refused(
        self, profile: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, variable: str
    ) -> None:
        profile("")
        monkeypatch.setenv(variable, "mine")
        with pytest.raises(
            ConfigError, match=r"the S3 credentials cannot be read \(\w+\): check AWS_PROFILE"
        ):
            open_store("s3://bucket/out")


def test_missing_package_of_s3_is_refused_with_its_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)

    with pytest.raises(ConfigError, match=r"pip install 'surge-dagster\[s3\]'"):
        open_store("s3://b/out")


class Failing(google.auth.credentials.Credentials):
    """Fails to be renewed."""

    def __init__(self, failure: Exception) -> None:
        super().__init__()
        self._failure = failure

    def refresh(self, request: object) -> None:
        raise self._failure


@pytest.mark.parametrize("failure", [TransportError("hunter2"), RefreshError("hunter2")])
def test_google_renewal_that_fails_is_reported_without_its_text(
    object_server: ObjectServer, failure: Exception
) -> None:
    options = StorageOptions(endpoint=object_server.url, credentials=lambda: Failing(failure))
    store = open_without_retries("gs", options)

    with pytest.raises(
        StoreUnavailable, match=r"could not be renewed.*Check the program"
    ) as failed:
        list(store.list("space"))

    assert "hunter2" not in str(failed.getrepr(style="native"))
