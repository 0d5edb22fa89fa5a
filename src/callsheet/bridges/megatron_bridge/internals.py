"""The name of Megatron Bridge's package, and the non-public attribute of Megatron Bridge that the host uses if it exists."""

PACKAGE = "megatron-bridge"

WITHOUT = {
    "megatron.bridge.training.utils.sig_utils.DistributedSignalHandler._signal_received": (
        "a warning is logged, and a run that a signal has ended is not recorded as preempted"
    )
}
"""For each attribute that the host can do without: what happens if the installed version lacks the attribute."""
