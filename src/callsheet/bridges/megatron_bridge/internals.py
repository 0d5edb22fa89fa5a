"""The package of Megatron Bridge, whose version the host and the guests check, and its part that is not public API."""

PACKAGE = "megatron-bridge"

WITHOUT = {
    "megatron.bridge.training.utils.sig_utils.DistributedSignalHandler._signal_received": (
        "a warning is logged, and a run that a signal has ended is not recorded as preempted"
    )
}
"""For a part that the host can do without: what happens without it."""
