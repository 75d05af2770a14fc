"""What holds for all tests. Imports neither torch nor the DSL: the emulator comes before them."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("large_memory"):
            # One xdist worker gets all of them, so that two never fill the memory together.
            item.add_marker(pytest.mark.xdist_group("large_memory"))
