"""Plans: the layout of each parameter, input and output of a model, and the code that brings tensors there.

api -> apply, local, value_and_grad
apply -> local, local_module -> region -> entry_exit
         local, local_module -> boundaries -> spelling
apply -> plan -> spelling
plan_file, show -> plan
value_and_grad -> boundaries
loss -> entry_exit
"""
