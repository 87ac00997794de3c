"""The probable fault where no layout explains the local tensors, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.ownership import Splits
from sim.prove import faults
from sim.prove.evidence import Bound, Evidence, Mesh, Parts, read
from sim.prove.faults import Diagnosis
from sim.prove.infer import explanations, fit, splits_by_shape

__all__ = ["Diagnosis", "diagnose"]

_MOST_SPLITS = 32

_CHECKS = (
    faults.not_finite,
    faults.scaled,
    faults.coarse,
    faults.same_values,
    faults.reordered,
    faults.permuted,
    faults.some_ranks,
    faults.scaled_sums,
    faults.blocks,
    faults.added,
    faults.copies_differ,
)


def diagnose(
    locals: Parts,
    reference: torch.Tensor,
    mesh: Mesh,
    bound: Bound = None,
    *,
    declared: Layout | None = None,
    addends: Mapping[str, torch.Tensor] | None = None,
) -> Diagnosis | None:
    """Look for the usual faults in parts that no layout explains, and say the first that is found.

    >>> full = torch.arange(1.0, 9.0)
    >>> print(diagnose([full * 2, full * 2], full, "dp=2"))
    every part is 2 times what it should be: counted once per rank of 'dp'
    >>> print(diagnose([full[4:], full[:4]], full, "tp=2"))
    the parts of the ranks along 'tp' are in another order: (1, 0)
    >>> diagnose([full, full], full, "tp=2") is None
    True

    Args:
        locals: what each rank holds, by rank.
        reference: the full tensor.
        mesh: as for `infer_layout`.
        bound: as for `infer_layout`.
        declared: who should hold what. Default: every split that gives parts of the shapes that the ranks hold.
        addends: full tensors by name, such as a bias or the input of a residual connection, which broadcast to the
            reference; it is checked whether one of them was added once per rank.

    Returns:
        None if a layout (the declared one, if there is one; else any, with sums and averages pending at most) explains
        the parts, or if nothing usual is the matter.

    Raises:
        TypeError, ValueError: as `infer_layout`.
    """
    evidence = read("cannot diagnose parts", locals, reference, mesh, bound)
    likely = splits_by_shape(evidence)
    if declared is not None:
        found = fit(locals, reference, declared, bound)
        if found.problem is not None and likely:
            return Diagnosis("shapes", found.problem)
        explained, likely = found.fits, likely and [declared.splits(evidence.full.ndim)]
    else:
        explained = bool(explanations(locals, reference, mesh, bound))
    if explained:
        return None
    if not likely:
        return faults.shapes(evidence)
    return _first(evidence, likely[:_MOST_SPLITS], addends or {})


def _first(evidence: Evidence, likely: list[Splits], addends: Mapping[str, torch.Tensor]) -> Diagnosis | None:
    for check in _CHECKS:
        for splits in likely:
            found = check(evidence, splits)
            if found is not None:
                return found
        if check is faults.blocks:
            for name, addend in addends.items():
                for splits in likely:
                    found = faults.added_known(evidence, splits, name, addend)
                    if found is not None:
                        return found
    return None
