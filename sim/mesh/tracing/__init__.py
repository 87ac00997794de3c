"""The step of one rank, recorded from the real model, plan and engine on a rank that lives alone."""
