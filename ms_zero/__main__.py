"""``python -m ms_zero``: the same as the ``ms-zero`` command."""

import sys

from ms_zero.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
