"""What encoding costs: c_ipc and c_enc of a pool, fitted to encode calls that were timed.

    seconds of a call = c_ipc + c_length·min(texts, 32) + texts·(c_text + c_token·tokens of a text) / G + c_unread·bytes

Most of the first texts of a call have a length of their own and so a forward pass of their own,
which later texts of that length share. Without the second term calls of a few texts make large ones
look a third too slow. The last one is for bytes of long texts behind the tokens that the model
reads: without it such texts make a token look dear.

A start times a few calls of growing size; runs add their SuperBatches. A call weighs 1/fitted
seconds, because long times vary by more: the fitted seconds of all calls together are then the
measured ones, and a long run outweighs a short measurement. The speed of a machine changes, so
calls of runs weigh less with each minute of encoding after them.

B_min does not come from this fit but from the median texts per second of the newest SuperBatches
(`derived_b_min`), so that no single record can make it run away.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import median

import numpy as np

from surge_dagster.engine.encoder.calibration import Calibration

# A SuperBatch that takes this long hides its fixed costs, shows progress, and is little to lose.
_B_MIN_SECONDS = 5.0
LEAST_B_MIN = 1_000
MOST_B_MIN = 100_000
_MOST_B_MIN_CHANGE = 2
_NEWEST_CALLS = 9
RAMP = 16  # the first SuperBatch of a run is a sixteenth of B_min
_LENGTHS = 32  # texts of a call until a new one mostly has the length of an earlier one
_HALF_LIFE_SECONDS = 60.0  # of encoding, after which a call of a run weighs half
_READ_BYTES = 16  # at most, of a token: what a text has beyond them is not read
_EQUAL = 1e-9
_REFITS, _LEAST_OBSERVED_SECONDS, _MOST_TIMES_FITTED, _STALLED = 3, 1e-6, 10.0, 5.0
_NORMAL_95 = 1.96
_LEAST_SECONDS = 1e-9  # of a text, so that speeds are finite
_SIZES = tuple(4**power for power in range(10))  # to 262,144
_MOST_WORDS, _MOST_WORDS_OF_GPU = 170_000, 2_700_000  # of a timed call
_LONG_ENOUGH_SECONDS, _TOO_LONG_SECONDS = 0.1, 1.0
_TEXT = (
    "steel bottle cotton shirt lamp oak table garden hose travel mug wool scarf desk chair ceramic bowl running shoe "
    "phone case glass jar bath towel ink pen leather belt camping stove rain jacket bread knife"
)
# Words of a product title, and of a paragraph, with a number of texts that tells a call from its
# lengths and its texts.
_SHORT, _LONG = (6, 10, 2 * _LENGTHS), (60, 100, 2)


@dataclass(frozen=True, slots=True)
class Call:
    """An encode call that was timed; `text_bytes` counts the `equal_texts` too, which got another
    one's vector."""

    texts: float
    text_bytes: float
    tokens: float
    seconds: float
    equal_texts: float = 0.0


@dataclass(frozen=True, slots=True)
class Fit:
    """Seconds per unit of each column; `covariance` is None where there is too little to tell."""

    values: np.ndarray
    covariance: np.ndarray | None = None

    def seconds(self, amounts: np.ndarray) -> np.ndarray:
        return amounts @ self.values

    def margin(self, amounts: np.ndarray) -> float | None:
        """Half of the 95 % confidence interval of the seconds of these amounts, as every margin
        here."""
        if self.covariance is None:
            return None
        return _NORMAL_95 * float(np.sqrt(max(0.0, amounts @ self.covariance @ amounts)))


def fit_costs(amounts: np.ndarray, seconds: np.ndarray, weights: np.ndarray | float = 1.0) -> Fit:
    """The costs per unit that explain the seconds best, each at least 0; of equal fits the one with
    fewest costs.

    `amounts` are [observations, columns]; `weights` multiply that of 1/seconds. It is 1/fitted
    seconds that count: with those that were measured, one that took too little would outweigh
    another that took as much too much. One that was stalled counts as no more than five times as
    long as usual.
    """
    measured = np.maximum(seconds, _LEAST_OBSERVED_SECONDS)
    fit = _fit(amounts, seconds, np.sqrt(weights / measured))
    if (is_fitted := (fitted := fit.seconds(amounts)) > 0).any():
        usual = np.median(seconds[is_fitted] / fitted[is_fitted])
        seconds = np.where(is_fitted, np.minimum(seconds, _STALLED * usual * fitted), seconds)
    for _ in range(_REFITS):
        fit = _fit(
            amounts,
            seconds,
            np.sqrt(weights / np.maximum(fit.seconds(amounts), measured / _MOST_TIMES_FITTED)),
        )
    return fit


