"""How fast a pool encodes: the record that B_min, plans, the slow-call check and the service read.

    seconds of a call = call_seconds + texts · text_seconds + tokens · token_seconds

A first start times three calls: a few short texts, many short texts, and long texts. They give the
three costs, for all workers together. Runs add the calls of their SuperBatches. The newest nine
give the pace: how many times longer they took. Nine calls are enough to follow a machine that
changes its speed, and medians ignore a single call that was stalled.

SuperBatches below a sixteenth of the largest one do not count, unless they are large themselves.
Their time is that of a call, and a night with few changes must not change the speed of large runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import median

import numpy as np

from surge_dagster.engine.encoder.calibration import Calibration
from surge_dagster.engine.support.fitting import fit_costs, pace

LEAST_B_MIN = 1_000
MOST_B_MIN = 100_000
RAMP = 16  # the first SuperBatch of a run is a sixteenth of B_min
# A SuperBatch that takes this long hides its fixed costs, shows progress, and is little to lose.
_B_MIN_SECONDS = 5.0
_NEWEST_CALLS = 9
_MEDIANS_95 = 1.96 * 1.4826  # of normal values; 1.4826 medians are a standard deviation
_LEAST_TEXT_SECONDS = 1e-9  # so that speeds are finite
_LEAST_CALL_SECONDS = 1e-6
# Of a catalog's texts, for the first B_min. The start's short texts have a third of it, and a first
# SuperBatch for them would keep the first file waiting.
_FIRST_TEXT_TOKENS = 32

# The start's calls: least and most words of a text, and texts of the first call.
_SHORT = (6, 10)
_FEW_SHORT = 20
_LONG = (60, 100)
_FEW_LONG = 2
_MOST_WORDS = 170_000  # of a call
_MOST_WORDS_OF_GPU = 2_700_000
_LONG_ENOUGH_SECONDS = 0.2
_TOO_LONG_SECONDS = 1.0
_ROUNDS = 2
_WORDS = ["steel", "bottle", "cotton", "shirt", "lamp", "garden", "hose", "scarf", "mug"]

EncodeTexts = Callable[[list[str]], tuple[float, float]]  # gives the tokens and seconds of a call


@dataclass(frozen=True, slots=True)
class Call:
    """An encode call that was timed.

    Attributes:
        text_bytes: those of `equal_texts` count too.
        seconds: what the call took of the pool.
        equal_texts: texts that got the vector of an equal one.
    """

    texts: float
    text_bytes: float
    tokens: float
    seconds: float
    equal_texts: float = 0.0


@dataclass(frozen=True, slots=True)
class Speed:
    """What encoding costs on all workers of a pool together.

    Attributes:
        call_seconds: c_ipc, and passes that few texts share.
        tokens_per_byte: encoded tokens; the bytes are those of equal texts too.
        equal_share: of the texts that needed a vector, those that got it from an equal one.
        b_min: texts of a SuperBatch if no setting gives them.
        is_learned: whether calls of runs count, and not only those of the start.
        spread: how far calls differ from the expected seconds, as a share of these; 95 % of calls
            are within it, if none is stalled. None if too few calls are known.
    """

    call_seconds: float
    text_seconds: float
    token_seconds: float = 0.0
    workers: int = 1
    tokens_per_byte: float = 0.25
    tokens_per_text: float = 12.0
    equal_share: float = 0.0
    b_min: int = LEAST_B_MIN
    is_learned: bool = False
    spread: float | None = None

    @classmethod
    def given(cls, call_seconds: float, text_seconds: float, workers: int) -> Speed:
        """Return the speed of a text that takes so long on one worker, whatever its length."""
        b_min = derived_b_min(workers / text_seconds)
        return cls(call_seconds, text_seconds / workers, workers=workers, b_min=b_min)

    def seconds(self, texts: float | np.ndarray, tokens: float | np.ndarray) -> np.ndarray:
        """Return the expected seconds of a call, or of each of several; 0 without texts."""
        of_call = self.call_seconds * np.sign(texts)
        return of_call + self.text_seconds * texts + self.token_seconds * tokens

    def of_texts(self, calls: Sequence[Call]) -> Speed:
        """Return the same speed for texts as long, and as often equal, as those of these calls."""
        texts = sum(call.texts for call in calls)
        tokens = sum(call.tokens for call in calls)
        text_bytes = sum(call.text_bytes for call in calls)
        equal_texts = sum(call.equal_texts for call in calls)
        return replace(
            self,
            tokens_per_byte=tokens / max(1.0, text_bytes),
            tokens_per_text=tokens / max(1.0, texts),
            equal_share=equal_texts / max(1.0, texts + equal_texts),
        )

    def worker_seconds(self, tokens: float) -> float:
        """Return c_enc: the seconds of a text of so many tokens on one worker."""
        of_text = self.text_seconds + self.token_seconds * tokens
        return self.workers * max(_LEAST_TEXT_SECONDS, of_text)

    @property
    def texts_per_second(self) -> float:
        return self.workers / self.worker_seconds(self.tokens_per_text)

    @property
    def tokens_per_single_byte(self) -> float:
        """Tokens per byte of texts that differ from each other."""
        return self.tokens_per_byte / (1 - self.equal_share)

    def break_even_texts(self, tokens: float) -> float:
        """Return n*: a partition of fewer texts spends more on its call than on its texts."""
        return self.call_seconds * self.workers / self.worker_seconds(tokens)


def speed_of(
    start: Sequence[Call],
    of_runs: Sequence[Call] = (),
    workers: int = 1,
    texts_at_once: int | None = None,
) -> Speed:
    """Return the speed that follows from the three calls of a start and from those of runs.

    Args:
        of_runs: oldest first.
        texts_at_once: that a server may have at a time; larger calls take several times as long as
            one of the start.
    """
    few, many, long = start
    costs = _costs_of_start(few, many, long)
    if texts_at_once is not None:
        costs[1] = max(costs[1], costs[0] / texts_at_once)
    learned = _counted(of_runs, of_runs, costs)[-_NEWEST_CALLS:]
    counted = learned or [many]
    seconds = np.array([call.seconds for call in counted])
    amounts = np.array([_amounts(call) for call in counted])
    if learned:
        costs *= pace(seconds, amounts @ costs)
        rate = median(call.texts / max(call.seconds, _LEAST_CALL_SECONDS) for call in learned)
    else:
        rate = 1 / float(costs[1] + costs[2] * _FIRST_TEXT_TOKENS)
    differences = np.abs(seconds / (amounts @ costs) - 1).tolist()
    speed = Speed(
        *costs.tolist(),
        workers=workers,
        b_min=derived_b_min(rate),
        is_learned=bool(learned),
        spread=_MEDIANS_95 * median(differences) if len(differences) > 1 else None,
    )
    return speed.of_texts(counted)


def _counted(calls: Sequence[Call], known: Sequence[Call], costs: np.ndarray) -> list[Call]:
    """Return the calls that count next to the known ones.

    Smaller ones count if they have as many texts as the least B_min, and the cost of a call is at
    most a sixteenth of their seconds: all later ones may be as small.
    """
    least_texts = max((call.texts for call in known), default=0.0) / RAMP

    def is_large(call: Call) -> bool:
        is_work = RAMP * costs[0] <= float(costs @ _amounts(call))
        return call.texts >= least_texts or (call.texts >= LEAST_B_MIN and is_work)

    return [call for call in calls if is_large(call)]


def _costs_of_start(few: Call, many: Call, long: Call) -> np.ndarray:
    """Return the seconds of a call, of a text and of a token."""
    calls = [few, many, long]
    amounts = np.array([_amounts(call) for call in calls])
    if many.texts == few.texts:
        amounts[:, 0] = 0  # a model too slow to tell a call from its texts
    costs = fit_costs(amounts, np.array([call.seconds for call in calls]))
    costs[1] = max(costs[1], _LEAST_TEXT_SECONDS)
    return costs


def _amounts(call: Call) -> np.ndarray:
    return np.array([1.0, call.texts, call.tokens])


def derived_b_min(texts_per_second: float) -> int:
    """Return B_min: the texts of five seconds, 1,000 to 100,000."""
    wanted = _B_MIN_SECONDS * texts_per_second
    return round(min(max(wanted, LEAST_B_MIN), MOST_B_MIN))


class SpeedRecord:
    """The timed calls of a pool, kept with its calibration.

    Args:
        devices: of the workers; other devices have another record.
        most_words: of a call of the start; None follows from the devices.
        texts_at_once: see `speed_of`.
    """

    def __init__(
        self,
        calibration: Calibration,
        devices: str,
        workers: int,
        most_words: int | None = None,
        texts_at_once: int | None = None,
    ) -> None:
        self._texts_at_once = texts_at_once
        self._calibration = calibration
        self._workers = workers
        of_devices = _MOST_WORDS_OF_GPU if "cuda" in devices else _MOST_WORDS
        self._most_words = most_words or of_devices
        self._start_name = f"start {devices}"
        self._runs_name = f"runs {devices}"
        self._start = self._kept(self._start_name)

    def measure(self, encode: EncodeTexts, *, anew: bool = False) -> Speed:
        """Time the start's calls if none are kept, or `anew`, which forgets those of runs too."""
        if anew or not self._start:
            self._start = time_start(encode, self._most_words)
            start = [astuple(call) for call in self._start]
            self._calibration.write(**{self._start_name: start, self._runs_name: []})
        return self.read()

    def learn(self, calls: Sequence[Call]) -> Speed:
        """Keep the calls of a run, without small ones: many nights with few changes must not push
        out the large ones."""
        known = [*self._kept(self._runs_name), *calls]
        large = _counted(calls, known, _costs_of_start(*self._start))
        self._calibration.observe(self._runs_name, map(astuple, large))
        return self.read()

    def read(self) -> Speed:
        of_runs = self._kept(self._runs_name)
        return speed_of(self._start, of_runs, self._workers, self._texts_at_once)

    def _kept(self, name: str) -> list[Call]:
        return [Call(*row) for row in self._calibration.observations(name)]


