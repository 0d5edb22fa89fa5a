"""Bridges: hosts run callsheet's callbacks in other frameworks' loops; guests run other frameworks' callbacks in callsheet's loop."""

_FRAMEWORKS = {
    "transformers": "huggingface",
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "ignite": "ignite",
    "torchtnt": "torchtnt",
    "composer": "composer",
    "keras": "keras",
    "accelerate": "accelerate",
}
"""The bridge that wraps a callback of another framework, by the package of the callback's class."""


def guest_hint(thing: object) -> str:
    """Return a hint that says how to wrap a callback of another framework.

    Return an empty string if no bridge is for its framework.
    """
    packages = (kind.__module__.partition(".")[0] for kind in type(thing).__mro__)
    bridge = next((_FRAMEWORKS[package] for package in packages if package in _FRAMEWORKS), None)
    return f"; wrap it: callsheet.bridges.{bridge}.guest(...)" if bridge is not None else ""
