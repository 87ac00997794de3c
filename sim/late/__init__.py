"""Devices of ranks: a simulated accelerator named npu for each, whose streams run late; or a real one that they share.

switch -> module, kernels -> attention, device -> memory -> queue
switch -> shared -> shadow -> device, memory
communication -> device
"""
