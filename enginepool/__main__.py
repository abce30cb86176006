"""The `enginepool` command, and `python -m enginepool`."""

import signal
import sys

# Ctrl-C ends this process at once while there is nothing to tidy up: KeyboardInterrupt in the middle of an import may be
# swallowed there, and the pool come up all the same, or crash a library that was half loaded.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from enginepool.cli import main

if __name__ == "__main__":
    sys.exit(main())
