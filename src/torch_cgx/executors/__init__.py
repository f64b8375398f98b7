"""Executors run programs: they join kernels, which touch values, with whatever carries bytes."""
