"""What is special about the table in Postgres."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from surge_dagster.consumers.postgres import PgVectorTable
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.output.spaces import claim_space
from surge_dagster.engine.store import open_store
from tests.consumers.scripts import TEXTS, Follower
from tests.consumers.test_tables_of_runs import follow
from tests.consumers.test_targets import load
from tests.engine.feeds import Output


@pytest.fixture
def follower(tmp_path: Path, new_database: Callable[[], str]) -> Follower:
    return Follower(Output(tmp_path / "out"), PgVectorTable(new_database(), "products"))


def test_zero_byte_is_refused_by_name_and_stops_no_other(follower: Follower) -> None:
    follower.output.write("a", {**TEXTS, "last": "zero \0 byte"})
    follower.output.write("b", TEXTS)
    done = follower.hand_over()
    assert "partition 'a'" in str(done.failures["a"])
    assert "row 'last' has a zero byte" in str(done.failures["a"])
    assert follower.target.counts() == {"b": 10}
    follower.output.write("a", TEXTS)
    follower.output.write("b", {**TEXTS, "id-9": "zero \0 byte", "new": "new"})
    done = follower.hand_over()
    assert list(done.failures) == ["b"]
    assert follower.target.counts() == {"a": 10, "b": 10}


def test_percent_in_a_name_is_not_taken_for_a_parameter(
    hash_pool: EncoderPool, tmp_path: Path, new_database: Callable[[], str]
) -> None:
    import psycopg

    dsn = new_database()
    embed = partial(
        follow, hash_pool, open_store(tmp_path / "out"), PgVectorTable(dsn, "the %s, 50%")
    )
    rows = pa.table({"id": ["1", "2"], "text": ["one", "two"], "50% off": ["a", "b"]})

    embed(rows, "50% off")
    embed(rows.slice(1), "50% off")

    with psycopg.connect(dsn) as connection:
        stored = connection.execute('SELECT id, "50% off" FROM "the %s, 50%"').fetchall()
    assert stored == [("2", "b")]


def test_versions_are_those_of_the_table_when_the_confirmation_was_lost(follower: Follower) -> None:
    load(follower, "a")
    for path in follower.output.store.root.glob(".changes/*/consumers/*"):
        path.unlink()
    assert follower.hand_over().rows_sent == 0
    follower.assert_equal()


def test_index_is_built_with_the_first_rows_and_for_another_distance(
    follower: Follower,
) -> None:
    load(follower, "a")
    first = index_of(follower)
    assert "USING hnsw (embedding vector_cosine_ops)" in first[0]
    follower.output.write("a", {"1": "one"})
    follower.hand_over()
    assert index_of(follower) == first
    other = PgVectorTable(follower.target._dsn, "products", distance="l2")  # pyright: ignore[reportAttributeAccessIssue]
    Follower(follower.output, other).hand_over()
    assert "USING hnsw (embedding vector_l2_ops)" in index_of(follower)[0]
    follower.assert_equal()


def test_index_is_dropped_if_the_settings_name_none(follower: Follower) -> None:
    load(follower, "a")
    table = PgVectorTable(dsn_of(follower), "products", index="none")

    replace(follower, target=table).hand_over()

    assert indexes_of(follower) == []


@pytest.mark.parametrize("name", ["products_cosine", "products~l2"])
def test_table_with_a_name_like_that_of_an_index_is_left_alone(
    follower: Follower, name: str
) -> None:
    import psycopg

    with psycopg.connect(dsn_of(follower), autocommit=True) as connection:
        connection.execute(f'CREATE TABLE "{name}" (name text)'.encode())

    load(follower, "a")

    assert "USING hnsw (embedding vector_cosine_ops)" in index_of(follower)[0]
    with psycopg.connect(dsn_of(follower)) as connection:
        connection.execute(f'SELECT name FROM "{name}"'.encode())


def test_index_of_float16_vectors_is_for_halfvec(follower: Follower) -> None:
    halves = Follower(Output(follower.output.store.root / "half", "float16"), follower.target)

    load(halves, "a")

    assert "USING hnsw (embedding halfvec_cosine_ops)" in index_of(halves)[0]


@pytest.mark.parametrize(
    ("dtype", "dimension", "limit"),
    [("float32", 2001, "2,000 dimensions of float32"), ("float16", 4001, "4,000 dimensions of")],
)
def test_space_with_more_dimensions_than_the_index_takes_is_refused(
    follower: Follower, dtype: str, dimension: int, limit: str
) -> None:
    spec = EncodingSpec(f"hash://{dimension}", dtype=dtype)
    follower.output.space = claim_space(follower.output.store, spec.resolve())
    large = replace(follower, space=follower.output.space.name)

    with pytest.raises(ConfigError, match=rf"at most {limit}.*Set index to none"):
        large.hand_over()


def test_space_of_another_dtype_leaves_the_table_as_it_is(follower: Follower) -> None:
    load(follower, "a")
    spec = EncodingSpec("hash://8", dtype="float16")
    half = claim_space(follower.output.store, spec.resolve())

    with pytest.raises(ConfigError, match=r"are of type vector, and those of the space .* float16"):
        replace(follower, space=half.name).hand_over()

    follower.assert_equal()


def dsn_of(follower: Follower) -> str:
    assert isinstance(follower.target, PgVectorTable)
    return follower.target._dsn


def index_of(follower: Follower) -> tuple[str, int]:
    """The definition of the index of the vectors, and its number."""
    [index] = indexes_of(follower)
    return index


def indexes_of(follower: Follower) -> list[tuple[str, int]]:
    import psycopg

    with psycopg.connect(dsn_of(follower)) as connection:
        return connection.execute(
            "SELECT pg_get_indexdef(indexrelid), indexrelid FROM pg_index "
            "WHERE indrelid = 'products'::regclass AND NOT indisunique"
        ).fetchall()


def test_server_that_does_not_answer_can_be_tried_again(follower: Follower) -> None:
    nobody = Follower(
        follower.output, PgVectorTable("postgresql://127.0.0.1:1/db?password=hunter2")
    )
    with pytest.raises(TransientError, match="does not answer") as error:
        nobody.hand_over()
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("dsn", ["postgres//a:hunter2@b/c", "postgresql://a:hunter2@[::1/c"])
def test_dsn_that_libpq_does_not_take_is_not_shown(follower: Follower, dsn: str) -> None:
    with pytest.raises(
        ConfigError, match="the dsn of pgvector is not one that libpq takes"
    ) as error:
        Follower(follower.output, PgVectorTable(dsn)).hand_over()
    assert "hunter2" not in "".join(traceback.format_exception(error.value)).replace(repr(dsn), "")


@pytest.mark.parametrize("password", ["hun@ter2", "p@:ter2", "p@s3c/ter2", "p@127.0.0.1:ter2"])
def test_end_of_a_password_with_an_at_sign_is_not_shown(follower: Follower, password: str) -> None:
    with pytest.raises(ConfigError, match="Write %40 for it") as error:
        Follower(
            follower.output, PgVectorTable(f"postgresql://a:{password}@127.0.0.1:1/c")
        ).hand_over()
    assert "ter2" not in str(error.value)
