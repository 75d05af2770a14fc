"""Import of a baseline's packages at the first call: a machine may lack them."""

import importlib
import shlex
from types import ModuleType


def require(module: str, requirement: str) -> ModuleType:
    """Import and return a module.

    Raises:
        RuntimeError: the module is not installed; the message names the pip requirement.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != module.split(".")[0]:
            raise  # the module is installed, but one of its dependencies is not
        wanted = shlex.quote(requirement)  # quotes >, which is a redirection in a shell
        raise RuntimeError(f"not installed: pip install {wanted}") from None
