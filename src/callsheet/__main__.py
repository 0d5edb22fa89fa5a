"""`python -m callsheet`."""

import sys

from callsheet.cli import main

sys.exit(main())
