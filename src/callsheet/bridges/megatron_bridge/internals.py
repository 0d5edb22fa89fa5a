"""The package of Megatron Bridge, whose version the host and the guests check."""

PACKAGE = "megatron-bridge"
