from scripts.common.program import LFS_POINTER, write_json  # noqa: F401  # moved
from scripts.common.program import write_file as write  # noqa: F401
