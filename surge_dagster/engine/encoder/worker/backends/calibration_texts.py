"""Texts to calibrate a quantized model with, and others to judge it by: the same on every machine.

Quantization has to know the range of every layer's values, and these follow from texts. They are composed here instead
of taken from the catalog: a model calibrated on whichever partition came first would give other vectors in each run.
What they must have is variety: languages, names, numbers, code, and lengths from one word to more than a model reads.

Changing anything here changes vectors: move `INT8_RECIPE` in `spec.py` with it.
"""

from __future__ import annotations

import random

_SENTENCES = (
    "A steel bottle that keeps tea warm until the evening.",
    "Cotton shirt with long sleeves, garden green, size 42.",
    "The bridge was closed for repairs, so the bus took the road along the river.",
    "Returns the number of rows that match the filter, or zero when the table is empty.",
    "Our neighbours bake bread on Saturdays and give half of it away.",
    "Raises an error if the connection was lost and cannot be opened again.",
    "Das Museum am Hafen zeigt alte Karten und ein Modell der Stadt.",
    "Le train de nuit arrive à Lyon peu avant sept heures.",
    "La receta lleva dos limones, aceite de oliva y un poco de romero.",
    "Il mercato apre alle otto e chiude quando finisce la frutta.",
    "Письмо сто лет лежало в библиотеке под старыми картами.",
    "駅の近くの小さな店で温かいうどんを食べた。",
    "这家工厂每天生产三千个自行车轮子。",
    "الحديقة مغلقة يوم الاثنين وتفتح بقية الأسبوع.",
    "def area(width: float, height: float) -> float: return width * height",
    "for name, size in sorted(files.items()): print(f'{name}: {size / 1024:.1f} KiB')",
    "SELECT city, COUNT(*) FROM orders WHERE paid = TRUE GROUP BY city ORDER BY 2 DESC;",
    "Heart rate fell by 11 % in the group that walked for thirty minutes a day.",
    "The court held that the notice had been sent in time and dismissed the appeal.",
    "Invoice 2024-0817: three oak shelves at 89.50 EUR each, delivery free of charge.",
    "Quarterly revenue rose to 4.2 million, mostly from repairs and spare parts.",
    "She tuned the old violin, played one slow note and put it back in its case.",
    "Warning: disk usage is above 90 %, remove old snapshots or extend the volume.",
    "Two goals in the last five minutes turned a lost match into a draw.",
    "Volcanic ash makes the soil dark and good for vines.",
    "Please reset my password, the link in your message has expired.",
    "Wireless keyboard, 87 keys, USB-C, works with three devices at once.",
    "How do I remove a coffee stain from a wool carpet?",
    "The telescope sees galaxies whose light left them before the Earth was formed.",
    "Mix the flour with cold butter, rest the dough for an hour, then roll it thin.",
    "Best holiday ever 🌊🌞 we saw dolphins twice!",
    "Terms apply; see section 4(b) for exceptions and the period of notice.",
    "The patient reports mild pain in the left knee after climbing stairs.",
    "A queue keeps the order of its items; a stack gives back the latest one first.",
    "Retry with a longer delay after each failure and stop after the third one.",
    "https://example.org/catalog?page=3&sort=price#reviews",
    "Ships were built here until 1962; today the dock is a swimming pool.",
    "Light rain in the morning, strong wind from the west, clear at night.",
    "The committee could not agree on a date and met again in March.",
    "Small flat to let, two rooms, quiet street, no lift, pets welcome.",
)
_SUBJECTS = (
    *("lamp", "kettle", "invoice", "parser", "river", "teacher", "engine", "garden", "contract", "violin"),
    *("router", "blanket", "recipe", "satellite", "bicycle", "vaccine", "library", "mountain", "printer", "harbour"),
)
_QUALITIES = (
    *("small", "reliable", "broken", "blue", "expensive", "ancient", "portable", "quiet", "digital", "wooden"),
    *("fast", "empty", "famous", "cheap", "heavy", "modern"),
)
_ENDINGS = (
    *("for children", "in winter", "with a guarantee of two years", "near the station", "that nobody ordered"),
    *("without instructions", "made in Portugal", "under repair", "for sale", "as described in the manual"),
    *("for beginners", "after the storm", "at half the price", "written in Rust", "of the last century"),
)
_LONGEST_SENTENCES = 16


def calibration_texts(count: int) -> list[str]:
    """Texts of one word to many sentences, which the ranges of a quantized model are taken from."""
    drawn = random.Random(20261121)
    return [_text(drawn, number) for number in range(count)]


def judging_texts(count: int) -> list[str]:
    """Short texts with near relatives among them, none twice: what a search would have to tell apart."""
    drawn = random.Random(7)
    texts: dict[str, None] = dict.fromkeys(_SENTENCES)
    while len(texts) < count:
        texts[f"{_pick(drawn, _QUALITIES)} {_pick(drawn, _SUBJECTS)} {_pick(drawn, _ENDINGS)}"] = None
    return list(texts)[:count]


def _text(drawn: random.Random, number: int) -> str:
    if number % 10 == 0:
        return _pick(drawn, _SUBJECTS)
    if number % 3 == 0:
        return f"{_pick(drawn, _QUALITIES)} {_pick(drawn, _SUBJECTS)} {_pick(drawn, _ENDINGS)}"
    # Few sentences most of the time, and up to more than a model reads.
    sentences = max(1, int(_LONGEST_SENTENCES ** drawn.random()))
    return " ".join(_pick(drawn, _SENTENCES) for _ in range(sentences))


def _pick(drawn: random.Random, choices: tuple[str, ...]) -> str:
    # `random()` alone gives the same numbers in every version of Python; `choice` does not promise to.
    return choices[int(drawn.random() * len(choices))]
