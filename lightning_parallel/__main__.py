"""`python -m lightning_parallel`: the command line."""

import sys

from lightning_parallel_cli import main

sys.exit(main())
