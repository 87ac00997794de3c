"""What kernels and communication cost: figures of devices and links, fitted, published or assumed."""
