"""`python -m hyper_parallel`: the command line, also in a folder that has a `sim.py` of its own."""

from hyper_parallel.cli import main

if __name__ == "__main__":
    main()
