"""Unmodified scripts for torchrun: on simulated ranks (`python -m sim run`), compared with one device, or estimated.

launch -> options -> modules -> packages
          options -> arguments
launch -> output
verify -> launch
          changes
estimate -> launch
estimate -> recording -> values
            recording -> reducer
            recording -> changes
"""
