"""Unmodified scripts for torchrun: on simulated ranks (`python -m sim run`), compared with one device, or estimated.

launch -> options -> modules -> packages
launch -> output
launch -> failure
verify -> launch
          changes
estimate -> launch
estimate -> recording -> values
            recording -> reducer
            recording -> changes
"""
