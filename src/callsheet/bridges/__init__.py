"""Bridges: hosts run callsheet's callbacks in other frameworks' loops; guests run other frameworks' callbacks in callsheet's loop."""

_BRIDGE_OF_PACKAGE = {
    "transformers": "huggingface",
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "ignite": "ignite",
    "torchtnt": "torchtnt",
    "composer": "composer",
    "keras": "keras",
    "accelerate": "accelerate",
}
"""For each package that defines a framework's callbacks, the name of the bridge that wraps these callbacks."""


def guest_hint(thing: object) -> str:
    """Return a hint that says how to wrap `thing`, a callback of another framework.

    Return an empty string if callsheet has no bridge for the framework of `thing`.
    """
    packages = (kind.__module__.partition(".")[0] for kind in type(thing).__mro__)
    bridge = next((_BRIDGE_OF_PACKAGE[package] for package in packages if package in _BRIDGE_OF_PACKAGE), None)
    return f"; wrap it: callsheet.bridges.{bridge}.guest(...)" if bridge is not None else ""
