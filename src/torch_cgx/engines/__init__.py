"""Run programs: natively on the host, on CUDA devices, and in memory as the standard for both."""
