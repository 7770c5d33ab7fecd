"""A run's question to Dagster's database whose answer is lost with its link."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy

from tests.cluster.hosts import hosts
from tests.cluster.servers import Database, socket_folder
from tests.extras import require
from tests.service.lanes import until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]

# The database forgets the connection while the link is down, and then has an answer for nobody.
ASK = """
import sys, sqlalchemy
with sqlalchemy.create_engine(sys.argv[1]).connect() as connection:
    connection.execute(sqlalchemy.text("SELECT pg_sleep(5)"))
"""
ASKED = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%pg_sleep(5)' AND state = 'active'"


def test_question_whose_answer_was_lost_ends_with_an_error(tmp_path: Path) -> None:
    require("postgres", "psycopg2", "dagster_postgres")
    with socket_folder() as sockets, hosts(2, tmp_path, sockets) as (asking, base):
        base.run("sysctl", "-qw", "net.ipv4.tcp_orphan_retries=1")
        database = Database(base, sockets)
        database.start()
        engine = sqlalchemy.create_engine(database.url_of_test, poolclass=sqlalchemy.NullPool)

        def is_asked() -> bool:
            with engine.connect() as connection:
                return bool(connection.execute(sqlalchemy.text(ASKED)).scalar_one())

        with asking.popen(
            sys.executable, "-c", ASK, database.url, stderr=subprocess.PIPE
        ) as question:
            # all came
            until(
                lambda: (
                    is_asked()
                    and re.search(r"ESTAB +0 +0 ", asking.run("ss", "--tcp", "--numeric"))
                )
            )
            asking.cut()
            until(lambda: not is_asked())
            database.restart()
            until(lambda: asking.address not in base.run("ss", "--tcp", "--all", "--numeric"))
            asking.mend()
            _, said = question.communicate(timeout=120)
        assert question.returncode == 1 and "OperationalError" in said
