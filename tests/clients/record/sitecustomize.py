"""What Python imports by itself when it starts and this folder is on its path: the recorder of a client's ranks."""

import os

# A rank of torchrun, or the process of all simulated ranks; not torchrun itself, which needs no torch.
if "CLIENTS_RECORD" in os.environ and ("RANK" in os.environ or "CLIENTS_SIMULATED" in os.environ):
    import recorder

    recorder.begin()
