"""Exits with an error, because callsheet does not support the command line with which InstructLab starts its ranks."""

import sys

from callsheet.compat.instructlab.rejected import reject_command_line
from callsheet.errors import NotSupported

if __name__ == "__main__":
    try:
        reject_command_line(sys.argv[1:])
    except NotSupported as error:
        sys.exit(str(error))
