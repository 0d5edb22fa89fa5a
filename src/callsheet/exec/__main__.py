"""`python -m callsheet.exec train.py`: the same as `callsheet exec train.py`, as torchrun needs it."""

from callsheet.exec.command import main

if __name__ == "__main__":
    main()
