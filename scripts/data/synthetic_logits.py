import sys
from typing import Any

from scripts import data


def __getattr__(name: str) -> Any: ...  # for mypy


sys.modules[__name__] = data  # moved
