"""Who we are to a cloud: what gives the credentials may fail, early or late, and may say more than is to be shown."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import google.auth.credentials
import pytest
from google.auth import compute_engine
from google.auth.exceptions import RefreshError, TransportError

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.store import open_store
from surge_dagster.engine.store.credentials import GoogleCredentials
from surge_dagster.engine.store.object_store import open_object_store
from surge_dagster.engine.store.retries import RequestFailed, Retrier
from surge_dagster.engine.store.storage_options import StorageOptions
from tests.engine.store.object_server import BUCKET, ObjectServer


class TestOfAProgram:
    """A profile names a program that gives them; what it prints when it cannot is shown to nobody."""

    SCRIPT = """
        echo x >> calls
        if [ $(wc -l < calls) -eq 2 ]; then echo password=hunter2 >&2; exit 1; fi
        echo '{"Version": 1, "AccessKeyId": "k", "SecretAccessKey": "s", "SessionToken": "t", "Expiration": "'$1'"}'
    """

    @pytest.fixture
    def profile(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
        """Writes the profile whose credentials a program gives, with the arguments that it is called with."""
        monkeypatch.chdir(tmp_path)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_CONFIG_FILE", "aws")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "none")
        Path("give").write_text(self.SCRIPT)

        def write(arguments: str) -> None:
            Path("aws").write_text(f"[default]\ncredential_process = sh give {arguments}\n")

        return write

    @pytest.mark.parametrize("request_", ["PUT", "LIST"])
    def test_a_renewal_that_fails_once_is_tried_again(
        self,
        object_server: ObjectServer,
        profile: Callable[[str], None],
        request_: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        profile((datetime.now(UTC) + timedelta(seconds=60)).isoformat())  # so soon that they are renewed at once
        store = open_object_store(
            f"s3://{BUCKET}/out",
            StorageOptions(endpoint=object_server.url),
            retrier=lambda where: Retrier(where, sleep=lambda _: None),
        )
        if request_ == "PUT":
            with store.create("space/a.parquet") as upload:
                upload.write(b"content")
                upload.publish(lambda: None)
        else:
            assert list(store.list("space")) == []
        assert store.retries == {"credentials": 1}
        assert "they could not be renewed, CredentialRetrievalError" in caplog.text
        assert "hunter2" not in caplog.text

    def test_a_program_that_gives_none_is_told_of_without_what_it_says(self, profile: Callable[[str], None]) -> None:
        Path("calls").write_text("x\n")
        profile("")
        with pytest.raises(ConfigError, match=r"cannot be had \(CredentialRetrievalError\)") as refused:
            open_store("s3://bucket/out")
        assert "hunter2" not in str(refused.getrepr(style="native"))

    @pytest.mark.parametrize("variable", ["AWS_PROFILE", "AWS_ACCESS_KEY_ID"])
    def test_a_profile_that_is_not_there_and_half_a_pair_of_keys_are_refused(
        self, profile: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, variable: str
    ) -> None:
        profile("")
        monkeypatch.setenv(variable, "mine")
        with pytest.raises(ConfigError, match=r"the credentials for S3 cannot be had \(\w+\): look at AWS_PROFILE"):
            open_store("s3://bucket/out")


class Failing(google.auth.credentials.Credentials):
    """Fails to be renewed as it is told."""

    def __init__(self, failure: Exception) -> None:
        super().__init__()
        self._failure = failure

    def refresh(self, request: object) -> None:
        raise self._failure


class TestOfGoogle:
    def test_an_outage_of_the_metadata_server_passes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def away(*_: object, **__: object) -> None:
            raise TransportError("hunter2")

        monkeypatch.setattr("google.auth.compute_engine._metadata.get", away)
        self._assert_tried_again(compute_engine.Credentials())

    @pytest.mark.parametrize("failure", [TransportError("hunter2"), RefreshError("hunter2", retryable=True)])
    def test_nor_is_a_service_that_does_not_answer_a_refusal(self, failure: Exception) -> None:
        self._assert_tried_again(Failing(failure))

    def test_credentials_that_are_refused_are_not_tried_again(self) -> None:
        failed = self._failed(Failing(RefreshError("hunter2")))
        assert (failed.retryable, failed.status) == (False, 401)
        assert str(failed) == "401: the credentials were refused, RefreshError"

    def _assert_tried_again(self, credentials: google.auth.credentials.Credentials) -> None:
        failed = self._failed(credentials)
        assert (failed.cause, failed.retryable) == ("credentials", True)
        assert "hunter2" not in str(failed)

    @staticmethod
    def _failed(credentials: google.auth.credentials.Credentials) -> RequestFailed:
        with pytest.raises(RequestFailed) as caught:
            GoogleCredentials(StorageOptions(credentials=lambda: credentials)).sign("PUT", "https://h/", {}, b"")
        return caught.value
