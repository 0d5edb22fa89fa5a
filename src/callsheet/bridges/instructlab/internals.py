"""The part of InstructLab that the host needs: InstructLab's callbacks. In a release without them, the host raises `NotSupported`."""

from importlib.machinery import PathFinder

PACKAGE = "instructlab-training"

CALLBACKS = "instructlab.training.callbacks"


def are_callbacks_missing() -> bool:
    """Return whether InstructLab is installed, but in a release that does not support callbacks.

    The `TrainingArgs` of such a release ignores callbacks. InstructLab is not imported, because its requirements may be missing.
    """
    path = None
    for name in ("instructlab", "instructlab.training"):
        found = PathFinder.find_spec(name, path)
        if found is None:
            return False  # InstructLab is not installed
        path = found.submodule_search_locations
    return PathFinder.find_spec(CALLBACKS, path) is None