def _fit(amounts: np.ndarray, seconds: np.ndarray, weights: np.ndarray) -> Fit:
    rows, columns = amounts.shape
    best, values, covariance = np.inf, np.zeros(columns), None
    weighted, target = amounts * weights[:, None], seconds * weights
    for count in range(1, min(rows, columns) + 1):
        for chosen in map(list, itertools.combinations(range(columns), count)):
            fitted, _, rank, _ = np.linalg.lstsq(weighted[:, chosen], target)
            error = float(np.sum((weighted[:, chosen] @ fitted - target) ** 2))
            if (
                rank < count
                or (fitted < 0).any()
                or error >= best - _EQUAL * float(target @ target)
            ):
                continue
            best, values = error, np.zeros(columns)
            values[chosen] = fitted
            covariance = None
            if rows > count:
                square = weighted[:, chosen].T @ weighted[:, chosen]
                covariance = np.zeros((columns, columns))
                covariance[np.ix_(chosen, chosen)] = error / (rows - count) * np.linalg.inv(square)
    return Fit(values, covariance)


@dataclass(frozen=True, slots=True)
class EncodeCosts:
    """The costs of encode calls of one pool.

    Attributes:
        fit: seconds of a call, of one of its first texts, of a text, of a token and of an unread
            byte, on all workers together.
        tokens_per_byte: encoded tokens; the bytes are those of equal texts too.
        equal_share: of the texts that needed a vector, those that got it from an equal one.
        b_min: texts of a SuperBatch, where no setting gives them (`derived_b_min`).
        is_learned: whether calls of runs are among those that the costs are fitted to.
    """

    fit: Fit
    workers: int = 1
    tokens_per_byte: float = 0.25
    tokens_per_text: float = 12.0
    equal_share: float = 0.0
    b_min: int = LEAST_B_MIN
    is_learned: bool = False

    @classmethod
    def of(
        cls,
        measured: Sequence[Call],
        of_runs: Sequence[Call],
        workers: int,
        previous_b_min: int | None = None,
    ) -> EncodeCosts:
        """Fit the costs to the calls of a start and those of runs, oldest first; at least one call
        is needed.

        Args:
            previous_b_min: of the run before; None if there was none.
        """
        texts, size, tokens, seconds, equal = (
            np.array([astuple(each) for each in (*measured, *of_runs)]).reshape(-1, 5).T
        )
        weights = np.ones(len(seconds))
        since = np.cumsum(seconds[len(measured) :][::-1])[::-1] - seconds[len(measured) :]
        weights[len(measured) :] = 0.5 ** (since / _HALF_LIFE_SECONDS)
        text_bytes = size * texts / np.maximum(texts + equal, 1)
        fitted = cls(fit_costs(_amounts(texts, tokens, text_bytes), seconds, weights), workers)
        costs = fitted.of_texts(of_runs or measured)
        rate = newest_rate(of_runs, previous_b_min) or costs.texts_per_second
        return replace(costs, b_min=derived_b_min(rate, previous_b_min), is_learned=bool(of_runs))

    def of_texts(self, known: Sequence[Call]) -> EncodeCosts:
        """The same costs, for texts that are as long and as often equal as those of these calls."""
        texts, tokens = sum(call.texts for call in known), sum(call.tokens for call in known)
        return replace(
            self,
            tokens_per_byte=tokens / max(1.0, sum(call.text_bytes for call in known)),
            tokens_per_text=tokens / max(1, texts),
            equal_share=1 - texts / max(1, texts + sum(call.equal_texts for call in known))
            if texts
            else 0.0,
        )

    @classmethod
    def given(cls, call_seconds: float, text_seconds: float, workers: int) -> EncodeCosts:
        """Costs of the command line: c_ipc, and c_enc of one text on one worker whatever its
        length."""
        fit = Fit(np.array([call_seconds, 0.0, text_seconds / workers, 0.0, 0.0]))
        return cls(fit, workers, b_min=derived_b_min(workers / text_seconds))

    @property
    def call_seconds(self) -> float:
        """c_ipc."""
        return float(self.fit.values[0])

    @property
    def call_margin(self) -> float | None:
        return self.fit.margin(_OF_CALL)

    @property
    def superbatch_seconds(self) -> float:
        """What a call of many texts takes beside their c_enc: c_ipc, and passes that few texts
        share."""
        return float(self.fit.values @ _OF_SUPERBATCH)

    @property
    def tokens_per_single_byte(self) -> float:
        """Tokens per byte of texts of which none equals another."""
        return self.tokens_per_byte / (1 - self.equal_share)

    def break_even_texts(self, tokens: float) -> float:
        """n*: a partition of fewer texts, of so many tokens, spends more on its call than on its
        texts."""
        of_text = self.text_seconds(tokens) / self.workers
        found = self.superbatch_seconds / of_text
        return (
            found
            if found >= _LENGTHS
            else self.call_seconds / (of_text - float(self.fit.values[1]))
        )

    def seconds(
        self, texts: np.ndarray, tokens: np.ndarray, text_bytes: np.ndarray | float = 0.0
    ) -> np.ndarray:
        return self.fit.seconds(_amounts(texts, tokens, text_bytes))

    def margin(
        self, texts: np.ndarray, tokens: np.ndarray, text_bytes: np.ndarray | float = 0.0
    ) -> float | None:
        """Half of the 95 % confidence interval of the seconds of all these calls together."""
        return self.fit.margin(_amounts(texts, tokens, text_bytes).sum(axis=0))

    def text_seconds(self, tokens: float | None = None) -> float:
        """c_enc of a text of so many tokens, on one worker; None is the mean length."""
        return max(_LEAST_SECONDS, float(self._of_text(tokens) @ self.fit.values))

    def text_margin(self, tokens: float | None = None) -> float | None:
        return self.fit.margin(self._of_text(tokens))

    @property
    def texts_per_second(self) -> float:
        return self.workers / self.text_seconds()

    def _of_text(self, tokens: float | None) -> np.ndarray:
        return self.workers * np.array(
            [0.0, 0.0, 1.0, self.tokens_per_text if tokens is None else tokens, 0.0]
        )


