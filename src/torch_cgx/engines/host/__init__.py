"""The engine for CPU tensors, whose programs the native library runs."""
