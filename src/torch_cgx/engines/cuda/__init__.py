"""The engine for CUDA tensors: programs run as Triton kernels, and as exchanges over NCCL or shared memory."""
