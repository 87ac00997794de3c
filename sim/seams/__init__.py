"""What the simulator changes in Python while a world is alive; ``sim/torch_seams.py`` lists it and changes torch."""
