from scripts.common.environment import Captured, RunInfo, checked  # noqa: F401  # moved
from scripts.common.environment import read_json as read  # noqa: F401
