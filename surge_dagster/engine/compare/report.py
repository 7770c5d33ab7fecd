"""What a comparison of two spaces found, and what that rests on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.support.counts import counted

# Five queries that all gain are no evidence: that happens by chance once in sixteen times.
_FEWEST_QUERIES = 6
# Of all labels; a file with more of them is of another catalog, or has ids in another form.
_MOST_UNKNOWN = 0.1


@dataclass(frozen=True, slots=True)
class Metric:
    """A mean over the queries, of each space; `low` to `high` is the 95% interval of the
    difference."""

    name: str
    first: float
    second: float
    low: float
    high: float

    @property
    def difference(self) -> float:
        return self.second - self.first

    def cells(self) -> list[str]:
        interval = f"{self.low:+.3f} to {self.high:+.3f}"
        values = [f"{self.first:.3f}", f"{self.second:.3f}", f"{self.difference:+.3f}"]
        return [self.name, *values, interval]


@dataclass(frozen=True, slots=True)
class JudgedQuery:
    """The nDCG@10 of a query in each space."""

    text: str
    first: float
    second: float

    @property
    def difference(self) -> float:
        return self.second - self.first

    def cells(self) -> list[str]:
        return [self.text, *(f"{value:.3f}" for value in (self.first, self.second))]


@dataclass(frozen=True, slots=True)
class Judged:
    """What labels tell about two spaces.

    Attributes:
        queries: those with a label that names a row of both spaces; the others do not count.
        rows: labelled rows, one pool for both spaces.
        labels: rows that the file names.
        labels_unknown: labels that name no row of both spaces.
        first_unknown: the line of the first of them, and its id.
        share_first, share_second: of the ten nearest rows, those with a label.
        metrics: recall, reciprocal rank, and nDCG as the last one.
        gained, lost: the queries that differ most.
    """

    queries: int
    rows: int
    labels: int
    labels_unknown: int
    first_unknown: str | None
    share_first: float
    share_second: float
    metrics: tuple[Metric, ...]
    gained: tuple[JudgedQuery, ...]
    lost: tuple[JudgedQuery, ...]

    @property
    def ndcg(self) -> Metric:
        return self.metrics[-1]

    @property
    def verdict(self) -> str:
        """The result for people, about the second space."""
        is_open = self.ndcg.low <= 0 <= self.ndcg.high
        if is_open or self.queries < _FEWEST_QUERIES:
            return f"no difference can be seen with {counted(self.queries, 'query')}"
        return "better" if self.ndcg.difference > 0 else "worse"

    def basis(self) -> str:
        shares = f"{self.share_first:.1%} and {self.share_second:.1%}"
        line = (
            f"{counted(self.queries, 'query')} with {counted(self.rows, 'judged row')}; "
            f"{shares} of the ten nearest rows are judged, the others count as not relevant"
        )
        if self.labels_unknown:
            unknown = f"{self.labels_unknown:,} of {counted(self.labels, 'label')}"
            line += f"; {unknown} are unknown, such as {self.first_unknown}"
        return line

    def require_evidence(self) -> None:
        """Raise unless the labels can decide about a switch.

        Raises:
            ConfigError: they judge few queries, many of them name no row, or the first space finds
                none of their rows.
        """
        if self.queries < _FEWEST_QUERIES:
            problem = f"expected {_FEWEST_QUERIES} judged queries or more. Add labelled queries"
        elif self.labels_unknown > _MOST_UNKNOWN * self.labels:
            problem = (
                f"expected rows of both spaces for {1 - _MOST_UNKNOWN:.0%} of the labels. Give "
                "ids, and partitions, as the source has them"
            )
        elif self.ndcg.first == 0:
            problem = (
                "the current space finds none of the judged rows, so no ratio can be less. "
                "Correct the labels, or switch without min_ndcg_ratio"
            )
        else:
            return
        raise ConfigError(f"min_ndcg_ratio cannot be judged: {problem}. The file: {self.basis()}.")


@dataclass(frozen=True, slots=True)
class ComparedQuery:
    """A query with the nearest rows of each space, for people."""

    text: str
    overlap_at_10: float
    first: tuple[str, ...]
    second: tuple[str, ...]

    def cells(self) -> list[str]:
        return [self.text, "\n".join(self.first), "\n".join(self.second)]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing two spaces.

    Attributes:
        rows, partitions: that were searched, those with the same rows in both spaces.
        partitions_left_out: only in one space, or with other rows there.
        overlap_at_10: mean share of the ten nearest rows that are the same.
        rank_correlation: mean over the queries, of the rows among the ten nearest in either space.
        differing: the ten queries with the least overlap.
        judged: if there are labels.
    """

    first: str
    second: str
    queries: int
    rows: int
    partitions: int
    partitions_left_out: int
    overlap_at_10: float
    rank_correlation: float
    differing: tuple[ComparedQuery, ...]
    judged: Judged | None

    def shortfall(self, min_ratio: float) -> str:
        """Return why the second space is not to replace the first one; "" if its nDCG@10 reaches
        this ratio of the first one's.

        Raises:
            ConfigError: the queries have no labels, or not enough that can be judged.
        """
        if self.judged is None:
            raise ConfigError(
                "the queries have no labels, and min_ndcg_ratio needs them. Add the column id."
            )
        self.judged.require_evidence()
        ndcg = self.judged.ndcg
        if ndcg.second >= min_ratio * ndcg.first:
            return ""
        return (
            f"nDCG@10 of {self.second} is less than {min_ratio} of the current one; nothing was "
            f"switched. Compare them, or lower min_ndcg_ratio.\n{self.in_words()}"
        )

    def in_words(self) -> str:
        """Return the result for people, and what it rests on, in lines."""
        lines: list[str] = []
        if self.judged is not None:
            _, first, second, difference, interval = self.judged.ndcg.cells()
            lines.append(
                f"{self.second}: {self.judged.verdict}: nDCG@10 {second} against {first} of "
                f"{self.first} ({difference}, 95% interval {interval})"
            )
            lines.append(self.judged.basis())
        lines.append(
            f"{self.overlap_at_10:.3f} of the ten nearest rows are the same, rank correlation "
            f"{self.rank_correlation:.3f}"
        )
        searched = (
            f"{counted(self.queries, 'query')} among {counted(self.rows, 'row')} in "
            f"{counted(self.partitions, 'partition')}"
        )
        if self.partitions_left_out:
            searched += f", without {self.partitions_left_out:,} that the spaces do not share"
        lines.append(searched)
        return "\n".join(lines)

    def tables(self) -> dict[str, list[list[str]]]:
        """Return tables that explain the result, by title, their headers first; a cell may have
        several lines."""
        judged = self.judged
        of_queries = ["query", self.first, self.second]
        if judged is None:
            differing = [query.cells() for query in self.differing]
            return {"The queries that differ most": [of_queries, *differing]}
        header = ["metric", self.first, self.second, "difference", "95% interval"]
        tables = {"Means": [header, *(metric.cells() for metric in judged.metrics)]}
        for change, queries in (("gain", judged.gained), ("lose", judged.lost)):
            if queries:
                cells = [query.cells() for query in queries]
                tables[f"nDCG@10 of the queries that {change} most"] = [of_queries, *cells]
        return tables

    def as_dict(self) -> dict[str, Any]:
        """Return the result as the command prints it in JSON."""
        document = asdict(self)
        if self.judged is not None:
            document["judged"]["verdict"] = self.judged.verdict
        return document
