"""The command line as `python -m hyper_parallel.cli`, which torchrun can start."""

from hyper_parallel.cli import main

if __name__ == "__main__":
    main()
