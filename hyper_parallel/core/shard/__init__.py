"""Plans: the layouts of a model's parameters, inputs and outputs, and the code that redistributes tensors to them.

api -> local, local_module -> region -> entry_exit
       local, local_module -> boundaries -> spelling
api -> sharding_plan -> spelling
plan_file, show -> sharding_plan
value_and_grad -> boundaries
loss -> entry_exit
"""
