"""The targets' names, for whoever need not import torch."""

NAMES = (
    *("payload", "pieces", "configuration", "adaptive", "default_compression", "layers", "environment"),
    *("checkpoint", "report", "membership", "chosen_bits"),
)
