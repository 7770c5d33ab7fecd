"""Files of queries: what is read, and what is refused with its line and a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from surge_dagster.engine.compare.queries import Label, read_queries
from surge_dagster.engine.errors import ConfigError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "queries.csv"


def test_lines_of_one_query_are_its_relevant_rows(path: Path) -> None:
    path.write_text('partition,query,id\na,"one, two",1\nb,three,7\nb,"one, two",2\n')

    one, three = read_queries(path)

    assert one.text == "one, two"
    assert one.labels == {Label("a", "1"): 2, Label("b", "2"): 4}
    assert three.labels == {Label("b", "7"): 3}


def test_partition_is_optional(path: Path) -> None:
    path.write_text("query,id\none,1\n")

    [one] = read_queries(path)

    assert one.labels == {Label(None, "1"): 2}


def test_queries_without_labels_are_read(path: Path) -> None:
    path.write_bytes(b"\xef\xbb\xbfquery\r\none\r\n\r\ntwo\r\none\r\n")

    assert [query.text for query in read_queries(path)] == ["one", "two"]


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        ("", 1, "the columns are missing"),
        ("query,doc\none,1\n", 1, "the columns are query, doc"),
        ("query,partition\none,a\n", 1, "the columns are query, partition"),
        ("query,id\n", 1, "there are no queries"),
        ("query,id\none,1\ntwo\n", 3, "id is empty"),
        ("query,id\none,1\ntwo, three,2\n", 3, "it has more than 2 values"),
        ("query,id\none,1\n ,1\n", 3, "query is empty"),
        ("query,id\none,1\ntwo,\n", 3, "id is empty"),
        ('query,id\none,1\n"two,1\n', 3, "unexpected end of data"),
    ],
)
def test_bad_file_is_refused_with_its_line(
    path: Path, content: str, line: int, reason: str
) -> None:
    path.write_text(content)

    with pytest.raises(ConfigError) as refused:
        read_queries(path)

    message = str(refused.value)
    assert f"{str(path)!r}, line {line}: {reason}. " in message
    assert message.endswith(("query,partition,id.", "remove the line.", "into quotes."))


def test_file_in_another_encoding_is_refused(path: Path) -> None:
    path.write_bytes("query\nGröße\n".encode("latin-1"))

    with pytest.raises(ConfigError, match=r"cannot be read.*Give it as CSV in UTF-8"):
        read_queries(path)
