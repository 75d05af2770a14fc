"""The fixtures of the CPU tests, until all tests have moved."""

from tests.cpu.conftest import cuda, measure, own_cache, reference  # noqa: F401
