"""Plans: the layout of each parameter, input and output of a model, and the code that brings tensors there.

api -> local, local_module -> region -> entry_exit
       local, local_module -> boundaries -> spelling
api -> sharding_plan -> spelling
plan_file, show -> sharding_plan
value_and_grad -> boundaries
loss -> entry_exit
"""
