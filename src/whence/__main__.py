"""`python -m whence`."""

import sys

from whence.cli import main

sys.exit(main())
