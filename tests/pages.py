"""The examples of the documentation's pages, and the configurations of deploy/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[1] / "deploy"


def code_blocks(page: str, language: str) -> list[str]:
    """Return the configurations or programs in the text of a page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def deployed(path: str) -> Any:
    """Return a configuration of deploy/."""
    return yaml.safe_load((DEPLOY / path).read_text())
