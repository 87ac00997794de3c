"""A simulated accelerator named npu for each rank, whose streams run late.

switch -> module, kernels -> attention, device -> memory -> queue
communication -> device
"""
