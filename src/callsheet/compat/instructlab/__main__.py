"""What InstructLab starts on its ranks has a command line, with `--callbacks`; here there is none."""

import sys

from callsheet.compat.instructlab.refused import refuse_command_line
from callsheet.errors import NotCarried

if __name__ == "__main__":
    try:
        refuse_command_line(sys.argv[1:])
    except NotCarried as error:
        sys.exit(str(error))
