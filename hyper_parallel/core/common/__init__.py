"""Leaves that every part imports: `errors` needs nothing, not even torch, which a command's help does without;
`checks` needs torch.
"""
