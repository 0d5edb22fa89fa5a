"""Random states are read, compared and restored."""

import random
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from callsheet.core.randomness import random_state, restore_random_state, same_random_state

DRAWS: dict[str, Callable[[], float]] = {
    "python": random.random,
    "python's gauss": lambda: random.gauss(0, 1),
    "numpy": lambda: float(np.random.rand()),  # the tests are about NumPy's global state
    "torch": lambda: float(torch.rand(())),
}


@pytest.mark.parametrize("name", DRAWS)
def test_after_restoring_a_state_the_same_number_is_drawn(name: str) -> None:
    before = random_state()
    first = DRAWS[name]()
    second = DRAWS[name]()
    restore_random_state(before)
    assert DRAWS[name]() == first
    assert first != second


@pytest.mark.parametrize("name", DRAWS)
def test_states_before_and_after_a_draw_differ(name: str) -> None:
    before = random_state()
    assert same_random_state(before, random_state())
    DRAWS[name]()
    assert not same_random_state(before, random_state())
    restore_random_state(before)
    assert same_random_state(before, random_state())


def test_a_saved_state_does_not_change_with_the_generators() -> None:
    before = random_state()
    for draw in DRAWS.values():
        draw()
    after = random_state()
    assert not same_random_state(before, after)
    assert not same_random_state(after, before)


def test_only_generators_in_both_states_are_compared() -> None:
    state = random_state()
    assert same_random_state({"python": state["python"]}, state)
    torch.rand(())
    assert same_random_state({"python": state["python"]}, random_state())


def test_restoring_does_not_change_generators_that_are_not_in_the_state() -> None:
    state = {"python": random_state()["python"]}
    torch.rand(())
    moved = random_state()
    restore_random_state(state)
    assert same_random_state(moved, random_state())


def test_without_numpy_and_torch_only_pythons_state_is_read_and_nothing_is_imported() -> None:
    code = (
        "import sys, random\n"
        "from callsheet.core.randomness import *\n"
        "from callsheet.core.randomness import random_state, restore_random_state\n"
        "s = random_state(); a = random.random(); restore_random_state(s)\n"
        "print(sorted(s), a == random.random(), 'numpy' in sys.modules, 'torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout == "['python'] True False False\n", ran.stderr
