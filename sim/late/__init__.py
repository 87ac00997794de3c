"""Devices of ranks: a simulated accelerator named npu for each, whose streams run late; or a real one that they share.

switch -> autocast, module, kernels -> fused, device -> memory -> queue
switch -> shared -> shadow -> device, memory
communication -> device
"""
