"""Errors of Muon: what is no matrix, and what torch's optimizers do with the rest."""

import copy
import pickle

import pytest
import torch
from torch import nn

import hyper_parallel as hp


def test_what_is_no_matrix_belongs_to_adamw():
    layer = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="a parameter of 1 dims is neither a matrix nor a stack of matrices") as error:
        hp.Muon(layer.parameters())
    assert "parameter number 1 of the group: (4,) torch.float32" in str(error.value)
    assert "use_muon" in str(error.value)
    with pytest.raises(ValueError, match="Muon is for real parameters"):
        hp.Muon([nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))])
    with pytest.raises(ValueError, match="there is no parameter to update"):
        hp.Muon([])
    with pytest.raises(ValueError, match="a group has no parameters"):
        hp.Muon([{"use_muon": False}])
    with pytest.raises(ValueError, match=r"betas has 3 numbers, and 2 are needed"):
        hp.Muon([layer.weight], betas=(0.9, 0.9, 0.9))
    optimizer = hp.Muon([{"params": layer.weight}, {"params": [layer.bias], "use_muon": False}])
    with pytest.raises(ValueError, match="there is no kind of adjust_lr_fn 'rms'"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], "adjust_lr_fn": "rms"})


def test_a_sparse_gradient_is_refused():
    weight = nn.Parameter(torch.zeros(3, 2))
    weight.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(ValueError, match="cannot update by Muon: a gradient is sparse"):
        hp.Muon([weight]).step()


def test_adamw_for_the_rest_is_torchs():
    def trained(optimizer_of):
        torch.manual_seed(0)
        embedding = nn.Embedding(7, 4)
        optimizer = optimizer_of(embedding.parameters())
        for _ in range(3):
            embedding(torch.arange(5)).square().sum().backward()
            optimizer.step(lambda: 1.0)
            optimizer.zero_grad()
        return embedding.weight.detach()

    ours = trained(lambda params: hp.Muon(params, use_muon=False, lr=0.1))
    torch.testing.assert_close(ours, trained(lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1)))


def test_nothing_to_orthogonalize_and_nothing_without_a_gradient():
    empty, idle = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(2, 2))
    empty.grad = torch.zeros(0, 3)
    optimizer = hp.Muon([empty, idle])
    optimizer.step()
    assert torch.equal(idle, torch.ones(2, 2))
    assert list(optimizer.state) == [empty]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_goes_on_as_the_original_does(copied):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4, bias=False)

    def trained(module, optimizer):
        module(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return module.weight.detach().clone()

    optimizer = hp.Muon(layer.parameters(), lr=0.1)
    trained(layer, optimizer)
    twins = copied((layer, optimizer))
    assert torch.equal(trained(*twins), trained(layer, optimizer))
