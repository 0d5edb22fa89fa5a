"""Training on several ranks of one machine, started from a script or a notebook: `callsheet.launch`."""

from callsheet.extras import needed_by

with needed_by(__name__):
    from callsheet.launcher.failures import LaunchError, RankFailure
    from callsheet.launcher.launching import launch

__all__ = ["LaunchError", "RankFailure", "launch"]
