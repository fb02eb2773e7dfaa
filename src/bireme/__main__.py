"""`python -m bireme`, and so `torchrun ... -m bireme VERB`."""

import sys

from bireme.cli import main

if __name__ == "__main__":
    sys.exit(main())
