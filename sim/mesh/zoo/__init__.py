"""Models for estimates that hyper_parallel does not train itself."""
