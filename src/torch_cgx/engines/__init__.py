"""Engines that run programs: natively on the host, on CUDA devices, and in memory as the reference for both."""
