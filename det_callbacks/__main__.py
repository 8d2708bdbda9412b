"""``python -m det_callbacks``: the command line."""

import sys

from det_callbacks.cli import main

if __name__ == "__main__":
    sys.exit(main())
