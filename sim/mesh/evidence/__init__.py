"""Published training runs, predicted: how far off, by source, and held-out runs apart."""
