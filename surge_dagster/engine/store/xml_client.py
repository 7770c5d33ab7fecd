"""Writing to S3 and GCS over the XML interface that both speak.

obstore reads, lists and deletes. It does not say which status a store answered with, nor `Retry-After`; it cannot send
one part of an upload again, finish an upload on a condition, or list the uploads that dead writers left. These few
requests are made here. The bytes of each are guarded by their MD5, so that a store refuses what came damaged.
"""

from __future__ import annotations

import base64
import hashlib
import re
import ssl
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal
from urllib.parse import quote, urlencode

import urllib3

from surge_dagster.engine.store.credentials import Sign
from surge_dagster.engine.store.http_pool import open_pool
from surge_dagster.engine.store.retries import RequestFailed, is_retryable, retry_after

Dialect = Literal["s3", "gcs"]
Body = bytes | bytearray

_UPLOAD_HEADER = {"s3": "x-amz-meta-surge-upload", "gcs": "x-goog-meta-surge-upload"}
_CODE = re.compile(rb"<Code>([A-Za-z0-9]{1,60})</Code>")


@dataclass(frozen=True, slots=True)
class Version:
    """What stands at a name now.

    Attributes:
        condition: what a conditional request names it by: the etag, or GCS's generation.
        upload: the mark that its writer left on it, None for objects of others.
    """

    size: int
    etag: str
    condition: str
    upload: str | None


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    """A multipart upload that nobody has completed.

    Attributes:
        age_seconds: by the store's own clock; None where the store does not say when it is or when the upload began.
    """

    key: str
    upload_id: str
    age_seconds: float | None


class ConditionFailed(Exception):
    """Something else stands at the name than the request was meant to replace."""


class NoSuchUpload(Exception):
    """The multipart upload is over: completed, or aborted by somebody."""


