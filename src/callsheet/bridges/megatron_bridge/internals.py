"""Megatron Bridge's package, whose version the bridge checks, and the attribute that the host uses and that is not public API."""

PACKAGE = "megatron-bridge"

WITHOUT = {
    "megatron.bridge.training.utils.sig_utils.DistributedSignalHandler._signal_received": (
        "a warning is logged, and a run that a signal has ended is not recorded as preempted"
    )
}
"""For each attribute that the host can do without: what happens if the installed version lacks the attribute."""
