"""`python -m enginepool`: the command line."""

import sys

from enginepool.cli import main

if __name__ == "__main__":
    sys.exit(main())
