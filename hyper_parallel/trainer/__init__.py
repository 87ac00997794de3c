"""Train a model: degrees, configuration, data, the loop. `trainer.train` is the one function every rank calls."""
