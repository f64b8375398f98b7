"""CPU tensors: programs that the native library runs."""
