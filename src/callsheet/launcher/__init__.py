"""`callsheet.launch`: starts training on several ranks of one machine, from a script or a notebook."""

from callsheet.core.optional import needed_by

with needed_by(__name__):
    from callsheet.launcher.failures import LaunchError, RankFailure
    from callsheet.launcher.launching import launch

__all__ = ["LaunchError", "RankFailure", "launch"]
