"""A simulated GPU: the tests that need one run on a PyTorch without CUDA, by `python -m tests.simulated_gpu`.

A library of C++ gives PyTorch tensors of device type "cuda", and `torch.cuda` is made to tell of them. So all of our
code for GPUs runs, and PyTorch's that asks for one: captures, budgets in blocks of CUDA's allocator, statistics,
events, generators, autograd's own thread, and copies in streams of their own, which run as late as they may. With
`torch_cuda.any_order()` sums of scattered terms, of convolutions' and attention's backward, and reductions have other
last bits in each call, as on a GPU. Nothing of it says how fast anything is.
"""
