"""`python -m callsheet.exec train.py`: the same as `callsheet exec train.py`, for torchrun, which runs a module with `-m`."""

from callsheet.exec.command import main

if __name__ == "__main__":
    main()
