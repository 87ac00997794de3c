"""Side-by-side benchmarks: `python -m benchmarks` prints the table of docs/benchmarks.md."""
