"""CUDA tensors: programs that Triton's kernels and NCCL, or staged messages, run."""
