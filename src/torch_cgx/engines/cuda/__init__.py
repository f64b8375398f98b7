"""CUDA tensors: programs that run as Triton's kernels and exchanges, over NCCL or shared memory."""
