"""Packages that a baseline needs and that a machine may lack: imported when first called."""

import importlib
import shlex
from types import ModuleType


def require(module: str, requirement: str) -> ModuleType:
    """The module, imported.

    Raises:
        RuntimeError: it is not installed; the message names the pip requirement.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != module.split(".")[0]:
            raise  # installed, but something that it needs is not
        wanted = shlex.quote(requirement)  # a shell takes > for a redirection
        raise RuntimeError(f"not installed: pip install {wanted}") from None