def derived_b_min(texts_per_second: float, previous: int | None = None) -> int:
    """Return B_min: the texts of five seconds, 1,000 to 100,000, and at most twice or half of the
    previous run's."""
    wanted = _B_MIN_SECONDS * texts_per_second
    if previous is not None:
        wanted = min(wanted, _MOST_B_MIN_CHANGE * previous)
        wanted = max(wanted, previous / _MOST_B_MIN_CHANGE)
    return round(min(max(wanted, LEAST_B_MIN), MOST_B_MIN))


def newest_rate(of_runs: Sequence[Call], b_min: int | None) -> float | None:
    """Return the median texts per second of the newest SuperBatches; None if there are none.

    Those smaller than the first one of a run with this B_min are left out: their time is that of a
    call.
    """
    least_texts = 1 if b_min is None else b_min // RAMP
    newest = [call for call in of_runs if call.texts >= least_texts and call.seconds > 0][
        -_NEWEST_CALLS:
    ]
    if not newest:
        return None
    return median(call.texts / call.seconds for call in newest)


def _amounts(texts: np.ndarray, tokens: np.ndarray, text_bytes: np.ndarray | float) -> np.ndarray:
    """[calls, 5]."""
    unread = np.maximum(text_bytes - _READ_BYTES * tokens, 0.0)
    return np.column_stack([texts > 0, np.minimum(texts, _LENGTHS), texts, tokens, unread]).astype(
        float
    )


_OF_CALL, _OF_SUPERBATCH = np.array([1.0, 0, 0, 0, 0]), np.array([1.0, _LENGTHS, 0, 0, 0])


def time_calls(
    encode: Callable[[list[str]], tuple[float, float]], most_words: int = _MOST_WORDS
) -> list[Call]:
    """Time calls with growing numbers of short texts, then of long ones; of each size the faster of
    two.

    All sizes are timed before the first one is timed again, so that a moment in which the machine
    is busy does not make small calls look slow. `encode` gives the tokens and the seconds of a
    call.
    """
    calls: dict[tuple[int, int], Call] = {}
    for is_first in (True, False):
        for least, most, enough in (_SHORT, _LONG):
            if is_first:
                encode(speed_texts(1, least, most))  # warms up
            for size in _SIZES:
                if size * most > most_words:
                    break
                texts = speed_texts(size, least, most)
                tokens, seconds = encode(texts)
                call, known = (
                    Call(size, sum(map(len, texts)), tokens, seconds),
                    calls.get((most, size)),
                )
                faster = calls[most, size] = (
                    call if known is None or seconds < known.seconds else known
                )
                if (
                    faster.seconds > (_LONG_ENOUGH_SECONDS if size >= enough else _TOO_LONG_SECONDS)
                    and size > 1
                ):
                    break
    return list(calls.values())


def speed_texts(count: int, least_words: int, most_words: int) -> list[str]:
    """Texts of so many words, in an order that depends on the row."""
    words, texts = _TEXT.split(), []
    for row in range(count):
        step, size = 1 + row % 31, least_words + row % (most_words - least_words + 1)
        texts.append(" ".join(words[(row + step * place) % len(words)] for place in range(size)))
    return texts


def timed_calls(
    calibration: Calibration,
    devices: str,
    encode: Callable[[list[str]], tuple[float, float]],
    *,
    anew: bool = False,
) -> tuple[list[Call], list[Call]]:
    """The calls timed with these devices, measured now if there are none, and those of runs.

    `anew` measures now, and forgets both, with the waits of workers in runs and B_min.
    """
    measured = [] if anew else known_calls(calibration, f"calls {devices}")
    if not measured:
        measured = time_calls(encode, _MOST_WORDS_OF_GPU if "cuda" in devices else _MOST_WORDS)
        calibration.observe(f"calls {devices}", map(astuple, measured), anew=anew)
        if anew:
            calibration.write(
                **{f"runs {devices}": [], f"waits {devices}": [], f"b_min {devices}": None}
            )
        # as the next start reads them
        measured = known_calls(calibration, f"calls {devices}") or measured
    return measured, known_calls(calibration, f"runs {devices}")


def known_calls(calibration: Calibration, name: str) -> list[Call]:
    """Return the calls kept under a name; those with a number that is none are left out."""
    return [Call(*row) for row in calibration.observations(name) if np.isfinite(row).all()]
