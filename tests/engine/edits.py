"""Edits of a partition's rows, as they happen between two nightly runs."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tests.small_catalogs import Rows

EDITS = ("insert", "delete", "edit", "move", "swap ids", "duplicate")


def edited(rows: Rows, edits: list[str], random: Random, texts: Sequence[str] = ()) -> Rows:
    """The rows after some edits, each at a random place; ids stay unique, and so do new texts but
    for given ones."""
    found = list(rows)
    taken = {row_id for row_id, _ in rows}
    for number, edit in enumerate(edits):
        fresh = f"{random.getrandbits(40):x}.{number}"
        while fresh in taken:  # hypothesis draws the same bits again and again
            fresh += "."
        place, other = (random.randrange(len(found)) if found else 0 for _ in range(2))
        if edit == "insert":
            found.insert(place, (fresh, random.choice(texts) if texts else f"inserted {fresh}"))
        elif not found:
            continue
        elif edit == "delete":
            del found[place]
        elif edit == "edit":
            text = (
                random.choice(texts)
                if texts
                else f"edited {fresh}" + " long" * random.choice([0, 0, 600])
            )
            found[place] = found[place][0], text
        elif edit == "move":
            found.insert(other, found.pop(place))
        elif edit == "swap ids":
            one = found[place]
            two = found[other]
            found[place] = (two[0], one[1])
            found[other] = (one[0], two[1])
        else:
            found.insert(other, (fresh, found[place][1]))
    return found
