"""Places in a document that its own content chooses, so that an edit moves only those near it.

A splitter fills one chunk after the other from the start, so an edit at the top of a document would
move every later boundary, and every later chunk would be encoded again. Therefore a document is
first divided into sections of several chunks. A section begins at a place whose hash is the least
among all candidates in its neighbourhood. This depends on nothing but the text near it (the local
minimum, as in content-defined chunking: Bjørner, Blass, Gurevich, "Content-dependent chunking for
differential compression, the local maximum approach", 2010).
"""

from __future__ import annotations

import re
import zlib
from bisect import bisect_left
from collections import deque
from itertools import pairwise

from surge_dagster.engine.model.chunk_rule import ChunkFormat

_HEADING = re.compile(r"(?m)^(?=#{1,6} )")
_FENCE = re.compile(r"(?ms)^(```|~~~).*?(?:^\1|\Z)")
_PARAGRAPH = re.compile(r"\n[ \t]*\n\s*(?=\S)")
_LINE = re.compile(r"\n\s*(?=\S)")
_SENTENCE = re.compile(r"(?:[.!?…][\"')\]]*\s+|[\u3002\uff01\uff1f]\s*)(?=\S)")
_WORD = re.compile(r"\s+(?=\S)")
_LEVELS = {
    "text": (_PARAGRAPH, _LINE, _SENTENCE, _WORD),
    "markdown": (_HEADING, _PARAGRAPH, _LINE, _SENTENCE, _WORD),
}
_HASHED = 48  # characters after a candidate


def sections(text: str, distance: int, text_format: ChunkFormat) -> list[int]:
    """Return where the sections of a text begin, ascending, the first at 0.

    Args:
        distance: characters between two of these places at least. A section without any candidate
            may be of any length; all others have at most four times as many.
    """
    fenced: list[tuple[int, int]] = []
    if text_format == "markdown":
        fenced = [match.span() for match in _FENCE.finditer(text)]

    borders = [0, len(text)]
    for level in _LEVELS[text_format]:
        found = [0]
        for start, stop in pairwise(borders):
            if stop - start > 4 * distance:
                candidates = [match.end() for match in level.finditer(text, start, stop)]
                outside = [place for place in candidates if not _within(place, fenced)]
                found += _least(text, outside, start, stop, distance)
            found.append(stop)
        borders = found
    return borders[:-1] or [0]


def _within(place: int, spans: list[tuple[int, int]]) -> bool:
    after = bisect_left(spans, (place, 0))
    return after > 0 and place < spans[after - 1][1]


def _least(text: str, candidates: list[int], start: int, stop: int, distance: int) -> list[int]:
    """Return the candidates whose hash is less than that of all others within the distance."""
    inside = [place for place in candidates if start < place < stop]
    hashes = [zlib.crc32(text[place : place + _HASHED].encode()) for place in inside]
    chosen: list[int] = []
    window: deque[int] = deque()  # places in `inside`, of ascending hashes
    ahead = 0
    for current, place in enumerate(inside):
        while ahead < len(inside) and inside[ahead] <= place + distance:
            while window and hashes[window[-1]] > hashes[ahead]:
                window.pop()
            window.append(ahead)
            ahead += 1
        while inside[window[0]] < place - distance:
            window.popleft()
        far_from_ends = place - start >= distance and stop - place >= distance
        if window[0] == current and far_from_ends:
            chosen.append(place)
    return chosen
