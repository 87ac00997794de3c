"""Everything that is changed in torch and in Python while a world is alive.

install -> process_groups, dtensor, devices, process -> rank -> torch_modules
install -> settings -> rank
install -> helper_threads -> rank_thread -> devices
install -> operators -> rank
install -> locks
"""
