"""The default values of arguments that the Trainer, the recipes and the hosts share."""

LOCK_TIMEOUT_SECONDS = 30.0
"""How long a run waits for the lock of its folder, if another process holds it."""

LOG_INTERVAL = "10ba"
"""How often a metrics record is made."""

TIMEOUT_SECONDS = 600.0
"""How long a rank waits for the other ranks in a collective."""
