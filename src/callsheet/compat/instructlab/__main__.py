"""Exits with an error: InstructLab starts each rank with such a command, but callsheet does not support this command."""

import sys

from callsheet.compat.instructlab.rejected import reject_command_line
from callsheet.errors import NotSupported

if __name__ == "__main__":
    try:
        reject_command_line(sys.argv[1:])
    except NotSupported as error:
        sys.exit(str(error))
