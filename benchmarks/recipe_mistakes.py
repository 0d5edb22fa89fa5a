"""Random mistakes in recipe files: how many messages are one line and name the line of the mistake.

Each mistake changes one value or one key of a complete recipe file: a shipped recipe with all defaults, four callbacks and a
scheduler. A few changes are no mistakes, such as null for a key that may be null; these files must be accepted.

    python benchmarks/recipe_mistakes.py [--mistakes 1000] [--seed 1]
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from callsheet.cli.recipe import prepare_recipe
from callsheet.cli.shipped import RECIPES
from callsheet.errors import ConfigError
from callsheet.recipes.yaml_file import line_of
from timing import machine

VALUES: dict[str, Any] = {"a text": "zzz", "null": None, "a list": [1, "q"], "a mapping": {"u": 1}, "a negative number": -17.5}
"""What a value is replaced by."""
KEY = "a misspelled key"
CALLBACKS = """
- class_path: callsheet.callbacks.LRMonitor
- class_path: callsheet.callbacks.CheckpointSaver
  name: saver
  init_args: {save_interval: 10ba, keep: 3, mode: min, monitor: validation/loss}
- class_path: callsheet.callbacks.EMA
  init_args: {decay: 0.9}
- callsheet.callbacks.SpeedMonitor
"""


def complete(recipe: str) -> dict[str, Any]:
    """Return the content of a shipped recipe file with all defaults, and with values in nested places."""
    scheduler = ["--scheduler=torch.optim.lr_scheduler.StepLR", "--scheduler.step_size=3"]
    content: dict[str, Any] = yaml.safe_load(prepare_recipe(recipe, scheduler, command="show").resolved)
    content["callbacks"] = yaml.safe_load(CALLBACKS)
    if "lora" in content:
        content["lora"] = {"r": 4, "alpha": 8.0}
        content["train"] = {"path": "train.jsonl", "limit": 4}
        content["validation"] = {"a": {"path": "a.jsonl", "split": "train"}, "b": {"path": "b.jsonl"}}
    return content


def leaves(content: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of each value: the keys and list indexes that lead to it."""
    if isinstance(content, (dict, list)) and content:
        for name, value in content.items() if isinstance(content, dict) else enumerate(content):
            yield from leaves(value, (*path, name))
    else:
        yield path


def changed(content: dict[str, Any], rng: random.Random) -> tuple[dict[str, Any], str, str]:
    """Return a changed copy of the content, the key that was changed, and the kind of the change."""
    copy = yaml.safe_load(yaml.safe_dump(content, sort_keys=False))
    path = rng.choice([each for each in leaves(copy) if each[0] != "recipe"])
    kind = rng.choice([*VALUES, KEY] if isinstance(path[-1], str) else [*VALUES])
    node = copy
    for word in path[:-1]:
        node = node[word]
    if kind == KEY:
        word = str(path[-1])
        at = rng.randrange(len(word))
        wrong = word[:at] + word[at + 1 :] if len(word) > 3 else f"{word}x"
        entries = [(wrong if name == word else name, value) for name, value in node.items()]
        node.clear()
        node.update(entries)
        path = (*path[:-1], wrong)
    else:
        node[path[-1]] = VALUES[kind]
    return copy, "".join(f"[{word}]" if isinstance(word, int) else f".{word}" for word in path).removeprefix("."), kind


def outcome(content: dict[str, Any], key: str) -> str:
    """Return how a recipe file is answered."""
    file = Path("mistake.yaml")
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    line = line_of(file, key)
    try:
        prepare_recipe(str(file), command="show")
    except ConfigError as error:
        place = str(error).split(":")[:2]
        if "\n" in str(error) or place[0] != file.name or not place[1].isdigit():
            return "without a line"
        return "the line" if int(place[1]) == line else "a line beside it" if abs(int(place[1]) - line) <= 2 else "another line"
    except Exception:
        return "a traceback"
    return "accepted"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mistakes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng, counts, seconds = random.Random(options.seed), defaultdict[str, Counter[str]](Counter), []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        contents = [complete(recipe) for recipe in RECIPES]
        for number in range(options.mistakes):
            content, key, kind = changed(rng.choice(contents), rng)
            start = time.perf_counter()
            counts[kind][outcome(content, key)] += 1
            seconds.append(time.perf_counter() - start)
            if number % 100 == 99:
                print(f"{number + 1} of {options.mistakes}", file=sys.stderr)
    names = ("the line", "a line beside it", "another line", "without a line", "a traceback", "accepted")
    print(
        f"{machine()}; {options.mistakes} changes, seed {options.seed}; median {median(seconds):.2f} s, at most {max(seconds):.1f} s\n"
    )
    print(f"| change | {' | '.join(names)} |\n| --- |{' --- |' * len(names)}")
    for kind in (*VALUES, KEY):
        print(f"| {kind} | {' | '.join(str(counts[kind][name]) for name in names)} |")
    print(f"| all | {' | '.join(str(sum(each[name] for each in counts.values())) for name in names)} |")


if __name__ == "__main__":
    main()
