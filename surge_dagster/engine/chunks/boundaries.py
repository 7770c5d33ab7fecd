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
from bisect import bisect_left, bisect_right
from collections import deque
from itertools import pairwise

from surge_dagster.engine.model.chunk_rule import ChunkFormat

_HEADING = re.compile(r"(?m)^#{1,6} ")
_FENCE = re.compile(r"(?ms)^(```|~~~).*?(?:^\1|\Z)")
# White space, or the end of a sentence that needs none after it.
_GAP = re.compile(r"[\u3002\uff01\uff1f]\s*|\s+")
_SENTENCE_ENDS = (".", "!", "?", "…", "\u3002", "\uff01", "\uff1f")
_CLOSING = "\"')]"
_LONGEST = 4  # distances of a section; a longer one is divided
_HASHED = 48  # characters after a candidate
_HEADINGS, _PARAGRAPHS, _LINES, _SENTENCES, _WORDS = range(5)


def sections(text: str, distance: int, text_format: ChunkFormat) -> list[int]:
    """Return where the sections of a text begin, ascending, the first at 0.

    Args:
        distance: characters between two of these places at least. A section without any candidate
            may be of any length; all others have at most four times as many.
    """
    if len(text) <= _LONGEST * distance:
        return [0]
    candidates = _candidates(text)
    if text_format == "markdown":
        fenced = [match.span() for match in _FENCE.finditer(text)]
        candidates[_HEADINGS] = [match.start() for match in _HEADING.finditer(text)]
        candidates = [[each for each in level if not _within(each, fenced)] for level in candidates]

    borders = [0, len(text)]
    for level in candidates:
        found = [0]
        for start, stop in pairwise(borders):
            if stop - start > _LONGEST * distance:
                inside = level[bisect_right(level, start) : bisect_left(level, stop)]
                found += _least(text, inside, start, stop, distance)
            found.append(stop)
        borders = found
    return borders[:-1]


def _candidates(text: str) -> list[list[int]]:
    """Return where paragraphs, lines, sentences and words begin, each level with its own places.

    Each gap is looked at once, however long it is.
    """
    levels: list[list[int]] = [[], [], [], [], []]
    for gap in _GAP.finditer(text):
        if gap.end() == len(text):
            continue
        lines = gap[0].count("\n")
        before = text[max(0, gap.start() - 3) : gap.start() + 1].rstrip().rstrip(_CLOSING)
        if lines > 1:
            level = _PARAGRAPHS
        elif lines == 1:
            level = _LINES
        elif before.endswith(_SENTENCE_ENDS):
            level = _SENTENCES
        else:
            level = _WORDS
        levels[level].append(gap.end())
    return levels


def _within(place: int, spans: list[tuple[int, int]]) -> bool:
    after = bisect_left(spans, (place, 0))
    return after > 0 and place < spans[after - 1][1]


def _least(text: str, inside: list[int], start: int, stop: int, distance: int) -> list[int]:
    """Return the candidates whose hash is less than that of all others within the distance."""
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
