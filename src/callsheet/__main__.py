"""Runs callsheet's command line, for `python -m callsheet`."""

import sys

from callsheet.cli.main import main

sys.exit(main())
