"""The command line: a thin handle on the library.

Exit status 0: all is well. 1: a check failed, or the model could not be captured. 2: bad usage.
"""

from whence.cli.entry import main, print_error
from whence.cli.printing import FAILED, OK, USAGE

__all__ = ["FAILED", "OK", "USAGE", "main", "print_error"]
