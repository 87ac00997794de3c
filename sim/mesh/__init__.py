"""Estimates of memory and time of a training step on any number of devices, computed from the training code itself.

    search -> estimate -> tracing -> program -> pricing, cost -> replay, memory -> report, explain
    job -> models -> spec -> recipe

A job is a model with a recipe, or a training run. It is traced once into programs, which are priced for a hardware and
replayed in time and in memory. `report` and `explain` present the result.

>>> from hyper_parallel.core.mesh.parallel_dims import ParallelDims
>>> import sim.mesh
>>> est = sim.mesh.estimate("llama-tiny", ParallelDims(tp=2, world_size=2), batch=2, seq_len=64, hardware="h100-sxm")
>>> est.memory.fits()
True
"""

from hyper_parallel.core.machine.calibration import Calibration, load_calibration
from hyper_parallel.core.machine.description import Machine, find_machine, machine_names
from sim.mesh.cost import UnknownOperation
from sim.mesh.estimate import Estimate, Quantity, estimate, estimate_run, price
from sim.mesh.job import Job
from sim.mesh.models import find_model, model_names
from sim.mesh.recipe import Recipe, Routing
from sim.mesh.searching.budget import fit_activations
from sim.mesh.searching.ranking import SearchResult
from sim.mesh.searching.search import search
from sim.mesh.spec import Custom
from sim.mesh.tracing.trace import trace

__all__ = [
    # Estimates of a step
    "estimate",
    "estimate_run",
    "Estimate",
    "Quantity",
    "fit_activations",
    "search",
    "SearchResult",
    # Inputs: models and recipes
    "Recipe",
    "Routing",
    "Custom",
    "find_model",
    "model_names",
    # Inputs: hardware
    "Machine",
    "find_machine",
    "machine_names",
    "Calibration",
    "load_calibration",
    # The two halves of `estimate`: `trace` depends on the program, `price` on the hardware
    "Job",
    "trace",
    "price",
    # Errors
    "UnknownOperation",
]
