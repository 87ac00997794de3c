"""What a rank does in a step, recorded from the real model, plan and engine on a rank that lives alone."""
