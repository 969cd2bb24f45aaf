"""`python -m minieagle` and, over several ranks, `torchrun --nproc-per-node N -m minieagle generate ...`."""

import sys

from minieagle.cli import main

if __name__ == "__main__":
    sys.exit(main())