class XmlClient:
    """Single requests to one bucket; nothing is tried again here.

    Every method raises `RequestFailed` when a request fails.

    Args:
        bucket_url: base of every object's URL, without a slash at the end.
        dialect: how conditions and marks are spelled.
        sign: adds credentials to a request's headers.
    """

    part_retries = True
    conditional_parts: bool

    def __init__(
        self, bucket_url: str, dialect: Dialect, sign: Sign, *, timeout_seconds: float, connect_timeout_seconds: float
    ) -> None:
        self._bucket_url = bucket_url
        self._dialect: Dialect = dialect
        self._sign = sign
        # GCS takes no conditions on the request that completes an upload.
        self.conditional_parts = dialect == "s3"
        self._http = open_pool(
            bucket_url, timeout_seconds=timeout_seconds, connect_timeout_seconds=connect_timeout_seconds
        )

    def head(self, key: str) -> Version | None:
        """What stands at the key, None when nothing does."""
        answer = self._request("HEAD", key, missing_is_an_answer=True)
        if answer.status == 404:
            return None
        etag = answer.headers.get("ETag", "")
        return Version(
            size=int(answer.headers.get("Content-Length", 0)),
            etag=etag,
            condition=etag if self._dialect == "s3" else answer.headers.get("x-goog-generation", ""),
            upload=answer.headers.get(_UPLOAD_HEADER[self._dialect]),
        )

    def put(self, key: str, body: Body, replacing: Version | None, mark: str) -> str:
        """Store a whole object in the place of `replacing`, or where nothing stands; gives its etag.

        Raises:
            ConditionFailed: something else stands there.
        """
        headers = {**self._condition(replacing), _UPLOAD_HEADER[self._dialect]: mark}
        try:
            return self._request("PUT", key, body=body, headers=headers).headers.get("ETag", "")
        except RequestFailed as failed:
            # S3 answers 404 where the object to be replaced has gone; a bucket that is not there is another matter.
            if failed.status == 412 or (failed.status == 404 and replacing is not None):
                raise ConditionFailed from None
            raise

    def begin(self, key: str, mark: str) -> str:
        """Begin a multipart upload; gives its id."""
        answer = self._request("POST", key, {"uploads": ""}, headers={_UPLOAD_HEADER[self._dialect]: mark})
        return _text(_parse(answer.data), "UploadId")

    def put_part(self, key: str, upload_id: str, number: int, body: Body) -> str:
        """Store a part, numbered from 1; gives its etag. Sending it again replaces it."""
        query = {"partNumber": str(number), "uploadId": upload_id}
        return self._request("PUT", key, query, body=body).headers.get("ETag", "")

    def complete(self, key: str, upload_id: str, parts: list[str], replacing: Version | None) -> None:
        """Make the parts one object.

        Raises:
            ConditionFailed: something else stands there than `replacing`, where the store looks.
            NoSuchUpload: it is over already.
        """
        listed = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag></Part>"
            for number, etag in enumerate(parts, start=1)
        )
        body = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
        headers = self._condition(replacing) if self.conditional_parts else {}
        try:
            answer = self._request("POST", key, {"uploadId": upload_id}, body=body, headers=headers)
        except RequestFailed as failed:
            if failed.status == 412:
                raise ConditionFailed from None
            if failed.status == 404:
                raise NoSuchUpload from None
            raise
        code = _CODE.search(answer.data)  # S3 may begin to answer 200 before it knows
        if code and b"<Error>" in answer.data:
            raise RequestFailed(code[1].decode(), "the upload could not be completed", retryable=True)

    def abort(self, key: str, upload_id: str) -> None:
        """Throw an unfinished upload away; harmless when it is over."""
        self._request("DELETE", key, {"uploadId": upload_id}, missing_is_an_answer=True)

    def unfinished(self, prefix: str) -> Iterator[UnfinishedUpload]:
        """The bucket's unfinished uploads whose keys begin with `prefix`."""
        query = {"uploads": "", "prefix": prefix}
        while True:
            answer = self._request("GET", "", query)
            root = _parse(answer.data)
            now = _moment(parsedate_to_datetime, answer.headers.get("Date", ""))
            for upload in root.iter("Upload"):
                key, upload_id = _text(upload, "Key"), _text(upload, "UploadId")
                began = _moment(datetime.fromisoformat, _text(upload, "Initiated"))
                if key.startswith(prefix) and upload_id:  # not every store looks at the prefix it was given
                    age_seconds = None if now is None or began is None else now - began
                    yield UnfinishedUpload(key, upload_id, age_seconds)
            after = {"key-marker": _text(root, "NextKeyMarker"), "upload-id-marker": _text(root, "NextUploadIdMarker")}
            if _text(root, "IsTruncated") != "true" or after.items() <= query.items() or not any(after.values()):
                return
            query |= after

    def _condition(self, replacing: Version | None) -> dict[str, str]:
        if self._dialect == "gcs":
            return {"x-goog-if-generation-match": replacing.condition if replacing else "0"}
        return {"If-Match": replacing.condition} if replacing else {"If-None-Match": "*"}

    def _request(
        self,
        method: str,
        key: str,
        query: Mapping[str, str] | None = None,
        *,
        body: Body = b"",
        headers: Mapping[str, str] | None = None,
        missing_is_an_answer: bool = False,
    ) -> urllib3.BaseHTTPResponse:
        url = f"{self._bucket_url}/{quote(key, safe='/~')}"
        if query:
            url += "?" + urlencode(query, quote_via=quote)
        given = dict(headers or {})
        if body:
            digest = hashlib.md5(body, usedforsecurity=False).digest()
            given |= {"Content-MD5": base64.b64encode(digest).decode(), "Content-Type": "application/octet-stream"}
        signed = self._sign(method, url, given, body)
        signed["Content-Length"] = str(len(body))
        try:
            content: Any = body  # a bytearray is sent as it is, though the types do not say so
            answer = self._http.request(method, url, body=content, headers=signed, redirect=False)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise _unanswered(error) from None
        if answer.status < 300 or (answer.status == 404 and missing_is_an_answer):
            return answer
        found = _CODE.search(answer.data[:2000])
        code = found[1].decode() if found else ""
        raise RequestFailed(
            str(answer.status),
            code or answer.reason or "",
            retryable=is_retryable(answer.status, code),
            status=answer.status,
            retry_after_seconds=retry_after(answer.headers.get("Retry-After")),
        )


def _unanswered(error: Exception) -> RequestFailed:
    parts = (error, *error.args)  # what happened to a socket lies within what urllib3 makes of it
    if any(isinstance(part, ssl.SSLCertVerificationError) for part in parts):
        return RequestFailed("certificate", "it could not be verified", retryable=False)
    if isinstance(error, urllib3.exceptions.SSLError):
        return RequestFailed("tls", "no secure connection could be made", retryable=True)
    if any(isinstance(part, urllib3.exceptions.NewConnectionError) for part in parts):  # to it, or to a proxy
        return RequestFailed("refused", "no connection could be made", retryable=True)
    if any(isinstance(part, urllib3.exceptions.TimeoutError | TimeoutError) for part in parts):
        return RequestFailed("timeout", "no answer in time", retryable=True)
    return RequestFailed("reset", "the connection was lost", retryable=True)


def _parse(document: bytes) -> ElementTree.Element:
    """An answer's elements without their namespace, which S3 and GCS spell differently."""
    try:
        root = ElementTree.fromstring(document)
    except ElementTree.ParseError:
        raise RequestFailed("malformed", "the answer is not XML", retryable=True) from None
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root


def _moment(parse: Callable[[str], datetime], value: str) -> float | None:
    """Seconds since 1970, None where a store's time is missing, malformed or of no time zone."""
    try:
        moment = parse(value)
    except (ValueError, TypeError):
        return None
    return moment.timestamp() if moment.tzinfo else None


def _text(element: ElementTree.Element, tag: str) -> str:
    return element.findtext(tag) or ""