def time_start(encode: EncodeTexts, most_words: int = _MOST_WORDS) -> list[Call]:
    """Time the three calls of a start; a slow model is timed with fewer texts."""
    encode(speed_texts(1, *_SHORT))  # libraries set themselves up in their first pass
    calls = [_timed(encode, _FEW_SHORT, _SHORT) for _ in range(2)]
    few = min(calls, key=lambda call: call.seconds)
    many = _longer_call(encode, _FEW_SHORT, _SHORT, most_words)
    long = _longer_call(encode, _FEW_LONG, _LONG, most_words)
    for _ in range(_ROUNDS):  # in turns, because another program may slow one of them down
        many = _faster(encode, many, _SHORT)
        long = _faster(encode, long, _LONG)
    return [few, many, long]


def _longer_call(encode: EncodeTexts, texts: int, words: tuple[int, int], most_words: int) -> Call:
    """Return a call with so many times four times the texts that it takes long enough."""
    call = _timed(encode, texts, words)
    enough_seconds = _TOO_LONG_SECONDS  # two sizes tell a call from its texts
    while call.seconds < enough_seconds and 4 * texts * words[1] <= most_words:
        texts *= 4
        call = _timed(encode, texts, words)
        enough_seconds = _LONG_ENOUGH_SECONDS
    return call


def _faster(encode: EncodeTexts, call: Call, words: tuple[int, int]) -> Call:
    """Return the call or its repetition; one that takes too long is not repeated."""
    if call.seconds > _TOO_LONG_SECONDS:
        return call
    again = _timed(encode, int(call.texts), words)
    return min(call, again, key=lambda each: each.seconds)


def _timed(encode: EncodeTexts, count: int, words: tuple[int, int]) -> Call:
    texts = speed_texts(count, *words)
    tokens, seconds = encode(texts)
    return Call(count, sum(map(len, texts)), tokens, max(seconds, count * _LEAST_TEXT_SECONDS))


def speed_texts(count: int, least_words: int, most_words: int) -> list[str]:
    """Return texts of so many words, in an order that depends on the row."""
    texts = list[str]()
    for row in range(count):
        step = 1 + row % 31
        size = least_words + row % (most_words - least_words + 1)
        words = [_WORDS[(row + step * place) % len(_WORDS)] for place in range(size)]
        texts.append(" ".join(words))
    return texts
